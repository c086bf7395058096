"""Answers whose clients hung up before: they ask again, and not every harness marks what it repeats."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from etude.gateway.conversation import Conversation

_MOST_CALLS = 32

_Answer = TypeVar("_Answer")


class Delivery:
    """Whether an answer came to its client."""

    def __init__(self, is_gone: Callable[[], bool] = lambda: False) -> None:
        """Ask `is_gone` whether the client hung up."""
        self._is_gone = is_gone
        self._is_done = False

    def done(self) -> None:
        """Note that all of the answer was sent."""
        self._is_done = True

    @property
    def is_done(self) -> bool:
        """All of the answer was sent."""
        return self._is_done

    @property
    def is_lost(self) -> bool:
        """The client is gone, and has no answer."""
        return not self._is_done and self._is_gone()


@dataclass(frozen=True, slots=True)
class _Sent(Generic[_Answer]):
    conversation: Conversation
    task: "asyncio.Future[_Answer]"
    delivery: Delivery


class LostAnswers(Generic[_Answer]):
    """The newest calls of a session, by what was asked and what became of the answer."""

    def __init__(self) -> None:
        self.count = 0
        """Answers that were lost and asked for again."""
        self._sent: deque[_Sent[_Answer]] = deque(maxlen=_MOST_CALLS)

    def find(self, conversation: Conversation) -> "asyncio.Future[_Answer] | None":
        """Return the task of a call that asked the same and lost its client, unless it failed."""
        for sent in self._sent:
            failed = sent.task.done() and (sent.task.cancelled() or sent.task.exception() is not None)
            if sent.delivery.is_lost and not failed and sent.conversation == conversation:
                self.count += 1
                return sent.task
        return None

    def track(self, conversation: Conversation, task: "asyncio.Future[_Answer]", delivery: Delivery) -> None:
        """Note for whom the answer of a call is now."""
        # Who has its answer will not ask again; a conversation that was kept for nothing is as large as the session.
        others = [sent for sent in self._sent if sent.task is not task and not sent.delivery.is_done]
        self._sent = deque([*others, _Sent(conversation, task, delivery)], maxlen=_MOST_CALLS)
