"""The whole algorithm on one page: an agent model learns from the rewards of its own attempts.

    python examples/minimal_grpo.py POLICY TASKS [--steps 3] [--seed 0]

POLICY is a Hugging Face model directory and TASKS a directory of `pyfix` tasks, such as the quickstart leaves in its
run directory: `policy/sft` and `tasks/train`. A step plays a group of attempts at each of a few tasks, compares each
with its group, and updates the weights once. Read it from the bottom: `train`, `play`, `answer`, `loss_of`.

There is one process, no batching and no cache: every token costs a forward pass over the whole conversation, in the
network of transformers and not in ours. It is slow so that it is obviously right, and the run-time is held to it: with
one sampler and no staleness `etude train` draws the same tokens and computes the same losses, step for step
(`tests/end_to_end/test_oracle.py`). What the run-time adds is speed, any agent program, and all that can go wrong.

WARNING: what the policy writes is run by /bin/sh with your rights, in a temporary directory. That will do for a tiny
policy that has never seen more than `cat` and `sed`. For any other use the run-time, which has sandboxes.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, run
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from etude.gateway.renderers.registry import load_renderer
from etude.gateway.sessions import call_seed
from etude.interfaces import Renderer
from etude.rollout.group import derive_seed
from etude.sampling.engines.torch_draw import uniforms
from etude.tasks.harbor import load_tasks
from etude.tasks.source import SeededTaskSource
from etude.types import Task

# What the run-time does unless it is told otherwise: how tokens are drawn, what a session may spend, which importance
# ratios are trusted, and how the weights move.
TEMPERATURE, TOP_K, TOP_P = 1.0, 64, 0.97
MAX_TOKENS, MAX_CALLS, MAX_SESSION_TOKENS = 128, 12, 4096
MIS_LOW, MIS_HIGH = 0.5, 5.0
BETAS, GRAD_CLIP = (0.9, 0.98), 1.0

# The agent program. This is harnesses/mini turned inside out: there it calls the model over HTTP, from a sandbox.
SYSTEM = "Do the task with the shell tool. Call submit when it is done."
REMINDER = "Call a tool: shell to go on, submit if the task is done."
CUT_OFF = "The answer was cut off at its longest length. Be brief and call a tool."
TOOLS = json.loads("""[
    {"type": "function", "function": {"name": "shell",
     "description": "Run a command with /bin/sh and return its output.",
     "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}},
    {"type": "function", "function": {"name": "submit", "description": "End the task.",
     "parameters": {"type": "object", "properties": {}}}}
]""")

# Answers each call of a task's tests with a line of JSON, in a process of its own. What goes wrong ends it early.
ANSWER_CALLS = """
import json, signal, sys
signal.alarm(10)
sys.path.insert(0, ".")
suite = json.load(sys.stdin)
module = __import__(suite["module"])
for case in suite["cases"]:
    print(json.dumps(getattr(module, case["function"])(*case["arguments"])))
"""


class Drawn(NamedTuple):
    """One token that the policy drew."""

    place: int
    """Index into the conversation."""
    support: Tensor
    """Ids that could have been drawn, ascending."""
    logq: Tensor
    """Their log-probabilities at the time."""
    column: int
    """Which of them was drawn."""


class Attempt(NamedTuple):
    """One session of the agent."""

    ids: list[int]
    """The whole conversation: what was drawn, and what was said around it."""
    drawn: list[Drawn]
    reward: float


class Step(NamedTuple):
    """One update of the weights."""

    loss: float
    grad_norm: float
    """Before it was clipped."""
    groups: list[list[Attempt]]


def logits_of(model: nn.Module, ids: list[int]) -> Tensor:
    """Return f32[tokens, vocab]; row t is about token t + 1."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float() / TEMPERATURE


@torch.no_grad()
def answer(model: nn.Module, ids: list[int], *, seed: int, limit: int, stops: tuple[int, ...]) -> list[Drawn]:
    """Draw one answer, token by token, and append it to `ids`.

    The logits are cut to top-k, then to top-p, and their CDF is inverted in order of id. The n-th random number depends
    on the seed and on n alone: batched with others or not, the answer is the same.
    """
    drawn: list[Drawn] = []
    for uniform in uniforms(np.full(limit, seed, np.uint64), np.arange(limit, dtype=np.uint64)):
        values, likely = logits_of(model, ids)[-1].topk(TOP_K)
        logprobs = values.log_softmax(0)
        kept = logprobs.exp().cumsum(0) - logprobs.exp() < TOP_P
        support, order = likely[kept].sort()
        logq = logprobs[kept][order].log_softmax(0)
        cdf = logq.double().exp().cumsum(0)
        column = int(torch.searchsorted(cdf, cdf[-1:] * float(uniform), right=True))
        drawn.append(Drawn(len(ids), support, logq, column))
        ids.append(int(support[column]))
        if ids[-1] in stops:
            break
    return drawn


def play(model: nn.Module, renderer: Renderer, task: Task, *, seed: int, context: int) -> Attempt:
    """Let the agent work on a task until it submits, gives up or meets a limit, and grade what it left."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
    ids, drawn, reminded = renderer.render(messages, TOOLS), list[Drawn](), False
    with TemporaryDirectory() as workdir:
        shutil.copytree(Path(task.path, "environment"), workdir, dirs_exist_ok=True)
        for call in range(MAX_CALLS):
            limit = min(MAX_TOKENS, MAX_SESSION_TOKENS - len(drawn), context - len(ids))
            if limit <= 0:
                break
            said = answer(model, ids, seed=call_seed(seed, call), limit=limit, stops=renderer.stop_token_ids)
            drawn += said
            told = use_tools(renderer.parse(ids[-len(said) :]), workdir)
            if told is None or (reminded and not told):
                break
            reminded = reminded or not told
            finished = ids[-1] in renderer.stop_token_ids
            nudge = {"role": "user", "content": REMINDER if finished else CUT_OFF}
            tail = [{"role": "tool", "content": text} for text in told] or [nudge]
            # The conversation only grows: what was drawn is never rendered, let alone tokenised, again.
            extension = renderer.extend(tail, finished=finished)
            if extension is None:
                break
            ids += extension
        return Attempt(ids, drawn, grade(task, workdir))


def use_tools(message: Mapping[str, Any], workdir: str) -> list[str] | None:
    """Return what the agent is told about each tool that it called, or None when it submits."""
    told: list[str] = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if name == "submit":
            return None
        told.append(run_shell(arguments.get("command"), workdir) if name == "shell" else f"there is no tool {name}")
    return told


def run_shell(command: object, workdir: str) -> str:
    """Run a command and return what the agent is shown of it."""
    if not isinstance(command, str) or "\0" in command:
        return 'arguments must be {"command": "..."}'
    program = ["sh", "-c", command.encode("utf-8", "replace")]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    ran = run(program, cwd=workdir, env=env, timeout=30, check=False, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    text = ran.stdout.decode("utf-8", "replace")
    if not ran.returncode:
        return text or "(no output)"
    return text + ("" if not text or text.endswith("\n") else "\n") + f"[exit {ran.returncode}]"


def grade(task: Task, workdir: str) -> float:
    """Return 1 when the module answers every call of the task's tests right, else 0."""
    suite = Path(task.path, "tests", "cases.json").read_text()
    program = [sys.executable, "-I", "-S", "-c", ANSWER_CALLS]
    ran = run(program, cwd=workdir, input=suite.encode(), check=False, capture_output=True)
    expected = [json.dumps(case["expected"]).encode() for case in json.loads(suite)["cases"]]
    return float(ran.stdout.splitlines() == expected)


def loss_of(model: nn.Module, attempt: Attempt, advantage: float) -> Tensor:
    """Return the sum over drawn tokens of -A [w_a log p_a - sum_v q_v w_v log p_v], where w and q are constants.

    p is the policy that learns, q the one that drew, both on the support that was drawn from. Here they differ by
    rounding only: each ratio w = p / q is 1, and the sum, which recentres the score, has no gradient. The run-time has
    samplers that are late or rounded and needs it all. It also replays the experts that their routers chose: at equal
    weights those are the routers' own choice, so there is nothing to replay here.
    """
    logits = logits_of(model, attempt.ids)
    total = logits.new_zeros(())
    for token in attempt.drawn:
        logp = logits[token.place - 1, token.support].log_softmax(0)
        ratio = (logp.detach() - token.logq).exp()
        weight = torch.where((ratio >= MIS_LOW) & (ratio <= MIS_HIGH), ratio, 0.0)
        centre = (token.logq.exp() * weight * logp).sum()
        total = total - advantage * (weight[token.column] * logp[token.column] - centre)
    return total


def train(policy: Path, tasks: Path, *, seed: int, steps: int, groups: int, group_size: int, lr: float) -> list[Step]:
    """Train for some steps and return what happened in each. The policy's directory is left as it is."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)  # pyright: ignore[reportUnknownMemberType]
    context = model.config.max_position_embeddings
    renderer = load_renderer(policy)
    source = SeededTaskSource(load_tasks(tasks), seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0)
    done: list[Step] = []
    for step in range(steps):
        played: list[list[Attempt]] = []
        for ticket in range(step * groups, (step + 1) * groups):
            task = source.next_task()
            seeds = [derive_seed(seed, "rollout", ticket, index, 0) for index in range(group_size)]
            played.append([play(model, renderer, task, seed=one, context=context) for one in seeds])
        attempts = [attempt for group in played for attempt in group]
        # One count for the whole step: a token weighs the same in a long attempt as in a short one.
        num_tokens = sum(len(attempt.drawn) for attempt in attempts)
        loss = 0.0
        for group in played:
            # Not divided by the deviation as well: that would up-weight groups that the policy has nearly solved.
            mean = sum(attempt.reward for attempt in group) / group_size
            for attempt in group:
                part = loss_of(model, attempt, attempt.reward - mean) / num_tokens
                part.backward()  # pyright: ignore[reportUnknownMemberType]
                loss += part.item()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP).item()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()
        reward = sum(attempt.reward for attempt in attempts) / len(attempts)
        print(f"step {step + 1}  reward {reward:.3f}  loss {loss:+.6f}  grad {grad_norm:.4f}")
        done.append(Step(loss, grad_norm, played))
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on one page; see the top of the file.")
    parser.add_argument("policy", type=Path)
    parser.add_argument("tasks", type=Path)
    for name, default in (("seed", 0), ("steps", 3), ("groups", 4), ("group-size", 8), ("lr", 1e-3)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    train(**vars(parser.parse_args()))
