"""The fixed sequence that probes look at: a conversation with a tool call, as the policy's own renderer spells it."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec

from etude.errors import RunError
from etude.interfaces import Renderer

_DRAWN_MAX = 48
"""Decoding steps of a probe."""
_CANARY_DRAWN, _CANARY_TOKENS = 12, 48

_TOOLS: tuple[dict[str, object], ...] = (
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
)
_QUESTION: tuple[dict[str, object], ...] = (
    {"role": "system", "content": "You repair programs."},
    {"role": "user", "content": "The tests of parse.py fail.\nRepair it."},
)
# Quotes, an escape, a line break and a letter outside of ASCII: what templates and parsers stumble over.
_CALL = {"name": "shell", "arguments": r'{"command": "sed -n \"1,20p\" parse.py\ngrep -c \u00e9 parse.py"}'}
_RESULT: dict[str, object] = {"role": "tool", "tool_call_id": "call-1", "content": "def f(x):\n    return 'é' + x\n"}


class ProbeText(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, the same ones for the same renderer."""

    token_ids: tuple[int, ...]
    drawn_from: int
    text_of: Callable[[int], str]
    """Text of one id, for people."""

    def fit(self, max_tokens: int) -> "ProbeText":
        """Return the last tokens, as many as a context takes."""
        cut = max(0, len(self.token_ids) - max_tokens)
        return ProbeText(token_ids=self.token_ids[cut:], drawn_from=max(1, self.drawn_from - cut), text_of=self.text_of)

    def short(self) -> "ProbeText":
        """Return a part that is cheap enough to be looked at after every swap."""
        end = self.drawn_from + _CANARY_DRAWN
        begun = ProbeText(token_ids=self.token_ids[:end], drawn_from=self.drawn_from, text_of=self.text_of)
        return begun.fit(_CANARY_TOKENS)


def probe_text(renderer: Renderer) -> ProbeText:
    """Return tokens of a conversation, of which the policy would draw the last ones.

    Raises:
        RunError: The renderer does not give a tool call back as it was, or a later turn changes the tokens of an
            earlier one: training would be about other tokens than those that were drawn.
    """
    prompt = renderer.render(_QUESTION, _TOOLS)
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "call-1", "type": "function", "function": _CALL}]}
    whole = renderer.render([*_QUESTION, call, _RESULT], _TOOLS)
    if whole[: len(prompt)] != prompt:
        raise _broken(f"the second turn changes token {_first_difference(whole, prompt)} of the first one's prompt")
    answer = _answer(renderer, whole[len(prompt) :])
    _check_answer(renderer.parse(answer))
    return ProbeText(
        token_ids=tuple(whole[: len(prompt) + _DRAWN_MAX]),
        drawn_from=len(prompt),
        text_of=lambda token_id: str(renderer.parse([token_id]).get("content") or ""),
    )


def _answer(renderer: Renderer, rest: Sequence[int]) -> Sequence[int]:
    """Return what the policy would have drawn: the part before what extends a drawn answer."""
    tail = renderer.extend([_RESULT], finished=True)
    if tail is None:
        ends = [place for place, token in enumerate(rest) if token in renderer.stop_token_ids]
        return rest[: ends[0] + 1] if ends else rest
    answer = rest[: len(rest) - len(tail)]
    if list(rest[len(answer) :]) != tail or not answer or answer[-1] not in renderer.stop_token_ids:
        raise _broken("a tool result appended to a drawn answer is not what rendering the conversation at once gives")
    return answer


def _check_answer(message: Mapping[str, object]) -> None:
    calls = cast("Sequence[Mapping[str, object]]", message.get("tool_calls") or ())
    told = [call.get("function") for call in calls]
    if told != [_CALL]:
        raise _broken(f"the tool call {_CALL} comes back as {told or message.get('content')!r}")


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _broken(what: str) -> RunError:
    return RunError(f"the renderer does not fit the policy: {what}; set policy.renderer to one that does")
