"""HTTP on one loopback port, for clients that may be anything: every wait, size and count has a bound.

What aiohttp bounds by itself is left to it: lines and header fields of 8190 bytes, 128 fields, and the requests that
wait behind each other on one connection.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from etude.errors import HostError
from etude.gateway import refusals
from etude.gateway.codings import unpacked
from etude.gateway.refusals import CallRefusedError
from etude.gateway.visitors import Bounds, Visitors

_IDLE_S = 75.0
"""Also how long a known client may take over the head of a request."""
_DRAINED_BYTES = 8 << 20
_DRAIN_S = 2.0


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A request before its body was read."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Case does not matter in the names."""
    is_gone: Callable[[], bool]
    """Whether the client has hung up."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is answered with."""

    status: int = 200
    body: bytes = b""
    parts: AsyncIterator[bytes] | None = None
    """Instead of `body`: sent as they come."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    on_sent: Callable[[], None] | None = None
    """Called when all of it was sent; not if the client is gone."""


ReadBody = Callable[[str], Awaitable[bytes]]
"""Called with whose request it is, once that is known. Raises `CallRefusedError` for a body that is refused."""

Handler = Callable[[Head, ReadBody], Awaitable[Reply]]
"""Answers every request, those that it refuses too."""

Refuse = Callable[[Head, CallRefusedError], Reply]


class Door:
    """A port of 127.0.0.1 behind which a handler answers.

    The handler sees a request's head first: nothing more is read of a request without a key. Whoever gets an error
    without having shown a key is sent away.
    """

    def __init__(self, handler: Handler, *, refuse: Refuse, bounds: Bounds) -> None:
        """Let in what is within `bounds`; `refuse` puts into words what is not even a request."""
        self._handler = handler
        self._refuse = refuse
        self._bounds = bounds
        self._runner: web.ServerRunner | None = None
        self.visitors = Visitors(bounds)
        self.port = 0
        """0 before `open`."""

    async def open(self, port: int) -> None:
        """Listen on a port of 127.0.0.1, 0 for any free one; raise `HostError` when it is taken."""
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        except OSError as error:
            msg = f"the gateway cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port or 0"
            raise HostError(msg) from error
        self.port = listener.getsockname()[1]
        server = _Server(self._serve, self.visitors, self._refused)
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        async def read(owner: str) -> bytes:
            self.visitors.vouch(request.protocol, owner)
            return await self._read(request, owner)

        try:
            reply = await self._handler(_head_of(request), read)
        except ConnectionError:
            # It went away in the middle of its body: nobody is there to be answered.
            return web.Response()
        response = _response(reply)
        if reply.status >= refusals.FIRST_ERROR and self.visitors.is_stranger(request.protocol):
            response.force_close()
        # A client that goes away, or does not read what it asked for, is no fault.
        with suppress(ConnectionError, TimeoutError):
            await self._send(request, response, reply)
            if reply.on_sent is not None:
                reply.on_sent()
            if not request.content.at_eof():
                await self._drain(request)
        return response

    async def _read(self, request: web.BaseRequest, owner: str) -> bytes:
        limit = self._bounds.body_bytes
        if (request.content_length or 0) > limit:
            raise refusals.body_too_large(limit)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = bytearray()
        try:
            async with asyncio.timeout(self._bounds.body_s):
                while part := await request.content.readany():
                    self.visitors.buffer(owner, len(part))
                    body += part
                    if len(body) > limit:
                        raise refusals.body_too_large(limit)
        except TimeoutError:
            raise refusals.malformed(f"the request's body was not there within {self._bounds.body_s:g} s") from None
        except web.RequestPayloadError as error:
            raise refusals.malformed("the request's body is broken off") from error
        finally:
            self.visitors.buffer(owner, -len(body))
        coding = request.headers.get("Content-Encoding", "")
        # Beside the loop: a few bytes may become as many as a body can have.
        return await asyncio.to_thread(unpacked, bytes(body), coding, limit) if coding else bytes(body)

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse, reply: Reply) -> None:
        try:
            async with asyncio.timeout(self._bounds.write_s):
                await response.prepare(request)
                if reply.parts is None:
                    await response.write_eof()
            if reply.parts is not None:
                async for part in reply.parts:
                    async with asyncio.timeout(self._bounds.write_s):
                        await response.write(part)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise

    async def _drain(self, request: web.BaseRequest) -> None:
        """Read on for a moment after an early answer: a client that is still sending would not see it otherwise."""
        size = 0
        async with asyncio.timeout(_DRAIN_S):
            while size < _DRAINED_BYTES and (part := await request.content.readany()):
                size += len(part)

    def _refused(self, request: web.BaseRequest, error: HttpProcessingError) -> web.StreamResponse:
        message = f"the request is no HTTP that is served here: {error.message[:128]}"
        response = _response(self._refuse(_head_of(request), refusals.malformed(message)))
        response.force_close()
        return response


class _Server(web.Server):
    """aiohttp's server, which tells who comes and goes."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        visitors: Visitors,
        refused: Callable[[web.BaseRequest, HttpProcessingError], web.StreamResponse],
    ) -> None:
        super().__init__(handler)
        self.refused = refused
        self._visitors = visitors

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            access_log=None,  # pyright: ignore[reportArgumentType]
            keepalive_timeout=_IDLE_S,
            lingering_time=0.0,
            auto_decompress=False,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._visitors.arrive(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._visitors.leave(handler)
        super().connection_lost(handler, exc)


class _Connection(web.RequestHandler):
    """aiohttp's connection, which answers in the dialect's envelope to what is no HTTP, and does not log it."""

    def __init__(self, server: _Server, **options: object) -> None:
        super().__init__(server, **options)  # pyright: ignore[reportArgumentType]
        self._server = server

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            return self._server.refused(request, exc)
        return super().handle_error(request, status, exc, message)


def _head_of(request: web.BaseRequest) -> Head:
    return Head(
        method=request.method,
        path=request.path,
        headers=request.headers,
        is_gone=lambda: request.transport is None or request.transport.is_closing(),
    )


def _response(reply: Reply) -> web.StreamResponse:
    headers = {**reply.headers, "Content-Type": reply.content_type}
    if reply.parts is not None:
        return web.StreamResponse(status=reply.status, headers=headers)
    return web.Response(status=reply.status, body=reply.body, headers=headers)
