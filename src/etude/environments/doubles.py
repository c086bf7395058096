"""Backends that fail as those of a bad day do."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from etude.environments.local import LocalBackend
from etude.environments.sandbox import LocalEnvironment
from etude.interfaces import Capabilities
from etude.types import Task


class FlakyBackend:
    """A local backend whose sandboxes are killed with a probability each, at a random moment of their use.

    They are really killed, by SIGKILL to their first process, as a host that is taken away does it.
    """

    def __init__(self, backend: LocalBackend, *, probability: float, seed: int, within_s: float = 0.05) -> None:
        """A victim dies at a moment drawn evenly from the first `within_s` seconds of its life."""
        self._backend = backend
        self._probability = probability
        self._random = random.Random(seed)
        self._within_s = within_s
        self.num_made = 0
        self.num_killed = 0

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend behind it."""
        return self._backend.capabilities

    @asynccontextmanager
    async def create(self, task: Task, *, model_port: int | None = None) -> AsyncGenerator[LocalEnvironment, None]:
        """Open a sandbox that may die."""
        dies = self._random.random() < self._probability
        moment = self._random.uniform(0.0, self._within_s)
        self.num_made += 1
        async with self._backend.create(task, model_port=model_port) as environment:
            killing = asyncio.create_task(self._kill(environment, moment), name="kill a sandbox") if dies else None
            try:
                yield environment
            finally:
                if killing is not None:
                    killing.cancel()
                    await asyncio.wait({killing})

    async def close(self) -> None:
        """Close the backend behind it."""
        await self._backend.close()

    async def _kill(self, environment: LocalEnvironment, moment: float) -> None:
        await asyncio.sleep(moment)
        with contextlib.suppress(ProcessLookupError):
            os.kill(environment.process_id, signal.SIGKILL)
            self.num_killed += 1
