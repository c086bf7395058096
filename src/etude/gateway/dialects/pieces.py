"""Puts together the messages of harnesses that send them in pieces."""

import re
from typing import Literal, cast

Piece = Literal["reasoning", "text", "call"]

_ORDER: tuple[Piece, ...] = ("reasoning", "text", "call")
_OUR_CALL = re.compile(r"(call_[0-9a-f]{24})_[0-9]+")


class Pieces:
    """Collects pieces in the order in which a harness sends them; `messages` are OpenAI's.

    An answer is one assistant message: reasoning, then text, then calls. A piece that cannot come next begins another
    answer. Some harnesses send the result of each of several parallel calls right behind its call; a call belongs to
    the answer that it was drawn in, which its id says. Others send text behind the calls that were drawn after it.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self._answer: dict[str, object] | None = None
        self._last: Piece | None = None
        self._is_ours = False
        self._by_id: dict[str, dict[str, object]] = {}

    def say(self, role: str, text: str) -> None:
        """Add a message of anyone but the assistant."""
        self._answer = None
        self._by_id.clear()
        self.messages.append({"role": role, "content": text})

    def report(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._answer = None
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def begin_answer(self) -> None:
        """Open an answer that may stay empty, unless one is open."""
        if self._answer is None:
            self._open()

    def end_answer(self) -> None:
        """Let the next piece begin another answer."""
        self._answer = None

    def think(self, reasoning: str) -> None:
        """Add reasoning to an answer."""
        answer = self._answer_for("reasoning")
        if reasoning:
            answer["reasoning_content"] = reasoning

    def write(self, text: str) -> None:
        """Add text to an answer."""
        self._answer_for("text")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call to an answer."""
        ours = _OUR_CALL.fullmatch(call_id)
        known = None if ours is None else self._by_id.get(ours[1])
        answer = self._answer_for("call") if known is None else known
        if ours is not None:
            self._by_id[ours[1]] = answer
            self._is_ours = answer is self._answer
        calls = cast("list[object]", answer.setdefault("tool_calls", []))
        calls.append({"function": {"name": name, "arguments": arguments}, "id": call_id, "type": "function"})

    def _answer_for(self, piece: Piece) -> dict[str, object]:
        """Return the open answer when the piece can come next in it, and else a new one."""
        answer = self._answer
        if answer is None or not self._may_follow(piece, answer):
            answer = self._open()
        self._last = piece
        return answer

    def _may_follow(self, piece: Piece, answer: dict[str, object]) -> bool:
        if self._last is None or self._last == piece == "call":
            return True
        if piece == "text" and self._is_ours:
            return answer["content"] is None
        return _ORDER.index(self._last) < _ORDER.index(piece)

    def _open(self) -> dict[str, object]:
        self._answer = {"role": "assistant", "content": None}
        self._last = None
        self._is_ours = False
        self.messages.append(self._answer)
        return self._answer
