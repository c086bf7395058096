"""ChatML: every turn is `<|im_start|>role`, a line break, the text and `<|im_end|>`.

Three spellings. `chatml` is the one that Qwen models were trained on: tool definitions as JSON in the system turn,
results as `<tool_response>` blocks of a user turn. `smollm2` is the same with the system turn that SmolLM2 gives to
conversations without one. `chatml-compact` spends few tokens, for policies made from nothing: tools by name only,
results as turns of their own, tool calls without line breaks.

Text from outside is encoded by a tokenizer that knows no special tokens, so that no message can open a turn; only the
frame around it is encoded by the full one. The two never meet in one call, therefore a conversation gives the same ids
whether it is rendered at once or turn by turn.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, cast

import msgspec
from tokenizers import Tokenizer

from etude.errors import PolicyError
from etude.gateway.renderers.answers import Part, message_of, read_tags, text_of
from etude.gateway.renderers.family import read, spaced_json
from etude.gateway.renderers.vocabulary import Frame, Vocabulary

Style = Literal["chatml", "chatml-compact", "smollm2"]
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

# Qwen's models were trained on exactly these words: they are part of the format.
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatMLRenderer:
    """A `Renderer` for tokenizers that have `<|im_start|>` and `<|im_end|>`.

    Raises `PolicyError` when the tokenizer lacks one of them, or does not give text back as it was.
    """

    def __init__(self, tokenizer: Tokenizer | Vocabulary, style: Style = "chatml") -> None:
        self._vocabulary = Vocabulary.of(tokenizer)
        if not {TURN_START, TURN_END} <= self._vocabulary.added_tokens:
            msg = f"the tokenizer has no {TURN_START} and {TURN_END}: renderer {style} does not fit it"
            raise PolicyError(msg)
        self._compact = style == "chatml-compact"
        self._system = _SMOLLM2_SYSTEM if style == "smollm2" else ""
        self._frame = lru_cache(maxsize=256)(self._encode_frame)
        self._end = self._vocabulary.id_of(TURN_END)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end of a turn."""
        return (self._end,)

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the whole prompt, ending where the assistant's answer begins."""
        ids: list[int] = []
        rest = list(messages)
        system = rest.pop(0) if rest and rest[0]["role"] == "system" else None
        if system is not None or tools or self._system:
            ids += self._frame(f"{TURN_START}system\n")
            ids += self._system_text(self._system if system is None else text_of(system), tools)
            ids += self._frame(f"{TURN_END}\n")
        return [*ids, *self._turns(rest), *self._opening()]

    def extend(self, messages: Sequence[Mapping[str, object]], *, finished: bool) -> list[int]:
        """Return what follows a drawn answer; an answer cut short gets its end of turn first."""
        ids = list(self._frame("\n" if finished else f"{TURN_END}\n"))
        return [*ids, *self._turns(messages), *self._opening()]

    def answer(self, message: Mapping[str, object]) -> list[int]:
        """Return an assistant message as the policy would draw it, end of turn included: for demonstrations."""
        ids: list[int] = []
        reasoning = message.get("reasoning_content")
        if reasoning:
            ids += [*self._frame("<think>\n"), *self._content(str(reasoning)), *self._frame("\n</think>\n\n")]
        text = text_of(message)
        ids += self._content(text)
        calls = cast("Sequence[Mapping[str, Mapping[str, str]]]", message.get("tool_calls") or ())
        for index, call in enumerate(calls):
            break_before = "\n" if (text or index) and not self._compact else ""
            ids += self._call(call["function"], break_before)
        return [*ids, self._end]

    def parts(self, token_ids: Sequence[int]) -> list[Part]:
        """Return drawn tokens in parts whose texts, joined, are all that was drawn."""
        return self._read(token_ids)[0]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return how token ids read."""
        return self._vocabulary.decode(token_ids)

    def parse(self, token_ids: Sequence[int]) -> dict[str, object]:
        """Return drawn tokens as an OpenAI assistant message; see `answers`.

        Bytes that are no UTF-8, and ids that the tokenizer does not have, become U+FFFD.
        """
        parts, malformed = self._read(token_ids)
        return message_of(parts, malformed=malformed)

    def _read(self, token_ids: Sequence[int]) -> tuple[list[Part], bool]:
        return read(self._vocabulary, token_ids, (self._end,), read_tags)

    def _opening(self) -> Sequence[int]:
        return self._frame(f"{TURN_START}assistant\n")

    def _turns(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        ids: list[int] = []
        for role, run in groupby(messages, lambda message: str(message["role"])):
            texts = list(run)
            if role == "tool":
                ids += self._tool_results(texts)
                continue
            for message in texts:
                ids += self._frame(f"{TURN_START}{role}\n")
                # An answer's own ids end with the end of turn.
                ids += self.answer(message)[:-1] if role == "assistant" else self._content(text_of(message))
                ids += self._frame(f"{TURN_END}\n")
        return ids

    def _tool_results(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        ids: list[int] = []
        if self._compact:
            for message in messages:
                ids += self._frame(f"{TURN_START}tool\n")
                ids += [*self._content(text_of(message)), *self._frame(f"{TURN_END}\n")]
            return ids
        ids += self._frame(f"{TURN_START}user")
        for message in messages:
            ids += self._frame("\n<tool_response>\n")
            ids += [*self._content(text_of(message)), *self._frame("\n</tool_response>")]
        return [*ids, *self._frame(f"{TURN_END}\n")]

    def _system_text(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[int]:
        ids = self._content(text)
        if not tools:
            return ids
        if self._compact:
            names = [str(cast("Mapping[str, object]", tool["function"])["name"]) for tool in tools]
            return ids + self._content(("\n" if text else "") + "tools: " + ", ".join(names))
        ids += self._frame(("\n\n" if text else "") + TOOLS_BEFORE)
        for tool in tools:
            ids += [*self._frame("\n"), *self._content(spaced_json(tool))]
        return [*ids, *self._frame(TOOLS_AFTER)]

    def _call(self, function: Mapping[str, str], break_before: str) -> list[int]:
        line = "" if self._compact else "\n"
        name = msgspec.json.encode(function["name"]).decode()
        body = f'{{"name": {name}, "arguments": {function["arguments"]}}}'
        opening = self._frame(f"{break_before}<tool_call>{line}")
        return [*opening, *self._content(body), *self._frame(f"{line}</tool_call>")]

    def _encode_frame(self, text: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode([Frame(text)]))

    def _content(self, text: str) -> list[int]:
        return self._vocabulary.encode([text])
