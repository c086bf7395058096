# pyright: basic
"""Settings that every test shares, and what tests of whole runs start from."""

import asyncio
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from run_kit import COIN, FROM_NOTHING, ONCE, TASK, TEST, start
from s3_kit import endpoint, seaweed

__all__ = ["endpoint", "seaweed"]

# Whoever started the tests in the background has them ignore Ctrl-C, and all that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("etude", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("etude")


@pytest.fixture(scope="session")
def from_nothing(tmp_path_factory) -> Path:
    """The directory of a run that made a policy and evaluated it."""
    directory = tmp_path_factory.mktemp("nothing")
    (directory / "recipe.toml").write_text(FROM_NOTHING)

    async def learn() -> None:
        command = await start("run", directory / "recipe.toml", directory / "run")
        assert await command.end() == 0, command.errors

    asyncio.run(learn())
    return directory / "run"


@pytest.fixture(scope="session")
def coin(from_nothing) -> Path:
    """A recipe that trains that policy on tasks of our own, in a harness of our own."""
    root = from_nothing.parent
    for name in (*(f"train/flip-{number}" for number in range(6)), "heldout/toss"):
        task = root / "tasks" / name
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text(TASK.format(task.name))
        (task / "instruction.md").write_text(f"Say {task.name}.\n")
        (task / "environment/Dockerfile").write_text("FROM python:3.11-slim\nWORKDIR /app\n")
        (task / "tests/test.sh").write_text(TEST)
        (task / "tests/test.sh").chmod(0o755)
    (root / "harness").mkdir()
    (root / "harness/once.py").write_text(ONCE)
    recipe = root / "coin.toml"
    recipe.write_text(COIN.format(policy=from_nothing / "policy/sft", tasks=root / "tasks", harness=root / "harness"))
    return recipe
