# pyright: basic
"""The run-time, with all its processes, against the algorithm on one page.

Both start from one policy and one seed. The policy learned two tasks by heart in seconds, from demonstrations half of
which fail: its attempts are real ones, with tool calls that work and some that do not, and rewards that differ within a
group. Numbers differ in their last bits only, because one side batches and caches; a token drawn differently would mean
that a random number fell within those bits of an edge of the CDF, which at this seed none does.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.store.groups import decode_group, group_key

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"
SEED, STEPS, GROUPS, GROUP_SIZE, LR = 0, 3, 2, 4, 2e-3
RECIPE = f"""
stages = ["pretrain", "sft", "train"]
run = {{ seed = {SEED} }}
tasks = {{ family = "pyfix", num_train = 2, num_heldout = 1 }}
environment = {{ require = [] }}
pools = [{{ name = "exact", view = "fp32" }}]
rollout = {{ groups_per_step = {GROUPS}, group_size = {GROUP_SIZE}, max_staleness = 0 }}
trainer = {{ steps = {STEPS}, lr = {LR} }}

[policy.shape]
vocab = 420
hidden = 48
layers = 2
heads = 3
kv_heads = 3
head_dim = 16
experts = 4
expert_hidden = 48
context = 384

[pretrain]
documents = 100
tokens = 1000
threads = 1

[sft]
demonstrations = 60
good_share = 0.6
epochs = 10
batch_tokens = 1024
lr = 0.01
beta2 = 0.95
warmup_steps = 5
threads = 1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("oracle")
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "etude.cli.main", "run", recipe, "--set", f"run.url={directory / 'run'}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return directory / "run"


@pytest.fixture(scope="module")
def groups(run):
    """The run's groups in the order of their tickets, by step."""
    numbers = [range(step * GROUPS, (step + 1) * GROUPS) for step in range(STEPS)]
    keys = [[group_key(step, f"g{number:06d}") for number in of_step] for step, of_step in enumerate(numbers)]
    return [[decode_group((run / key).read_bytes()) for key in of_step] for of_step in keys]


@pytest.fixture(scope="module")
def rows(run):
    """The run's metrics, a row per step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == "train"]


@pytest.fixture(scope="module")
def oracle(run):
    """What the example does from the policy that the run started from."""
    spec = importlib.util.spec_from_file_location("minimal_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return example.train(
            run / "policy" / "sft",
            run / "tasks" / "train",
            seed=SEED,
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            lr=LR,
        )
    finally:
        torch.set_num_threads(threads)


def test_the_comparison_is_about_something(groups, rows):
    trajectories = [one for of_step in groups for group in of_step for one in group.trajectories]
    assert {one.reward for one in trajectories} == {0.0, 1.0}
    assert max(len(one.nodes) for one in trajectories) > 2
    assert any(abs(row["trainer/loss"]) > 1e-4 for row in rows)


def test_the_runtime_draws_the_tokens_that_the_oracle_draws(groups, oracle):
    drawn = [[[tokens_of(one) for one in group.trajectories] for group in of_step] for of_step in groups]
    expected = [
        [[[one.ids[token.place] for token in one.drawn] for one in group] for group in step.groups] for step in oracle
    ]
    assert drawn == expected


def test_the_sandboxed_grader_gives_the_rewards_of_the_oracle(groups, oracle):
    rewards = [[[one.reward for one in group.trajectories] for group in of_step] for of_step in groups]
    assert rewards == [[[one.reward for one in group] for group in step.groups] for step in oracle]


def test_the_trainer_computes_the_losses_and_gradients_of_the_oracle(rows, oracle):
    # The sum of a step's losses is small beside its terms, of which f32 keeps seven digits.
    assert [row["trainer/loss"] for row in rows] == pytest.approx([step.loss for step in oracle], rel=1e-4, abs=1e-7)
    assert [row["trainer/grad_norm"] for row in rows] == pytest.approx([step.grad_norm for step in oracle], rel=1e-3)


def tokens_of(trajectory):
    return [token for node in trajectory.nodes for token in node.completion.token_ids]
