# pyright: basic
"""Each harness trains a policy that was made from nothing, and the run can be proven.

Such a policy does no task, so it is rewarded for whether what the harness printed has an even length.
"""

import asyncio
import json
import subprocess
import sys

import pytest
from harness_kit import INSTALLED, ROOT, harness_of
from run_kit import TASK, TEST, start

POLICY = (
    'stages=["pretrain","sft"]',
    "policy.shape.hidden=32",
    "policy.shape.layers=1",
    "policy.shape.heads=2",
    "policy.shape.kv_heads=1",
    "policy.shape.head_dim=16",
    "policy.shape.expert_hidden=32",
    "policy.shape.context=4096",
    "pretrain.tokens=10000",
    "pretrain.documents=100",
    "sft.demonstrations=16",
    "sft.epochs=1",
)
SHORT = (
    'stages=["train"]',
    "tasks.family=",
    "sampling.max_tokens=24",
    "rollout.group_size=3",
    "rollout.groups_per_step=1",
    "rollout.max_staleness=0",
    "trainer.steps=2",
    "harness.max_calls=3",
    "harness.max_session_tokens=72",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy that reads far enough for each of them."""
    run = tmp_path_factory.mktemp("policy") / "run"

    async def learn():
        command = await start("run", ROOT / "recipes/harnesses/openai-chat.toml", run, *POLICY)
        assert await command.end() == 0, command.errors

    asyncio.run(learn())
    return run / "policy/sft"


def settings(name, directory):
    """Write tasks, which are patient with a busy machine, and return what makes a recipe one of them, and small."""
    for place in ("train/one", "train/two", "heldout/three"):
        task = directory / place
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text(TASK.format(task.name) + "[agent]\ntimeout_sec = 180\n")
        (task / "instruction.md").write_text("Say something.\n")
        (task / "environment/Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\n")
        (task / "tests/test.sh").write_text(TEST)
        (task / "tests/test.sh").chmod(0o755)
    command = ("sh", "-c", '"$@" >answer.txt 2>&1', "sh", *harness_of(name).command)
    return (
        *SHORT,
        f"harness.files={INSTALLED / name}",
        f"harness.command={json.dumps(command)}",
        f"tasks.train={directory / 'train'}",
        f"tasks.heldout={directory / 'heldout'}",
    )


@pytest.mark.parametrize("name", ["openai-chat", "openai-responses", "anthropic", "mini-swe-agent"])
def test_its_recipe_trains_some_steps_and_every_invariant_holds(name, request, tmp_path):
    if not (INSTALLED / name).is_dir():
        pytest.skip(f"{name} is not installed: scripts/install-harness {name}")
    policy = request.getfixturevalue("policy")
    run, recipe = tmp_path / "run", ROOT / f"recipes/harnesses/{name}.toml"

    async def train():
        command = await start("run", recipe, run, f"policy.path={policy}", *settings(name, tmp_path))
        assert await command.end() == 0, command.errors
        assert command.steps == [1, 2]

    asyncio.run(train())
    verified = subprocess.run([sys.executable, "-m", "etude.cli.main", "verify", run], capture_output=True, check=False)
    assert verified.returncode == 0, verified.stdout.decode()
    rollouts = [json.loads(path.read_bytes()) for path in (run / "rollouts").glob("*/*.json")]
    stated = json.loads((INSTALLED / name / "harness.json").read_bytes())
    assert {(rollout["agent"]["name"], rollout["agent"]["version"]) for rollout in rollouts} == {
        (stated["name"], stated["version"])
    }
    assert len({rollout["extra"]["etude"]["harness_hash"] for rollout in rollouts}) == 1
    assert "scored" in {rollout["extra"]["etude"]["outcome"] for rollout in rollouts}
