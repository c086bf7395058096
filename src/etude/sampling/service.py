"""A sampler behind HTTP.

`POST /sample` takes a `SampleRequest` and answers a `Completion`, both msgpack; `POST /score` takes a `ScoreRequest`
and answers `Scored` likewise; `DELETE /sample/{request_id}` cancels; `POST /drain` asks for no new sessions;
`GET /health` answers `SamplerStatus` as JSON. An error is JSON: `error` is the name of its class in `etude.errors`,
`message` is for people.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from aiohttp import web

from etude.errors import (
    ContextOverflowError,
    HostError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.sampling.sampler import EngineSampler
from etude.types import SampleRequest, ScoreRequest

_BODY_BYTES_MAX = 16 << 20
_MSGPACK = "application/msgpack"
_STATUS: dict[type[SamplerError], int] = {
    ContextOverflowError: 400,
    SampleRequestError: 400,
    VersionUnavailableError: 409,
    SamplerBusyError: 429,
}

_Record = TypeVar("_Record", bound=msgspec.Struct)


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """How the service says no."""

    error: str
    message: str


@asynccontextmanager
async def serving(sampler: EngineSampler, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve a started sampler and yield its base URL; port 0 takes a free one.

    Raises:
        HostError: The port is taken or not ours to take.
    """
    runner = web.AppRunner(_application(sampler), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise HostError(
                f"the sampler cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0"
            ) from error
        address: tuple[str, int] = runner.addresses[0]
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()


def _application(sampler: EngineSampler) -> web.Application:
    async def sample(request: web.Request) -> web.Response:
        completion = await sampler.sample(await _body(request, SampleRequest))
        return web.Response(body=msgspec.msgpack.encode(completion), content_type=_MSGPACK)

    async def score(request: web.Request) -> web.Response:
        scored = await sampler.score(await _body(request, ScoreRequest))
        return web.Response(body=msgspec.msgpack.encode(scored), content_type=_MSGPACK)

    async def cancel(request: web.Request) -> web.Response:
        sampler.cancel(request.match_info["request_id"])
        return web.Response(status=204)

    async def drain(_: web.Request) -> web.Response:
        sampler.leave()
        return web.Response(status=204)

    async def health(_: web.Request) -> web.Response:
        (status,) = await sampler.status()
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    application = web.Application(client_max_size=_BODY_BYTES_MAX, middlewares=[_errors_as_json])
    application.add_routes(
        [
            web.post("/sample", sample),
            web.post("/score", score),
            web.delete("/sample/{request_id}", cancel),
            web.post("/drain", drain),
            web.get("/health", health),
        ]
    )
    return application


async def _body(request: web.Request, kind: type[_Record]) -> _Record:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise SampleRequestError(f"{request.path}: the body is not a msgpack {kind.__name__}: {error}") from error


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except SamplerError as error:
        body = ErrorBody(error=type(error).__name__, message=str(error))
        status = _STATUS.get(type(error), 503)
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
