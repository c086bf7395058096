"""The gateway: one loopback port of the model API, one key per session."""

import secrets
from collections.abc import Sequence
from re import Pattern

from etude.config import EdgeRule
from etude.gateway import refusals
from etude.gateway.api import ModelApi
from etude.gateway.door import Door
from etude.gateway.gate import Gate
from etude.gateway.sessions import Session
from etude.gateway.turns import Turns
from etude.gateway.visitors import Bounds
from etude.gateway.volatile import DECLARED
from etude.interfaces import Renderer, Sampler, SessionRecord, SessionSpec

_CLOSED_KEYS_KEPT = 65536


class Gateway:
    """A `SessionHost`: answers harnesses with what the sampler draws, and keeps the exact tokens.

    `context_length` bounds prompt and answer together, in tokens; `call_timeout_s` one request to the sampler. A stream
    whose answer takes longer than `keep_alive_s` gets its headers and a sign of life then, and another each
    `keep_alive_s`. What a rule of `volatile` finds in a system message is taken out before anything else happens, and
    kept in the session's record. `rules` say what calls are whose messages do not tell; the header `X-Etude-Parent`,
    with the id of an answer or of a tool call, says whose sub-agent asks. `bounds` are those of the port.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        context_length: int,
        call_timeout_s: float = 600.0,
        keep_alive_s: float = 10.0,
        volatile: Sequence[Pattern[str]] = DECLARED,
        rules: Sequence[EdgeRule] = (),
        bounds: Bounds | None = None,
    ) -> None:
        self.gate = Gate(sampler)
        """Shut while weights change, by whoever changes them."""
        self._renderer = renderer
        self._context_length = context_length
        self._call_timeout_s = call_timeout_s
        self._rules = rules
        self._by_key: dict[str, Session] = {}
        self._keys: dict[str, str] = {}
        self._closed_keys: dict[str, None] = {}
        self.num_opened = 0
        """Sessions so far."""
        self.turns = Turns()
        """Whose request is worked on next."""
        self.api = ModelApi(self._session, keep_alive_s=keep_alive_s, volatile=volatile, turns=self.turns)
        """What answers at the port."""
        self.door = Door(self.api.answer, refuse=self.api.refuse, bounds=bounds or Bounds())
        """Who comes to it."""

    @property
    def port(self) -> int:
        """Loopback port of the model API; 0 before `start`."""
        return self.door.port

    @property
    def sessions(self) -> tuple[str, ...]:
        """Ids of the open sessions, oldest first."""
        return tuple(self._keys)

    async def start(self, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, 0 for any free one; raise `HostError` when it is taken."""
        await self.door.open(port)

    async def stop(self) -> None:
        """Close every session and the port."""
        for session_id in self.sessions:
            await self.close(session_id)
        await self.door.close()

    async def open(self, spec: SessionSpec) -> str:
        """Return the key of a new session; raise `ValueError` when one with this id is open."""
        if spec.session_id in self._keys:
            msg = f"session {spec.session_id} is open already"
            raise ValueError(msg)
        key = f"sk-etude-{secrets.token_urlsafe(32)}"
        self.num_opened += 1
        self._keys[spec.session_id] = key
        self._by_key[key] = Session(
            spec,
            sampler=self.gate,
            renderer=self._renderer,
            context_length=self._context_length,
            call_timeout_s=self._call_timeout_s,
            rules=self._rules,
            oldest_version=lambda: self.gate.weight_version,
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
        self.turns.forget(session_id)
        return await self._by_key.pop(key).close()

    def record(self, session_id: str) -> SessionRecord:
        """Return what an open session holds so far; raise `ValueError` when none with this id is open."""
        if session_id not in self._keys:
            msg = f"session {session_id} is not open"
            raise ValueError(msg)
        return self._by_key[self._keys[session_id]].record()

    def _session(self, key: str) -> Session:
        if key in self._closed_keys:
            raise refusals.session_closed()
        session = self._by_key.get(key)
        if session is None:
            raise refusals.unknown_key()
        return session
