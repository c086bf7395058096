"""A renderer that is driven by a model directory's own chat template.

Templates are written for texts; three things are done so that tokens come out exact. What a message says is marked
before the template runs, so that it can become no token of the format. Arguments of tool calls keep the characters that
the policy wrote. And what follows an answer is cut out of a conversation made up for it, which holds only for templates
that do not look back: the renderer extends what `proof` has proved, and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from tokenizers import Tokenizer

from etude.errors import PolicyError
from etude.gateway.refusals import CallRefusedError
from etude.gateway.renderers.answers import Kind, Part, Reader, message_of, parts_of, read_bare_json, read_tags, text_of
from etude.gateway.renderers.chat_template import ChatTemplate, call_message
from etude.gateway.renderers.deepseek import DeepSeekFormat
from etude.gateway.renderers.family import Message, Tail, read, tail_of
from etude.gateway.renderers.kimi import KimiFormat
from etude.gateway.renderers.masks import Masks
from etude.gateway.renderers.vocabulary import Frame, Vocabulary

_ANSWER = "etude-answer"
_QUESTION: dict[str, object] = {"role": "user", "content": "etude-question"}
_LATE_SYSTEM: dict[str, object] = {"role": "system", "content": "etude-late"}
_ARGUMENTS = '{"etude" :"answer"}'
_READERS: tuple[Reader, ...] = (
    read_tags,
    KimiFormat().reader,
    DeepSeekFormat().reader,
    DeepSeekFormat(newer=True).reader,
    read_bare_json,
)


class TemplateRenderer:
    """A `FamilyRenderer` of a model directory's own chat template.

    `extendable` are the tails after which the template leaves earlier tokens as they were. Raises `PolicyError` when
    no token ends an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        template: ChatTemplate,
        *,
        extendable: Callable[[Tail], bool] = lambda _: True,
    ) -> None:
        self._vocabulary = Vocabulary.of(tokenizer)
        self._template = template
        self._extendable = extendable
        self._masks = Masks(self._vocabulary.added_tokens)
        self._mapped = self._maps_arguments()
        self._one_system = False
        self._one_system = not self._takes_late_system()
        try:
            self._end = self._find_end()
            opening = self._text([_QUESTION])
        except CallRefusedError as error:
            msg = f"{error.message}: a question, an answer and a question"
            raise PolicyError(msg) from error
        self._opened = opening.rstrip("\n").endswith("<think>")
        self._reader = self._find_reader()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end of a turn."""
        return (self._vocabulary.id_of(self._end),)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the whole prompt, ending where the assistant's answer begins."""
        mask, (told, defined) = self._masks.apply((list(messages), list(tools)))
        return self._encode(self._text(told, defined), mask)

    def extend(self, messages: Sequence[Message], *, finished: bool) -> list[int] | None:
        """Return what follows a drawn answer; None after tails that are not proved to leave it as it was."""
        if not self._extendable(tail_of(messages)):
            return None
        mask, told = self._masks.apply(list(messages))
        rest = self._after_answer(told)
        if rest is None:
            return None
        return self._encode(rest if finished else self._end + rest, mask)

    def answer(self, message: Message) -> list[int]:
        """Return an assistant message as the policy would draw it, end of turn included."""
        mask, told = self._masks.apply(dict(message))
        return self._encode(self._drawn(told), mask)

    def parts(self, token_ids: Sequence[int]) -> list[Part]:
        """Return drawn tokens in parts whose texts, joined, are all that was drawn."""
        return read(self._vocabulary, token_ids, self.stop_token_ids, self._reader, opened=self._opened)[0]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return how token ids read."""
        return self._vocabulary.decode(token_ids)

    def parse(self, token_ids: Sequence[int]) -> dict[str, object]:
        """Return drawn tokens as an OpenAI assistant message; see `answers`."""
        parts, broken = read(self._vocabulary, token_ids, self.stop_token_ids, self._reader, opened=self._opened)
        return message_of(parts, malformed=broken)

    def _after_answer(self, messages: Sequence[Message]) -> str | None:
        """Return what the template writes after the end of a made-up answer, in a conversation that goes on so."""
        results = [str(message.get("tool_call_id") or "") for message in messages if message["role"] == "tool"]
        answer: dict[str, object] = {"role": "assistant", "content": "" if results else _ANSWER}
        if results:
            answer["tool_calls"] = [call_message("etude", f'{{"etude": "{_ANSWER}"}}', call_id) for call_id in results]
        whole = self._text([_QUESTION, answer, *messages])
        place = -1
        for _ in results or ("",):
            place = whole.find(_ANSWER, place + 1)
            if place < 0:
                return None
        _, ended, rest = whole[place:].partition(self._end)
        return rest if ended else None

    def _drawn(self, message: Message) -> str:
        """Return an answer's text with its end, as the template spells it last in a conversation."""
        prompt = self._text([_QUESTION])
        drawn, ended, _ = self._text([_QUESTION, message], opening=False).removeprefix(prompt).rpartition(self._end)
        return drawn + ended

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = (), *, opening: bool = True
    ) -> str:
        told = _with_one_system(messages) if self._one_system else messages
        return self._template.text(told, tools, opening=opening, mapped=self._mapped)

    def _encode(self, text: str, mask: str) -> list[int]:
        pieces = text.split(mask) if mask else [text]
        return self._vocabulary.encode([Frame(piece) for piece in pieces])

    def _maps_arguments(self) -> bool:
        """Return whether the template takes arguments as mappings and leaves their spelling alone."""
        called: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [call_message("etude", _ARGUMENTS, "functions.etude:0")],
        }
        for mapped in (True, False):
            try:
                text = self._template.text([_QUESTION, called], opening=False, mapped=mapped)
            except CallRefusedError:
                continue
            if _ARGUMENTS in text:
                return mapped
        return True

    def _takes_late_system(self) -> bool:
        """Return whether the template tells what the system says a second time, at the beginning and later."""
        answer: Message = {"role": "assistant", "content": _ANSWER}
        system: Message = {"role": "system", "content": "etude-system"}
        begins = ([system, _LATE_SYSTEM, _QUESTION], [system, _QUESTION, answer, _LATE_SYSTEM, _QUESTION])
        try:
            return all(str(_LATE_SYSTEM["content"]) in self._text(messages) for messages in begins)
        except CallRefusedError:
            return False

    def _find_end(self) -> str:
        answer = {"role": "assistant", "content": _ANSWER}
        _, _, rest = self._text([_QUESTION, answer, _QUESTION]).partition(_ANSWER)
        found = self._masks.pattern.search(rest)
        if found is None:
            msg = "the chat template ends answers with no token of the tokenizer: it cannot be continued token by token"
            raise PolicyError(msg)
        return found[1]

    def _find_reader(self) -> Reader:
        """Return the reader that gives calls back as the template writes them, else one that knows no calls."""
        called: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [call_message("etude", _ARGUMENTS, "functions.etude:0")],
        }
        try:
            drawn = self._drawn(called).removesuffix(self._end)
        except CallRefusedError:
            return _read_text
        for reader in _READERS:
            parts, broken = parts_of(drawn, reader, opened=self._opened)
            calls = [(part.name, part.arguments) for part in parts if part.kind is Kind.CALL]
            if calls == [("etude", _ARGUMENTS)] and not broken:
                return reader
        return _read_text


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that knows one system message, the first.

    Those that begin a conversation together are one; what the system says later is told as a user's, since harnesses
    would have no other way to say it.
    """
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    joined: list[Message] = (
        [dict(first[0]) | {"content": "\n\n".join(map(text_of, first))}] if len(first) > 1 else first
    )
    rest = messages[len(first) :]
    return [
        *joined,
        *(dict(message) | {"role": "user"} if message["role"] == "system" else message for message in rest),
    ]


def _read_text(text: str) -> list[Part]:
    return [Part(Kind.TEXT, text)] if text else []
