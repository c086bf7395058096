"""A trainer behind HTTP: one process, one thread for torch, answers in msgpack."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web
from torch import Tensor

from etude.errors import EtudeError, HostError
from etude.training.checkpoint import checkpoint
from etude.training.records import Refusal
from etude.training.trainer import Trainer
from etude.types import Group, ScoreRequest, StepReport

Result = TypeVar("Result")

_STATUS_REFUSED = 409
_GROUPS = msgspec.msgpack.Decoder(list[Group])
_SCORE = msgspec.msgpack.Decoder(ScoreRequest)


class WeightPublisher(Protocol):
    """Publishes one version at a time in the background (`weights.background`)."""

    def start(self, *, version: int, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Wait for the last version, copy these weights and return; raise what went wrong with the last one."""
        ...

    def join(self) -> object:
        """Wait until the version under way is published; raise what went wrong with it."""
        ...


SaveCheckpoint = Callable[[int, Mapping[str, bytes]], None]
"""Stores the files of a checkpoint under its step."""


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
        max_body_bytes: int = 1 << 30,
    ) -> None:
        self._trainer = trainer
        self._publisher = publisher
        self._save_checkpoint = save_checkpoint
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
        app.router.add_post("/checkpoint", self._checkpoint)
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

    async def publish(self) -> None:
        """Publish the weights as they are, such as the version that a run starts from; return when they are out."""
        await self._call("publish", self._start_publishing)
        await self._call("publish", self._publisher.join)

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
        body = await request.read()
        try:
            groups = _GROUPS.decode(body)
        except msgspec.MsgspecError as error:
            return _refused(web.HTTPBadRequest.status_code, f"the body is not a list of groups: {error}")
        return await self._answer("forward_backward", lambda: self._trainer.forward_backward(groups))

    async def _optim_step(self, _request: web.Request) -> web.Response:
        return await self._answer("optim_step", self._step_and_publish)

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            asked = _SCORE.decode(body)
        except msgspec.MsgspecError as error:
            return _refused(web.HTTPBadRequest.status_code, f"the body is no request to score: {error}")
        return await self._answer("score", lambda: self._trainer.score(asked))

    async def _checkpoint(self, _request: web.Request) -> web.Response:
        return await self._answer("checkpoint", self._save)

    def _step_and_publish(self) -> StepReport:
        report = self._trainer.optim_step()
        self._start_publishing()
        return report

    def _start_publishing(self) -> None:
        trainer = self._trainer
        self._publisher.start(version=trainer.version, step=trainer.step, tensors=trainer.tensors())

    def _save(self) -> None:
        self._save_checkpoint(self._trainer.step, checkpoint(self._trainer))

    async def _answer(self, name: str, work: Callable[[], object]) -> web.Response:
        try:
            return _packed(await self._call(name, work))
        except EtudeError as error:
            return _refused(_STATUS_REFUSED, str(error), exit_code=error.exit_code)

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


def _refused(status: int, message: str, *, exit_code: int = 1) -> web.Response:
    body = msgspec.msgpack.encode(Refusal(error=message, exit_code=exit_code))
    return web.Response(status=status, body=body, content_type="application/msgpack")
