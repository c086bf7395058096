"""What makes a repeated call one call: joined while it is in flight, replayed for ten minutes after."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from etude.gateway.refusals import key_reused

KEEP_S = 600.0
MOST_CALLS = 512
MOST_BYTES = 16 << 20

_Answer = TypeVar("_Answer")


@dataclass(slots=True, eq=False)
class _Entry(Generic[_Answer]):
    future: "asyncio.Future[_Answer]"
    body_key: str
    names: tuple[str, ...]
    answered_at: float = 0.0
    num_bytes: int = 0


class Replays(Generic[_Answer]):
    """Calls of a session by the key that their client gave them and by their bytes.

    A call in flight is always found. One that was answered is forgotten after `keep_s` seconds, or once more than
    `most_calls` or `most_bytes` of answers are kept; one that failed is forgotten at once, so that asking again tries
    again.
    """

    def __init__(
        self,
        *,
        num_bytes: Callable[[_Answer], int],
        keep_s: float = KEEP_S,
        most_calls: int = MOST_CALLS,
        most_bytes: int = MOST_BYTES,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Keep answers of the size that `num_bytes` says."""
        self.count = 0
        """Calls that were answered by an earlier one."""
        self._num_bytes = num_bytes
        self._keep_s = keep_s
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._now = now
        self._by_name: dict[str, _Entry[_Answer]] = {}
        self._answered: OrderedDict[_Entry[_Answer], None] = OrderedDict()
        self._bytes = 0

    def find(self, *, body_key: str, idempotency_key: str, is_retry: bool) -> "asyncio.Future[_Answer] | None":
        """Return what will be, or is, the answer of the call that this one repeats.

        A body that is repeated without a key or a mark is a call of its own: a harness may mean to ask twice.

        Raises:
            CallRefusedError: The key came with another body (400).
        """
        self._forget_old()
        entry = self._by_name.get(_name(body_key, idempotency_key))
        if entry is None:
            return None
        if entry.body_key != body_key:
            raise key_reused(idempotency_key)
        if not is_retry and not idempotency_key:
            return None
        self.count += 1
        return entry.future

    def add(self, task: "asyncio.Task[_Answer]", *, body_key: str, idempotency_key: str) -> None:
        """Let later calls find this one."""
        names = tuple({_name(body_key, idempotency_key), body_key})
        entry = _Entry(task, body_key, names)
        self._by_name |= dict.fromkeys(names, entry)
        task.add_done_callback(lambda task: self._settle(entry, task))

    def _settle(self, entry: _Entry[_Answer], task: "asyncio.Task[_Answer]") -> None:
        # Asked for even if nobody waits any more, so that the loop does not complain that nobody did.
        if task.cancelled() or task.exception() is not None:
            self._forget(entry)
            return
        # A task would keep its coroutine and its context along with the answer.
        entry.future = task.get_loop().create_future()
        entry.future.set_result(task.result())
        entry.answered_at = self._now()
        entry.num_bytes = self._num_bytes(task.result())
        self._bytes += entry.num_bytes
        self._answered[entry] = None
        self._forget_old()

    def _forget_old(self) -> None:
        while self._answered:
            oldest = next(iter(self._answered))
            is_young = self._now() - oldest.answered_at <= self._keep_s
            if is_young and len(self._answered) <= self._most_calls and self._bytes <= self._most_bytes:
                return
            del self._answered[oldest]
            self._bytes -= oldest.num_bytes
            self._forget(oldest)

    def _forget(self, entry: _Entry[_Answer]) -> None:
        for name in entry.names:
            # A body's name is that of its newest call.
            if self._by_name.get(name) is entry:
                del self._by_name[name]


def _name(body_key: str, idempotency_key: str) -> str:
    return f"key {idempotency_key}" if idempotency_key else body_key
