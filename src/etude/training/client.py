"""A trainer in another process, for the controller."""

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import aiohttp
import msgspec

from etude.errors import IntegrityError, RunError, TrainerLostError
from etude.telemetry.waits import waiting
from etude.training.records import (
    Accumulated,
    Compared,
    PublishRequest,
    Refusal,
    RestoreRequest,
    Settled,
    StepRequest,
    StoredFile,
    TrainerStatus,
)
from etude.types import Group, Scored, ScoreRequest, StepReport

Answer = TypeVar("Answer")

_PUBLISHED = StepRequest()


class TrainerClient:
    """Calls a trainer's service; an async context manager.

    Every call raises `RunError` when the trainer refuses it or answers with something else, and `TrainerLostError` when
    it does not answer within `timeout_s` or its connection breaks. Nothing is retried: a repeated call could count
    groups twice.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        """Call the service at `url`, such as http://127.0.0.1:8070."""
        self._url = url
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "TrainerClient":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
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

    async def optim_step(self, request: StepRequest = _PUBLISHED) -> StepReport:
        """Make the next policy version and, unless told otherwise, start publishing it."""
        return await self._call("POST", "/optim_step", msgspec.msgpack.encode(request), StepReport)

    async def compare(self) -> Compared:
        """Return whether the trainer's weights are those that the head names."""
        return await self._call("POST", "/compare", b"", Compared)

    async def publish(self, request: PublishRequest) -> Settled:
        """Publish the version as it is, in the head's lineage or, when it does not follow it, in a new one."""
        return await self._call("POST", "/publish", msgspec.msgpack.encode(request), Settled)

    async def restore(self, request: RestoreRequest) -> None:
        """Take over a checkpoint; raise `IntegrityError` when its files are gone or not those that were written."""
        await self._call("POST", "/restore", msgspec.msgpack.encode(request), type(None))

    async def score(self, request: ScoreRequest) -> Scored:
        """Return what the trainer's weights think of given tokens."""
        return await self._call("POST", "/score", msgspec.msgpack.encode(request), Scored)

    async def checkpoint(self) -> dict[str, StoredFile]:
        """Store what the trainer resumes from, and return its files by name."""
        return await self._call("POST", "/checkpoint", b"", dict[str, StoredFile])

    async def _call(self, method: str, path: str, body: bytes, answer: type[Answer]) -> Answer:
        if self._session is None:
            raise RuntimeError("enter the client with `async with` first")
        try:
            async with (
                waiting(path, owner="controller", on="trainer", deadline_s=self._timeout_s, error=TrainerLostError),
                self._session.request(method, self._url + path, data=body) as response,
            ):
                data = await response.read()
                ok = response.ok
        except (aiohttp.ClientError, TimeoutError) as error:
            kind = type(error).__name__
            raise TrainerLostError(f"the trainer at {self._url} did not answer {path} ({kind}); see its log") from error
        try:
            if ok:
                return msgspec.msgpack.decode(data, type=answer)
            refusal = msgspec.msgpack.decode(data, type=Refusal)
        except msgspec.MsgspecError as error:
            raise RunError(f"the trainer at {self._url} broke down in {path}; see its log") from error
        if refusal.damaged:
            raise IntegrityError(refusal.error)
        refused = RunError(f"the trainer refused {path}: {refusal.error}")
        refused.exit_code = refusal.exit_code
        raise refused
