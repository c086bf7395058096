"""The gateway's other port, for whoever runs the harnesses: sessions, rewards, pauses, health, metrics.

========================================  ==============================================================================
``POST /sessions``                        open a session: its id, its key and where a harness finds the model
``GET /sessions``, ``GET /sessions/ID``   what is open or was closed, and how far it is
``GET /sessions/ID/rollout``              the tree so far: what each call added, its reward
``GET /sessions/ID/trace_entries``        each call to train on, with all that was seen and drawn: OpenEnv's turns
``POST /sessions/ID/reward``              what the attempt was worth
``POST /sessions/ID/close``               refuse all later calls; the rollout stays
``DELETE /sessions/ID``                   close it, and forget the rollout
``POST /admin/pause``                     let no call reach the samplers: ``{"mode": "drain" | "abort" | "keep"}``
``POST /admin/resume``                    let them through again, none older than ``{"weight_version": N}``
``GET /health``                           the only one that needs no key
``GET /metrics``                          Prometheus text
========================================  ==============================================================================
"""

import hmac
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

import msgspec

from etude.algorithm.trace import training_turns
from etude.gateway import refusals
from etude.gateway.control_records import (
    OpenRequest,
    PauseRequest,
    ResumeRequest,
    RewardRequest,
    nodes_of,
    spec_of,
)
from etude.gateway.dialects.chat import CHAT
from etude.gateway.dialects.dialect import decode
from etude.gateway.door import Door, Head, ReadBody, Reply
from etude.gateway.gauges import prometheus_text
from etude.gateway.refusals import CallRefusedError
from etude.gateway.service import Gateway
from etude.gateway.visitors import Bounds
from etude.interfaces import SessionRecord

_OWNER = "admin"
_SERVED = "see docs/gateway.md for what is"

_Request = TypeVar("_Request", bound=msgspec.Struct)
_Handler = Callable[[bytes], Awaitable[Reply]]


@dataclass(slots=True)
class _Session:
    request: OpenRequest
    opened_at: float
    record: SessionRecord | None = None
    """Once it was closed."""
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict[str, float])


class ControlApi:
    """Opens and closes sessions of a gateway for somebody on another port, who shows the admin key."""

    def __init__(
        self, gateway: Gateway, *, admin_key: str, keep_closed: int = 1024, bounds: Bounds | None = None
    ) -> None:
        """Guard everything but `GET /health` with `admin_key`; remember the newest `keep_closed` closed sessions."""
        if len(admin_key) < 16:  # noqa: PLR2004
            msg = "the admin key must have at least 16 characters: make one with `openssl rand -hex 32`"
            raise ValueError(msg)
        self._gateway = gateway
        self._admin_key = admin_key.encode()
        self._keep_closed = keep_closed
        self._sessions: dict[str, _Session] = {}
        self._door = Door(self.answer, refuse=self.refuse, bounds=bounds or Bounds())

    @property
    def port(self) -> int:
        """Loopback port of the control API; 0 before `start`."""
        return self._door.port

    async def start(self, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, 0 for any free one; raise `HostError` when it is taken."""
        await self._door.open(port)

    async def stop(self) -> None:
        """Close the port; sessions stay open."""
        await self._door.close()

    async def answer(self, head: Head, read: ReadBody) -> Reply:
        """Return the answer to a request: a `door.Handler`."""
        try:
            if (head.method, head.path) == ("GET", "/health"):
                return self._health()
            self._check_key(head)
            handler = self._route(head)
            return await handler(await read(_OWNER))
        except CallRefusedError as refusal:
            return self.refuse(head, refusal)

    @staticmethod
    def refuse(_: Head, refusal: CallRefusedError) -> Reply:
        """Return a refusal in OpenAI's envelope."""
        status, payload = CHAT.error(refusal)
        return Reply(status=status, body=msgspec.json.encode(payload))

    def _check_key(self, head: Head) -> None:
        scheme, _, key = head.headers.get("Authorization", "").partition(" ")
        shown = key if scheme.lower() == "bearer" else head.headers.get("x-api-key", "")
        if not hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), self._admin_key):
            raise refusals.unknown_key()

    def _route(self, head: Head) -> _Handler:
        parts = head.path.strip("/").split("/")
        plain: dict[tuple[str, str], _Handler] = {
            ("POST", "sessions"): self._open,
            ("GET", "sessions"): self._list,
            ("POST", "admin/pause"): self._pause,
            ("POST", "admin/resume"): self._resume,
            ("GET", "metrics"): self._metrics,
        }
        found = plain.get((head.method, "/".join(parts)))
        if found is not None:
            return found
        of_session: dict[tuple[str, str], Callable[[str, _Session, bytes], Awaitable[Reply]]] = {
            ("GET", ""): self._show,
            ("DELETE", ""): self._delete,
            ("GET", "rollout"): self._rollout,
            ("GET", "trace_entries"): self._trace_entries,
            ("POST", "reward"): self._reward,
            ("POST", "close"): self._close,
        }
        handler = of_session.get((head.method, "/".join(parts[2:])))
        if parts[0] != "sessions" or handler is None:
            raise refusals.not_served(head.method, head.path, _SERVED)
        session = self._sessions.get(parts[1])
        if session is None:
            raise refusals.no_session(parts[1])
        return lambda body: handler(parts[1], session, body)

    async def _open(self, body: bytes) -> Reply:
        request = _decoded(body, OpenRequest)
        session_id = request.session_id or secrets.token_hex(8)
        spec = spec_of(request, session_id)
        if session_id in self._sessions:
            raise refusals.malformed(f"session_id: {session_id} is in use; close and delete it first")
        try:
            key = await self._gateway.open(spec)
        except ValueError as error:
            raise refusals.malformed(str(error)) from error
        self._sessions[session_id] = _Session(request, monotonic())
        address = f"http://127.0.0.1:{self._gateway.port}"
        return _json(
            {
                "session_id": session_id,
                "api_key": key,
                "base_url": f"{address}/v1",
                "keyless_url": f"{address}/s/{key}",
                "capture_level": "tokens",
                "rollout_type": request.purpose,
            }
        )

    async def _list(self, _: bytes) -> Reply:
        return _json({"sessions": [_summary(name, session) for name, session in self._sessions.items()]})

    async def _show(self, name: str, session: _Session, _: bytes) -> Reply:
        record = self._record(name, session)
        return _json(_summary(name, session) | _progress(record) | {"metrics": record.metrics})

    async def _rollout(self, name: str, session: _Session, _: bytes) -> Reply:
        record = self._record(name, session)
        return _json(
            _summary(name, session)
            | _progress(record)
            | {
                "schema_version": 1,
                "capture_level": "tokens",
                "rollout_type": session.request.purpose,
                "nodes": nodes_of(record),
                "messages": record.messages,
                "tools": record.tools,
                "requested_sampling": record.requested_sampling,
                "metrics": record.metrics,
            }
        )

    async def _trace_entries(self, name: str, session: _Session, _: bytes) -> Reply:
        record = self._record(name, session)
        drawn_from = session.request.sampling_in_force
        sampling = {name: getattr(drawn_from, name) for name in ("temperature", "top_p", "top_k")}

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"session_id":' + msgspec.json.encode(name) + b',"schema_version":1,"entries":['
            # One turn at a time: each holds its whole prompt.
            for number, turn in enumerate(training_turns(record.nodes, sampling=sampling)):
                yield b"," * bool(number) + msgspec.json.encode(turn)
            yield b"]}"

        return Reply(parts=parts())

    async def _reward(self, name: str, session: _Session, body: bytes) -> Reply:
        told = _decoded(body, RewardRequest)
        if not all(map(math.isfinite, (told.reward, *told.components.values()))):
            raise refusals.malformed("reward: a finite number is expected")
        session.reward, session.components = told.reward, told.components
        return _json(_summary(name, session))

    async def _close(self, name: str, session: _Session, _: bytes) -> Reply:
        if session.record is None:
            session.record = await self._closed(name)
            # Newest last, for the oldest to be forgotten.
            if self._sessions.pop(name, None) is not None:
                self._sessions[name] = session
            closed = [other for other, kept in self._sessions.items() if kept.record is not None]
            for oldest in closed[: max(0, len(closed) - self._keep_closed)]:
                del self._sessions[oldest]
        return _json(_summary(name, session) | _progress(session.record))

    async def _delete(self, name: str, session: _Session, _: bytes) -> Reply:
        self._sessions.pop(name, None)
        if session.record is None:
            await self._closed(name)
        return _json({"session_id": name, "deleted": True})

    async def _pause(self, body: bytes) -> Reply:
        mode = _decoded(body, PauseRequest).mode
        return _json({"paused": mode, "in_flight": await self._gateway.gate.pause(mode)})

    async def _resume(self, body: bytes) -> Reply:
        self._gateway.gate.resume(_decoded(body, ResumeRequest).weight_version)
        return _json({"paused": "", "weight_version": self._gateway.gate.weight_version})

    async def _metrics(self, _: bytes) -> Reply:
        return Reply(body=prometheus_text(self._gateway), content_type="text/plain; version=0.0.4; charset=utf-8")

    def _health(self) -> Reply:
        gate = self._gateway.gate
        return _json(
            {
                "status": "ok",
                "capture_level": "tokens",
                "paused": gate.paused,
                "weight_version": gate.weight_version,
                "sessions": len(self._gateway.sessions),
            }
        )

    def _record(self, name: str, session: _Session) -> SessionRecord:
        try:
            return session.record or self._gateway.record(name)
        except ValueError as error:
            raise refusals.no_session(name) from error

    async def _closed(self, name: str) -> SessionRecord:
        try:
            return await self._gateway.close(name)
        except ValueError as error:
            # Somebody else closes it at the same time.
            raise refusals.no_session(name) from error


def _summary(name: str, session: _Session) -> dict[str, object]:
    asked = session.request
    return {
        "session_id": name,
        "status": "open" if session.record is None else "closed",
        "age_s": round(monotonic() - session.opened_at, 3),
        "task_id": asked.task_id,
        "group_id": asked.group_id,
        "sample_index": asked.sample_index,
        "purpose": asked.purpose,
        "model": asked.model,
        "parent_session": asked.parent_session,
        "metadata": asked.metadata,
        "reward": session.reward,
        "components": session.components,
    }


def _progress(record: SessionRecord) -> dict[str, object]:
    return {
        "num_calls": record.num_calls,
        "num_nodes": len(record.nodes),
        "tokens_drawn": sum(len(node.completion.token_ids) for node in record.nodes),
        "truncated": record.truncated,
        "failure": record.failure,
    }


def _decoded(body: bytes, kind: type[_Request]) -> _Request:
    return decode(body or b"{}", kind)


def _json(value: object) -> Reply:
    return Reply(body=msgspec.json.encode(value))
