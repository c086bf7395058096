"""A trainer behind HTTP: one process, one thread for torch, answers in msgpack."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace
from torch import Tensor

from etude.errors import EtudeError, HostError, IntegrityError, ObjectMissingError, RunError
from etude.interfaces import Ledger
from etude.telemetry.doubles import NO_LEDGER
from etude.telemetry.events import Trained
from etude.training.checkpoint import check_files, checkpoint, digest_of, restore
from etude.training.records import (
    Compared,
    PublishRequest,
    Refusal,
    RestoreRequest,
    Settled,
    StepRequest,
    StoredFile,
)
from etude.training.trainer import Trainer
from etude.types import Group, ScoreRequest, StepReport
from etude.weight_types import Head

Asked = TypeVar("Asked")
Result = TypeVar("Result")

_STATUS_REFUSED = 409
_GROUPS = msgspec.msgpack.Decoder(list[Group])
_SCORE = msgspec.msgpack.Decoder(ScoreRequest)
_STEP = msgspec.msgpack.Decoder(StepRequest)
_PUBLISH = msgspec.msgpack.Decoder(PublishRequest)
_RESTORE = msgspec.msgpack.Decoder(RestoreRequest)


class WeightPublisher(Protocol):
    """Publishes one version at a time in the background (`weights.background`)."""

    def start(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Wait for the last version, copy these weights and return metrics; raise what went wrong with the last one."""
        ...

    def join(self) -> object:
        """Wait until the version under way is published; raise what went wrong with it."""
        ...

    def is_head(self, *, version: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the head names this version with exactly these bytes."""
        ...

    def settle(self, *, version: int, step: int, tensors: Mapping[str, Tensor], fork: str = "") -> tuple[Head, str]:
        """Publish these weights in the head's lineage or a new one; return the head and why a lineage was opened."""
        ...


SaveCheckpoint = Callable[[int, Mapping[str, bytes]], None]
"""Stores the files of a checkpoint under its step."""
LoadCheckpoint = Callable[[int], Mapping[str, bytes]]
"""Returns the files of a checkpoint by name; raises `ObjectMissingError` when one is gone."""


class TrainerService:
    """Serves a trainer on a loopback port.

    Calls are served one after the other, in the order of arrival. A client that gives up does not stop its call.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        publisher: WeightPublisher,
        save_checkpoint: SaveCheckpoint,
        load_checkpoint: LoadCheckpoint,
        ledger: Ledger = NO_LEDGER,
        max_body_bytes: int = 1 << 30,
    ) -> None:
        """Serve `trainer`, which is at step 0. The ledger is told of every optimizer step before its caller is."""
        self._trainer = trainer
        self._publisher = publisher
        self._save_checkpoint = save_checkpoint
        self._load_checkpoint = load_checkpoint
        self._ledger = ledger
        self._lineage = ""
        self._max_body_bytes = max_body_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._working = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """Loopback port; 0 before `start`."""
        return self._port

    async def start(self, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, 0 for any free one; raise `HostError` when it is taken."""
        app = web.Application(client_max_size=self._max_body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_post("/forward_backward", self._forward_backward)
        app.router.add_post("/optim_step", self._optim_step)
        app.router.add_post("/compare", self._compare)
        app.router.add_post("/publish", self._publish)
        app.router.add_post("/checkpoint", self._checkpoint)
        app.router.add_post("/restore", self._restore)
        app.router.add_post("/score", self._score)
        try:
            listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            msg = f"the trainer cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port or 0"
            raise HostError(msg) from error
        self._port = listener.getsockname()[1]
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        """Close the port, finish the call being served, and wait for the version being published."""
        if self._runner is not None:
            await self._runner.cleanup()
        try:
            await self._call("stop", self._publisher.join)
        finally:
            self._thread.shutdown(wait=False)

    async def _health(self, _request: web.Request) -> web.Response:
        # Counters only, so reading them beside the torch thread is safe.
        return _packed(msgspec.structs.replace(self._trainer.status(), working=self._working))

    async def _forward_backward(self, request: web.Request) -> web.Response:
        return await self._answer_to(
            request, "forward_backward", _GROUPS, "is not a list of groups", self._trainer.forward_backward
        )

    async def _optim_step(self, request: web.Request) -> web.Response:
        wrong = "does not say how to end a step"
        return await self._answer_to(request, "optim_step", _STEP, wrong, self._step, default=StepRequest())

    async def _compare(self, _request: web.Request) -> web.Response:
        return await self._answer("compare", self._is_head)

    async def _publish(self, request: web.Request) -> web.Response:
        return await self._answer_to(request, "publish", _PUBLISH, "does not say where to publish", self._settle)

    async def _restore(self, request: web.Request) -> web.Response:
        return await self._answer_to(request, "restore", _RESTORE, "does not name a checkpoint", self._take_over)

    async def _score(self, request: web.Request) -> web.Response:
        return await self._answer_to(request, "score", _SCORE, "is no request to score", self._trainer.score)

    async def _checkpoint(self, _request: web.Request) -> web.Response:
        return await self._answer("checkpoint", self._save)

    def _step(self, asked: StepRequest) -> StepReport:
        trainer = self._trainer
        report = trainer.optim_step()
        self._ledger.record(
            Trained(
                lineage=asked.lineage or self._lineage,
                version=trainer.version,
                step=trainer.step,
                groups=trainer.made,
                replayed=asked.replayed,
            )
        )
        if asked.publish:
            told = self._publisher.start(version=trainer.version, step=trainer.step, tensors=trainer.tensors())
            return replace(report, metrics=report.metrics | dict(told))
        return report

    def _is_head(self) -> Compared:
        trainer = self._trainer
        same = self._publisher.is_head(version=trainer.version, tensors=trainer.tensors())
        return Compared(is_head=same)

    def _settle(self, asked: PublishRequest) -> Settled:
        trainer = self._trainer
        head, why = self._publisher.settle(
            version=trainer.version, step=trainer.step, tensors=trainer.tensors(), fork=asked.fork
        )
        self._lineage = head.lineage
        return Settled(lineage=head.lineage, version=head.version, digest=head.digest, opened=why)

    def _save(self) -> dict[str, StoredFile]:
        files = checkpoint(self._trainer)
        self._save_checkpoint(self._trainer.step, files)
        return {name: StoredFile(num_bytes=len(data), digest=digest_of(data)) for name, data in files.items()}

    def _take_over(self, asked: RestoreRequest) -> None:
        """Stand where a checkpoint was written, or at the start."""
        trainer = self._trainer
        if asked.step:
            files = self._load_checkpoint(asked.step)
            check_files(files, asked.digests)
            restore(trainer, files)
            return
        if trainer.step:
            raise RunError(f"the trainer is at step {trainer.step} and cannot go back to the start: start it anew")
        trainer.discard()

    async def _answer_to(
        self,
        request: web.Request,
        name: str,
        decoder: "msgspec.msgpack.Decoder[Asked]",
        wrong: str,
        work: Callable[[Asked], object],
        *,
        default: Asked | None = None,
    ) -> web.Response:
        """Answer a call with what its body asks for; `default` stands for an empty body, which is refused without."""
        body = await request.read()
        try:
            asked = decoder.decode(body) if body or default is None else default
        except msgspec.MsgspecError as error:
            return _refused(web.HTTPBadRequest.status_code, f"the body {wrong}: {error}")
        return await self._answer(name, lambda: work(asked))

    async def _answer(self, name: str, work: Callable[[], object]) -> web.Response:
        try:
            answer = await self._call(name, work)
            # What the caller does next depends on what is recorded here.
            await self._ledger.flush()
        except EtudeError as error:
            damaged = isinstance(error, (IntegrityError, ObjectMissingError))
            return _refused(_STATUS_REFUSED, str(error), exit_code=error.exit_code, damaged=damaged)
        return _packed(answer)

    async def _call(self, name: str, work: Callable[[], Result]) -> Result:
        def named() -> Result:
            self._working = name
            try:
                return work()
            finally:
                self._working = ""

        # Shielded: a client that hangs up must not leave the caller's bookkeeping ahead of the trainer's.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, named))


def _packed(answer: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")


def _refused(status: int, message: str, *, exit_code: int = 1, damaged: bool = False) -> web.Response:
    body = msgspec.msgpack.encode(Refusal(error=message, exit_code=exit_code, damaged=damaged))
    return web.Response(status=status, body=body, content_type="application/msgpack")
