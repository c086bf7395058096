# pyright: basic
"""The run-time, with all its processes, against the algorithm on one page.

Both start from one policy, made in seconds: it half knows how to repair three modules. It is asked to repair them where
nothing is broken, so that an attempt passes unless it breaks something: whatever such a policy knows, attempts of one
group differ, and there is a loss to compare.

Numbers differ in their last bits only, since one side batches and caches. A token drawn differently would mean that a
random number fell within those bits of an edge of the CDF; at this seed none does.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from etude.config import RunConfig
from etude.runtime.task_sets import training_problems
from etude.store.groups import decode_group, group_key
from etude.tasks import pyfix

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"
SEED, STEPS, GROUPS, GROUP_SIZE, LR = 0, 3, 2, 5, 2e-3
LEARNING = f"""
stages = ["pretrain", "sft"]
run = {{ seed = {SEED} }}
tasks = {{ family = "pyfix", num_train = 3, num_heldout = 1 }}
pretrain = {{ documents = 100, tokens = 1000, threads = 1 }}

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

[sft]
demonstrations = 60
epochs = 8
batch_tokens = 768
lr = 0.005
beta2 = 0.95
threads = 1
"""
PRACTICE = f"""
stages = ["train"]
run = {{ seed = {SEED} }}
environment = {{ require = [] }}
pools = [{{ name = "exact", view = "fp32" }}]
rollout = {{ groups_per_step = {GROUPS}, group_size = {GROUP_SIZE}, max_staleness = 0 }}
trainer = {{ steps = {STEPS}, lr = {LR} }}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model directory."""
    directory = tmp_path_factory.mktemp("learning")
    (directory / "learning.toml").write_text(LEARNING)
    etude("run", directory / "learning.toml", "--set", f"run.url={directory / 'run'}")
    return directory / "run" / "policy" / "sft"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The tasks that the policy saw demonstrations of, with modules that are right already."""
    directory = tmp_path_factory.mktemp("tasks")
    for problem in training_problems(RunConfig.model_validate(tomllib.loads(LEARNING))):
        task = pyfix.write_task(problem, directory)
        (task / "environment" / f"{problem.module}.py").write_text("\n".join(problem.right) + "\n")
    return directory


@pytest.fixture(scope="module")
def run(policy, tasks, tmp_path_factory):
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("practice")
    (directory / "practice.toml").write_text(PRACTICE)
    settings = {"run.url": directory / "run", "policy.path": policy, "tasks.train": tasks}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    etude("run", directory / "practice.toml", *overrides)
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
def oracle(policy, tasks):
    """What the example does, step by step."""
    spec = importlib.util.spec_from_file_location("minimal_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return example.train(policy, tasks, seed=SEED, steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, lr=LR)
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
    assert [row["trainer/grad_norm"] for row in rows] == pytest.approx([step.grad_norm for step in oracle], rel=1e-4)


def etude(*arguments):
    ended = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def tokens_of(trajectory):
    return [token for node in trajectory.nodes for token in node.completion.token_ids]
