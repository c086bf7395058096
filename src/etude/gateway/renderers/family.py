"""A renderer made of a vocabulary and a format: what all families have in common."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

from tokenizers import Tokenizer

from etude.gateway.renderers.answers import Kind, Part, Reader, message_of, parts_of
from etude.gateway.renderers.vocabulary import Frame, Vocabulary
from etude.interfaces import Renderer

Message = Mapping[str, object]


Tail = tuple[str, ...]
"""Roles of messages that follow one another, each run of one role once."""


def tail_of(messages: Sequence[Message]) -> Tail:
    """Return the kind of tail that messages are."""
    return tuple(role for role, _ in groupby(str(message["role"]) for message in messages))


class FamilyRenderer(Renderer, Protocol):
    """A `Renderer` that can also spell answers, and tell what each character of a drawn one is."""

    def answer(self, message: Message) -> list[int]:
        """Return an assistant message as the policy would draw it, end of turn included: for demonstrations."""
        ...

    def parts(self, token_ids: Sequence[int]) -> list[Part]:
        """Return drawn tokens in parts whose texts, joined, are all that was drawn."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Return how token ids read; what is no UTF-8 becomes U+FFFD."""
        ...


class Format(Protocol):
    """How a family spells conversations; every method returns pieces, see `Vocabulary`."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end an answer, the usual one first."""
        ...

    @property
    def tokens(self) -> tuple[str, ...]:
        """Added tokens that the tokenizer must have."""
        ...

    @property
    def after_answer(self) -> str:
        """What stands between an answer's end and the next turn."""
        ...

    @property
    def reader(self) -> Reader:
        """Reads tool calls."""
        ...

    @property
    def opens_reasoning(self) -> bool:
        """Whether prompts end inside of the reasoning."""
        ...

    def head(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> tuple[list[str], Sequence[Message]]:
        """Return how a conversation begins, and the messages that are not in there."""
        ...

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as later turns see them: some families drop earlier reasoning."""
        ...

    def incoming(self, messages: Sequence[Message]) -> list[str]:
        """Spell messages that follow one another and are no answers."""
        ...

    def opening(self, last: Message | None, answer: Message | None) -> list[str]:
        """Spell what comes between the last message and an answer; None when it is still to be drawn."""
        ...

    def spoken(self, message: Message) -> list[str]:
        """Spell an answer without its end."""
        ...

    def extends(self, messages: Sequence[Message]) -> bool:
        """Return whether these messages leave what was before them as it was."""
        ...


class FormatRenderer:
    """A `FamilyRenderer` of one format.

    Raises `PolicyError` when the tokenizer lacks a token of the format or does not keep text as it is.
    """

    def __init__(self, tokenizer: Tokenizer | Vocabulary, form: Format) -> None:
        self._vocabulary = Vocabulary.of(tokenizer)
        self._form = form
        for token in form.tokens:
            self._vocabulary.id_of(token)
        self._stops = tuple(self._vocabulary.id_of(token) for token in form.stops)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends an answer."""
        return self._stops

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the whole prompt, ending where the assistant's answer begins.

        Answers are encoded apart from what stands before them, as they were drawn apart.
        """
        pieces, rest = self._form.head(self._form.seen(messages), tools)
        ids = self._vocabulary.encode(pieces)
        last: Message | None = None
        for is_answer, run in groupby(rest, lambda message: message["role"] == "assistant"):
            turns = list(run)
            if not is_answer:
                ids += self._vocabulary.encode(self._form.incoming(turns))
                last = turns[-1]
                continue
            for turn in turns:
                ids += self._vocabulary.encode(self._form.opening(last, turn))
                ids += self._vocabulary.encode([*self._form.spoken(turn), Frame(self._form.stops[0])])
                ids += self._vocabulary.encode([Frame(self._form.after_answer)])
                last = turn
        return ids + self._vocabulary.encode(self._form.opening(last, None))

    def extend(self, messages: Sequence[Message], *, finished: bool) -> list[int] | None:
        """Return what follows a drawn answer, whose end comes first if it was cut short."""
        if not self._form.extends(messages):
            return None
        end = self._form.after_answer if finished else self._form.stops[0] + self._form.after_answer
        opening = self._form.opening(messages[-1] if messages else None, None)
        return self._vocabulary.encode([Frame(end), *self._form.incoming(messages), *opening])

    def answer(self, message: Message) -> list[int]:
        """Return an assistant message as the policy would draw it, end of turn included."""
        skipped = self._form.opens_reasoning and not message.get("reasoning_content")
        thought = [Frame("\n</think>\n\n")] if skipped else []
        return self._vocabulary.encode([*thought, *self._form.spoken(message), Frame(self._form.stops[0])])

    def parts(self, token_ids: Sequence[int]) -> list[Part]:
        """Return drawn tokens in parts whose texts, joined, are all that was drawn."""
        return self._read(token_ids)[0]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return how token ids read."""
        return self._vocabulary.decode(token_ids)

    def parse(self, token_ids: Sequence[int]) -> dict[str, object]:
        """Return drawn tokens as an OpenAI assistant message; see `answers`."""
        parts, malformed = self._read(token_ids)
        return message_of(parts, malformed=malformed)

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], bool]:
        return read(self._vocabulary, token_ids, self._stops, self._form.reader, opened=self._form.opens_reasoning)


def read(
    vocabulary: Vocabulary, token_ids: Sequence[int], stops: Sequence[int], reader: Reader, *, opened: bool = False
) -> tuple[list[Part], bool]:
    """Return drawn tokens in parts, their end being one, and whether a tool call was malformed."""
    ended = bool(token_ids) and token_ids[-1] in stops
    text = vocabulary.decode(token_ids[:-1] if ended else token_ids)
    parts, malformed = parts_of(text, reader, opened=opened)
    end = [Part(Kind.MARKER, vocabulary.decode(token_ids[-1:]))] if ended else []
    return parts + end, malformed


def spaced_json(value: object) -> str:
    """Return JSON with a blank after each comma and colon, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
