"""The connections of one port by whose they are, so that neither strangers nor one session take them all."""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass

import msgspec

from etude.gateway.refusals import too_many_bytes, too_many_connections


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What one port lets its clients take."""

    body_bytes: int = 4 << 20
    body_s: float = 30.0
    """Seconds in which a body must be there."""
    write_s: float = 60.0
    """Seconds in which a client must take what it is sent."""
    strangers: int = 256
    """Connections that have not shown a key yet; the oldest is cut for the next one."""
    stranger_s: float = 10.0
    """Seconds in which a connection must show one."""
    connections: int = 128
    """Connections on which one session's key was shown; more are refused."""
    buffered_bytes: int = 16 << 20
    """Of one session's bodies that are being read."""


@dataclass(slots=True)
class _Stranger:
    transport: asyncio.Transport
    alarm: asyncio.TimerHandle


class Visitors:
    """Who is connected to a port."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._strangers: OrderedDict[asyncio.BaseProtocol, _Stranger] = OrderedDict()
        self._owners: dict[asyncio.BaseProtocol, str] = {}
        self._held: Counter[str] = Counter()
        self._buffered: Counter[str] = Counter()
        self.cut = 0
        """Connections of strangers that were cut: there were too many of them, or they took too long."""

    def __len__(self) -> int:
        return len(self._strangers) + len(self._owners)

    def arrive(self, visitor: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        """Note a connection that nobody vouches for yet."""
        if len(self._strangers) >= self._bounds.strangers:
            # Who has a key shows it within milliseconds: the oldest stranger is one without.
            self._cut(next(iter(self._strangers)))
        alarm = asyncio.get_running_loop().call_later(self._bounds.stranger_s, self._cut, visitor)
        self._strangers[visitor] = _Stranger(transport, alarm)

    def vouch(self, visitor: asyncio.BaseProtocol, owner: str) -> None:
        """Note that a session's key was shown on a connection; raise `CallRefusedError` (429) when it has too many."""
        if self._owners.get(visitor) == owner:
            return
        if self._held[owner] >= self._bounds.connections:
            raise too_many_connections(self._bounds.connections)
        self.leave(visitor)
        self._owners[visitor] = owner
        self._held[owner] += 1

    def buffer(self, owner: str, num_bytes: int) -> None:
        """Count bytes of bodies that are being read, or are not any more (below 0).

        Raises:
            CallRefusedError: The session has too many (429); these are not counted.
        """
        buffered = self._buffered[owner] + num_bytes
        if num_bytes > 0 and buffered > self._bounds.buffered_bytes:
            raise too_many_bytes(self._bounds.buffered_bytes)
        self._buffered[owner] = buffered
        if not buffered:
            del self._buffered[owner]

    def buffered(self, owner: str) -> int:
        """Return the bytes of an owner's bodies that are being read."""
        return self._buffered[owner]

    def is_stranger(self, visitor: asyncio.BaseProtocol) -> bool:
        """Return whether no key was shown on a connection."""
        return visitor in self._strangers

    def leave(self, visitor: asyncio.BaseProtocol) -> None:
        """Forget a connection."""
        stranger = self._strangers.pop(visitor, None)
        if stranger is not None:
            stranger.alarm.cancel()
        owner = self._owners.pop(visitor, None)
        if owner is not None:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]

    def _cut(self, visitor: asyncio.BaseProtocol) -> None:
        stranger = self._strangers.pop(visitor)
        stranger.alarm.cancel()
        stranger.transport.abort()
        self.cut += 1
