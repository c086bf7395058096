"""Whether a renderer leaves earlier tokens alone when a conversation goes on, tried on made-up conversations.

For messages m, an answer a and a tail t, `render(m + a + t)` must begin with `render(m)` and end with `extend(t)`; what
is between them is what a policy would have drawn, and reading it must give a back.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from etude.gateway.refusals import CallRefusedError
from etude.gateway.renderers.answers import calls_of
from etude.gateway.renderers.family import FamilyRenderer, Message, Tail, tail_of

# In the order of the alphabet, because some families sort keys.
TOOLS: tuple[dict[str, object], ...] = tuple(
    {
        "function": {
            "description": f"Probe {name}.",
            "name": name,
            "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"], "type": "object"},
        },
        "type": "function",
    }
    for name in ("etude_read", "etude_write")
)
_SYSTEM: Message = {"role": "system", "content": "Probe the template."}
_QUESTION: Message = {"role": "user", "content": "What does <b>it</b> do?"}
_AGAIN: Message = {"role": "user", "content": "And é?\n\nGo on."}
# A quote, an escape, a letter outside of ASCII, spaces where no template would put them.
_ARGUMENTS = '{"text" :  "a \\"b\\" \\u00e9 ü"}'
_REASONING = "I consider\n\nthe probe."


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation of three parts."""

    name: str
    before: tuple[Message, ...]
    answer: Message
    tail: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """Where a renderer does not leave earlier tokens alone."""

    probe: str
    tail: Tail
    reason: str
    refused: bool = False
    """Whether no such conversation can be rendered at all: then nothing is wrong with its tokens."""
    position: int = -1
    """Of the first token that differs in the longer conversation; -1 when it is not about one token."""
    drawn_id: int = -1
    drawn_text: str = ""
    """What the shorter conversation has there."""
    rendered_id: int = -1
    rendered_text: str = ""
    """What the longer one has."""


def probes_for(renderer: FamilyRenderer, *, drops_reasoning: bool = False) -> list[Probe]:
    """Return conversations of what a renderer can spell: with and without a system message, history, tools, reasoning.

    `drops_reasoning` says that the family may reason although the renderer never spells it.
    """
    called = _shown(renderer, [_QUESTION, _turn(1)[0], _AGAIN])
    tools = TOOLS if "etude_read" in _shown(renderer, [_QUESTION], TOOLS) else ()
    thoughts = ["", _REASONING] if drops_reasoning or _spells_reasoning(renderer) else [""]
    if _shown(renderer, [_QUESTION]).rstrip().endswith("<think>"):
        thoughts = [_REASONING]
    return list(_probes(thoughts, calls="etude_read" in called, tools=tools))


def _shown(renderer: FamilyRenderer, messages: Sequence[Message], tools: Sequence[dict[str, object]] = ()) -> str:
    """Return a conversation's text, empty when it cannot be rendered."""
    try:
        return renderer.text(renderer.render(messages, tools))
    except CallRefusedError:
        return ""


def _spells_reasoning(renderer: FamilyRenderer) -> bool:
    try:
        drawn = renderer.answer({"role": "assistant", "content": "It does.", "reasoning_content": "Why"})
    except CallRefusedError:
        return False
    return "reasoning_content" in renderer.parse(drawn)


def _probes(thoughts: Sequence[str], *, calls: bool, tools: tuple[dict[str, object], ...]) -> Iterator[Probe]:
    for system, thought, (told, tail) in product(((), (_SYSTEM,)), thoughts, _turns(calls=calls)):
        answer = dict(told) | ({"reasoning_content": thought} if thought else {})
        for history in ((), (answer, *_results(answer), _AGAIN)):
            name = [
                "system and question" if system else "question",
                *(["an earlier turn"] if history else []),
                *(["reasoning"] if thought else []),
                f"answer with {len(calls_of(told))} calls" if calls_of(told) else "answer",
                "then " + " and ".join(tail_of(tail)),
            ]
            before = (*system, _QUESTION, *history)
            yield Probe(name=", ".join(name), before=before, answer=answer, tail=tail, tools=tools)


def find_breaks(renderer: FamilyRenderer, chosen: Sequence[Probe]) -> list[Break]:
    """Return the first break of every probe that has one."""
    return [found for probe in chosen if (found := _break_of(renderer, probe)) is not None]


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first place at which two sequences differ, or the end of the shorter."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _turns(*, calls: bool) -> Iterator[tuple[Message, tuple[Message, ...]]]:
    for tail in (_AGAIN, _SYSTEM):
        yield {"role": "assistant", "content": "It does."}, (tail,)
    if calls:
        yield _turn(2)
        answer, results = _turn(1)
        yield from ((answer, (*results, *tail)) for tail in ((), (_AGAIN,), (_SYSTEM,)))


def _turn(count: int) -> tuple[Message, tuple[Message, ...]]:
    """Return an answer with calls, and their results."""
    names = ("etude_read", "etude_write")[:count]
    calls = [
        {"id": f"functions.{name}:{place}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for place, name in enumerate(names)
    ]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    return answer, _results(answer)


def _results(answer: Message) -> tuple[Message, ...]:
    return tuple(
        {"role": "tool", "tool_call_id": call.call_id, "content": f"{call.name}: é.\n"} for call in calls_of(answer)
    )


def _break_of(renderer: FamilyRenderer, probe: Probe) -> Break | None:
    def broken(reason: str, *, refused: bool = False) -> Break:
        return Break(probe=probe.name, tail=tail_of(probe.tail), reason=reason, refused=refused)

    try:
        prompt = renderer.render(probe.before, probe.tools)
        whole = renderer.render([*probe.before, probe.answer, *probe.tail], probe.tools)
        tail = renderer.extend(probe.tail, finished=True)
    except CallRefusedError as error:
        return broken(error.message, refused=True)
    if tail is None:
        return broken("the renderer starts a branch after such a tail")
    place = first_difference(prompt, whole)
    if place < len(prompt):
        return _at(broken("a later turn changes what was before it"), place, prompt, whole, renderer)
    drawn = whole[len(prompt) : len(whole) - len(tail)]
    if whole[len(prompt) + len(drawn) :] != tail or not drawn or drawn[-1] not in renderer.stop_token_ids:
        expected = prompt + renderer.answer(probe.answer) + tail
        place = first_difference(expected, whole)
        reason = "what follows an answer is not what the whole conversation has there"
        return _at(broken(reason), place, expected, whole, renderer)
    return _misread(renderer, probe, prompt, whole, drawn)


def _misread(
    renderer: FamilyRenderer,
    probe: Probe,
    prompt: list[int],
    whole: list[int],
    drawn: list[int],
) -> Break | None:
    """Return what is lost between an answer and how later turns show it."""
    read = renderer.parse(drawn)
    reasons = {
        "reasoning": (read.get("reasoning_content") or "") == (probe.answer.get("reasoning_content") or ""),
        "text": (read.get("content") or "") == probe.answer["content"],
        "tool calls": [(call.name, call.arguments) for call in calls_of(read)]
        == [(call.name, call.arguments) for call in calls_of(probe.answer)],
    }
    lost = [name for name, kept in reasons.items() if not kept]
    if not lost:
        return None
    expected = prompt + renderer.answer(probe.answer)
    found = Break(probe=probe.name, tail=tail_of(probe.tail), reason=f"later turns do not show the answer's {lost[0]}")
    return _at(found, first_difference(expected, whole), expected, whole, renderer)


def _at(found: Break, place: int, drawn: list[int], rendered: list[int], renderer: FamilyRenderer) -> Break:
    one = drawn[place] if place < len(drawn) else -1
    other = rendered[place] if place < len(rendered) else -1
    return msgspec.structs.replace(
        found,
        position=place,
        drawn_id=one,
        drawn_text="" if one < 0 else renderer.text([one]),
        rendered_id=other,
        rendered_text="" if other < 0 else renderer.text([other]),
    )
