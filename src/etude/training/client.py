"""A trainer in another process, for the controller."""

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from etude.errors import RunError
from etude.training.records import Accumulated, Refusal, TrainerStatus
from etude.types import Group, Scored, ScoreRequest, StepReport

Answer = TypeVar("Answer")


class TrainerClient:
    """Calls a trainer's service; an async context manager.

    Every call raises `RunError` when the trainer refuses it, answers with something else, or does not answer within
    `timeout_s`. Nothing is retried: a repeated call could count groups twice.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        """Call the service at `url`, such as http://127.0.0.1:8070."""
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "TrainerClient":
        self._session = aiohttp.ClientSession(timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def health(self) -> TrainerStatus:
        """Return where the trainer stands; answered at once, even while it works."""
        return await self._call("GET", "/health", b"", TrainerStatus)

    async def forward_backward(self, groups: Sequence[Group]) -> Accumulated:
        """Add the groups' gradients to the step under way."""
        return await self._call("POST", "/forward_backward", msgspec.msgpack.encode(groups), Accumulated)

    async def optim_step(self) -> StepReport:
        """Make the next policy version and start publishing it."""
        return await self._call("POST", "/optim_step", b"", StepReport)

    async def score(self, request: ScoreRequest) -> Scored:
        """Return what the trainer's weights think of given tokens."""
        return await self._call("POST", "/score", msgspec.msgpack.encode(request), Scored)

    async def checkpoint(self) -> None:
        """Store what the trainer resumes from."""
        await self._call("POST", "/checkpoint", b"", type(None))

    async def _call(self, method: str, path: str, body: bytes, answer: type[Answer]) -> Answer:
        if self._session is None:
            raise RuntimeError("enter the client with `async with` first")
        try:
            async with self._session.request(method, self._url + path, data=body) as response:
                data = await response.read()
                ok = response.ok
        except (aiohttp.ClientError, TimeoutError) as error:
            kind = type(error).__name__
            raise RunError(f"the trainer at {self._url} did not answer {path} ({kind}); see its log") from error
        try:
            if ok:
                return msgspec.msgpack.decode(data, type=answer)
            refusal = msgspec.msgpack.decode(data, type=Refusal)
        except msgspec.MsgspecError as error:
            raise RunError(f"the trainer at {self._url} broke down in {path}; see its log") from error
        refused = RunError(f"the trainer refused {path}: {refusal.error}")
        refused.exit_code = refusal.exit_code
        raise refused
