# pyright: basic
"""A run that the failure tests look at."""

import asyncio
from pathlib import Path

import pytest
from run_kit import start


@pytest.fixture(scope="session")
def finished(coin, tmp_path_factory) -> Path:
    """The directory of an asynchronous run that was never disturbed."""
    directory = tmp_path_factory.mktemp("finished") / "run"

    async def play() -> None:
        command = await start("run", coin, directory)
        assert await command.end() == 0, command.errors

    asyncio.run(play())
    return directory
