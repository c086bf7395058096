"""The controller's pulse: how late its event loop is, what it waits for, and what keeps it when it does not turn.

A task measures the loop; a thread, which a blocked loop does not stop, publishes services/controller.json about every
second, samples the stack of what blocks, and raises the alarm. So `beat` is the loop's and `written` the thread's.
"""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic

import msgspec

from etude.errors import EtudeError
from etude.interfaces import ObjectStore
from etude.runtime.services import CONTROLLER_KEY, ControllerState, this_host
from etude.telemetry.clock import wall_time
from etude.telemetry.waits import current_waits

BEAT_S = 0.25
ALARM_S = 1.0
"""Lateness of the event loop that people are told of."""

_PUBLISH_S = 1.0
_FRAMES = 4
_JOINED_WITHIN_S = 10.0


class Pulse:
    """Measures and publishes; an async context manager, entered in the event loop that it is about."""

    def __init__(
        self, store: ObjectStore, *, note: Callable[[str], None] = lambda _: None, publish_s: float = _PUBLISH_S
    ) -> None:
        """Publish into `store`; `note` is called on the event loop with an alarm once it turns again."""
        self._store = store
        self._note = note
        self._publish_s = publish_s
        self._started = wall_time()
        self._beat = monotonic()
        self._beat_wall = wall_time()
        self._rests = False
        self._worst_s = 0.0
        self._shown_worst_s = 0.0
        self._blocked_in = ""
        """Where the loop was when it was looked at last, while it is late."""
        self._stood_in = ""
        """Where it was when it was found late; what it does later, before it comes to measure, is not what held it."""
        self._error = ""
        self.stage = ""
        """What the command is at, for people."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._loop_thread = threading.get_ident()

    async def __aenter__(self) -> "Pulse":
        self._loop_thread = threading.get_ident()
        self._beat, self._beat_wall = monotonic(), wall_time()
        self._task = asyncio.create_task(self._measure(), name="pulse")
        self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._error = "" if error is None else f"{type(error).__name__}: {error}"
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, _JOINED_WITHIN_S)

    @contextmanager
    def resting(self) -> Generator[None]:
        """Expect nothing of the event loop during the block, which computes without awaiting."""
        self._rests = True
        try:
            yield
        finally:
            self._beat, self._beat_wall = monotonic(), wall_time()
            self._rests = False

    def worst_lag(self) -> float:
        """Return by how many seconds the loop was late at most, since this was last asked."""
        worst, self._worst_s = max(self._worst_s, self._lateness()), 0.0
        return worst

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            late = self._lateness()
            self._worst_s = max(self._worst_s, late)
            self._shown_worst_s = max(self._shown_worst_s, late)
            self._beat, self._beat_wall = monotonic(), wall_time()
            if late > ALARM_S:
                place = self._stood_in or "a place that no sample caught"
                self._note(f"the event loop stood still for {late:.1f} s, in {place}")
            self._blocked_in = self._stood_in = ""

    def _lateness(self) -> float:
        return 0.0 if self._rests else max(0.0, monotonic() - self._beat - BEAT_S)

    def _watch(self) -> None:
        """Sample the loop's thread while it is late, and publish; the thread's whole life."""
        published = 0.0
        with asyncio.Runner() as runner:
            while not self._stopping.wait(BEAT_S):
                if self._lateness() > ALARM_S / 2:
                    self._blocked_in = _stack_of(self._loop_thread)
                    self._stood_in = self._stood_in or self._blocked_in
                else:
                    self._stood_in = ""
                if monotonic() - published >= self._publish_s:
                    runner.run(self._publish(ended=0.0))
                    published = monotonic()
            runner.run(self._publish(ended=wall_time()))

    async def _publish(self, *, ended: float) -> None:
        lag_s, self._shown_worst_s = max(self._shown_worst_s, self._lateness()), 0.0
        state = ControllerState(
            pid=os.getpid(),
            host=this_host(),
            started=self._started,
            beat=wall_time() if self._rests else self._beat_wall,
            written=wall_time(),
            lag_s=round(lag_s, 3),
            blocked_in=self._blocked_in,
            waits=current_waits(),
            stage=self.stage,
            ended=ended,
            error=self._error,
        )
        try:
            await self._store.put(CONTROLLER_KEY, msgspec.json.encode(state))
        except (EtudeError, OSError) as error:
            # What the run needs of the store fails where it is needed, with a name; this only looks on.
            self._error = f"the state could not be published: {error}"


def _stack_of(thread: int) -> str:
    """Return the innermost frames of a thread, outermost first."""
    # The documented way to another thread's stack, in spite of its name.
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{one.filename.rpartition('/')[2]}:{one.lineno} {one.name}" for one in frames)
