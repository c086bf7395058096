"""The model API that harnesses talk to: one loopback port, one key per session."""

import asyncio
import functools
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from re import Pattern

from aiohttp import web

from etude.errors import HostError
from etude.gateway import refusals
from etude.gateway.dialects import messages
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.dialect import Dialect, HarnessRequest
from etude.gateway.dialects.messages import MESSAGES
from etude.gateway.dialects.models import model_list, model_named
from etude.gateway.dialects.responses import RESPONSES
from etude.gateway.refusals import CallRefusedError
from etude.gateway.sessions import Answer, ModelCall, Session
from etude.gateway.volatile import DECLARED, strip_volatile
from etude.interfaces import Renderer, Sampler, SessionRecord, SessionSpec

DIALECTS = (CHAT, MESSAGES, RESPONSES)

_CLOSED_KEYS_KEPT = 65536


class Gateway:
    """A `SessionHost`: answers harnesses with what the sampler draws, and keeps the exact tokens.

    `context_length` bounds prompt and answer together, in tokens; `call_timeout_s` one request to the sampler. A stream
    whose answer takes longer than `keep_alive_s` gets its headers and a sign of life then, and another each
    `keep_alive_s`. Bodies beyond `max_body_bytes` are refused. What a rule of `volatile` finds in a system message is
    taken out before anything else happens, and kept in the session's record.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        context_length: int,
        call_timeout_s: float = 600.0,
        keep_alive_s: float = 10.0,
        max_body_bytes: int = 4 << 20,
        volatile: Sequence[Pattern[str]] = DECLARED,
    ) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._context_length = context_length
        self._call_timeout_s = call_timeout_s
        self._keep_alive_s = keep_alive_s
        self._max_body_bytes = max_body_bytes
        self._volatile = volatile
        self._by_key: dict[str, Session] = {}
        self._keys: dict[str, str] = {}
        self._closed_keys: dict[str, None] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """Loopback port of the model API; 0 before `start`."""
        return self._port

    async def start(self, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, 0 for any free one; raise `HostError` when it is taken."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_in_envelope])
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, functools.partial(self._call, dialect))
        app.router.add_post(f"{MESSAGES.path}/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._models)
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        except OSError as error:
            msg = f"the gateway cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port or 0"
            raise HostError(msg) from error
        self._port = listener.getsockname()[1]
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        """Close every session and the port."""
        for session_id in list(self._keys):
            await self.close(session_id)
        if self._runner is not None:
            await self._runner.cleanup()

    async def open(self, spec: SessionSpec) -> str:
        """Return the key of a new session; raise `ValueError` when one with this id is open."""
        if spec.session_id in self._keys:
            msg = f"session {spec.session_id} is open already"
            raise ValueError(msg)
        key = f"sk-etude-{secrets.token_urlsafe(32)}"
        self._keys[spec.session_id] = key
        self._by_key[key] = Session(
            spec,
            sampler=self._sampler,
            renderer=self._renderer,
            context_length=self._context_length,
            call_timeout_s=self._call_timeout_s,
        )
        return key

    async def close(self, session_id: str) -> SessionRecord:
        """End a session and return its record; raise `ValueError` when none with this id is open."""
        key = self._keys.pop(session_id, None)
        if key is None:
            msg = f"session {session_id} is not open"
            raise ValueError(msg)
        self._closed_keys[key] = None
        if len(self._closed_keys) > _CLOSED_KEYS_KEPT:
            del self._closed_keys[next(iter(self._closed_keys))]
        return await self._by_key.pop(key).close()

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        if key in self._closed_keys:
            raise refusals.session_closed()
        session = self._by_key.get(key)
        if session is None:
            raise refusals.unknown_key()
        return session

    async def _call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await request.read()
        asked = dialect.parse(body)
        conversation, removed = strip_volatile(asked.conversation, self._volatile)
        call = ModelCall(
            conversation=conversation,
            body_key=sha256(f"{dialect.path}\n".encode() + body).hexdigest(),
            idempotency_key=request.headers.get("Idempotency-Key", "")[:256],
            is_retry=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
            requested=asked.requested | ({"removed": [text[:256] for text in removed[:16]]} if removed else {}),
        )
        task = session.submit(call)
        if asked.stream:
            return await self._stream(request, dialect, asked, task)
        answer = await _finished(task)
        return web.Response(body=dialect.body(answer, asked), content_type="application/json")

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: HarnessRequest, task: "asyncio.Task[Answer]"
    ) -> web.StreamResponse:
        """Tell a finished answer as a stream; errors have their status as long as nothing was sent."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await asyncio.wait([task], timeout=self._keep_alive_s)
        if task.done():
            await _finished(task)
        # A client that goes away is no fault; its call goes on, so that a retry finds it.
        with suppress(ConnectionResetError):
            await response.prepare(request)
            while not task.done():
                await response.write(dialect.keep_alive)
                await asyncio.wait([task], timeout=self._keep_alive_s)
            await response.write(await self._ending(dialect, asked, task))
            await response.write_eof()
        return response

    async def _ending(self, dialect: Dialect, asked: HarnessRequest, task: "asyncio.Task[Answer]") -> bytes:
        """Return what follows the signs of life: the whole answer, or why there is none."""
        try:
            answer = await _finished(task)
        except CallRefusedError as refusal:
            return dialect.late_error(refusal, asked)
        return b"".join(dialect.events(answer, asked))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        conversation, _ = strip_volatile(messages.parse_count(await request.read()), self._volatile)
        return web.json_response({"input_tokens": session.count_tokens(conversation)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = request.match_info.get("model")
        is_anthropic = _dialect_of(request) is MESSAGES
        shown = (
            model_list(is_anthropic=is_anthropic) if model is None else model_named(model, is_anthropic=is_anthropic)
        )
        return web.json_response(shown)


async def _finished(task: "asyncio.Task[Answer]") -> Answer:
    """Return a call's answer; the call goes on if the client goes away, so that its retry finds it."""
    await asyncio.wait([task])
    if task.cancelled():
        raise refusals.session_closed()
    return task.result()


@web.middleware
async def _in_envelope(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer refusals, and what the web framework refuses by itself, in the dialect's envelope."""
    try:
        return await handler(request)
    except CallRefusedError as error:
        refusal = error
    except web.HTTPRequestEntityTooLarge as error:
        refusal = CallRefusedError(413, "request_too_large", error.text or "the body is too large")
    except web.HTTPException as error:
        served = ", ".join(dialect.path for dialect in DIALECTS)
        message = f"{request.method} {request.path[:256]}: {error.reason}; POST to one of {served}"
        refusal = CallRefusedError(error.status, "not_served", message)
    status, payload = _dialect_of(request).error(refusal)
    headers = {"x-should-retry": "false"}
    if refusal.retry_after_s is not None:
        headers = {"x-should-retry": "true", "Retry-After": str(refusal.retry_after_s)}
    return web.json_response(payload, status=status, headers=headers)


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect that a request is written in; one that no path tells is Anthropic's if a header says so."""
    for dialect in DIALECTS:
        if request.path.startswith(dialect.path):
            return dialect
    return MESSAGES if "anthropic-version" in request.headers else CHAT
