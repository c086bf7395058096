"""For tests of whatever meets a model: samplers that answer from a script, a tokenizer that needs no file."""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.errors import SamplerError
from etude.types import Completion, Experts, FinishReason, SampleRequest, SamplerStatus, Support, VersionRun


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with one merge (`a`, `b` to `ab`) and the turn tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(specials)  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """Return a tool call as a policy of the ChatML family writes it; several of them in a row are parallel calls."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ScriptedSampler:
    """A `Sampler` that draws what it is told, with made-up but consistent facts about each token.

    Every session walks through `answers` from the first: a text is encoded with `tokenizer` and ended with
    `<|im_end|>`, token ids are drawn as they are, an error is raised (once: the next request gets the next answer).
    Answers longer than `max_tokens` are cut and finish with `length`. Experts depend on the position only, so that the
    rows of a branch can be checked wherever they were cut. `requests` keeps what was asked.
    """

    def __init__(
        self,
        answers: Sequence[str | Sequence[int] | Exception],
        *,
        tokenizer: Tokenizer,
        version: int = 0,
        pool: str = "scripted",
        moe_layers: int = 2,
        experts_per_token: int = 2,
    ) -> None:
        self.requests: list[SampleRequest] = []
        self._answers = answers
        self._tokenizer = tokenizer
        self._version = version
        self._pool = pool
        self._moe_layers = moe_layers
        self._experts_per_token = experts_per_token
        self._next: dict[str, int] = {}
        self._drawn: dict[str, Completion] = {}

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the session's next answer; the same `request_id` gets the same completion again."""
        self.requests.append(request)
        if request.request_id not in self._drawn:
            self._drawn[request.request_id] = self._complete(request, self._next_answer(request.session_id))
        return self._drawn[request.request_id]

    async def status(self) -> Sequence[SamplerStatus]:
        """Return one sampler that serves the version."""
        return [
            SamplerStatus(
                sampler_id="scripted",
                pool=self._pool,
                view="fp32",
                lineage="scripted",
                version=self._version,
                digest="",
            )
        ]

    def _next_answer(self, session_id: str) -> list[int]:
        index = self._next.get(session_id, 0)
        self._next[session_id] = index + 1
        if index >= len(self._answers):
            msg = f"the script has {len(self._answers)} answers and session {session_id} asks for one more"
            raise SamplerError(msg)
        answer = self._answers[index]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return self._tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False).ids
        return list(answer)

    def _complete(self, request: SampleRequest, answer: list[int]) -> Completion:
        drawn = answer[: request.params.max_tokens]
        stopped = drawn[-1] in request.params.stop_token_ids
        return Completion(
            token_ids=tuple(drawn),
            sampler_logprobs=struct.pack(f"<{len(drawn)}f", *[math.log(0.75)] * len(drawn)),
            versions=(VersionRun(self._version, len(drawn)),),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            pool=self._pool,
            lineage="scripted",
            support=_two_token_support(drawn),
            experts=self._experts(len(request.prompt_ids) + len(drawn) - 1),
        )

    def _experts(self, num_positions: int) -> Experts | None:
        if not self._moe_layers:
            return None
        row = self._moe_layers * self._experts_per_token
        ids = [position % 1000 + choice for position in range(num_positions) for choice in range(row)]
        return Experts(
            start=0,
            num_layers=self._moe_layers,
            top_k=self._experts_per_token,
            expert_ids=struct.pack(f"<{len(ids)}H", *ids),
        )


class Turn(msgspec.Struct, frozen=True):
    """One turn of a ChatML prompt, as a policy reads it."""

    role: str
    text: str
    """Definitions of tools are part of the system turn, their results of a user turn (`tool` in the compact style)."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is asked to continue."""

    session_id: str
    turns: tuple[Turn, ...]

    @property
    def num_answers(self) -> int:
        """Answers of the assistant so far: the same for a repeated call."""
        return sum(turn.role == "assistant" for turn in self.turns)


class ScriptedPolicy:
    """A `Sampler` that reads its ChatML prompts from their tokens, as a policy would, and draws what `answer` says.

    The text that `answer` returns is ended with `<|im_end|>`; a `SamplerError` that it raises fails the request, and
    the same request is put to it again when it is repeated. `prompts` keeps what was read.
    """

    def __init__(self, answer: Callable[[Prompt], str], *, tokenizer: Tokenizer) -> None:
        self.prompts: list[Prompt] = []
        self._answer = answer
        self._tokenizer = tokenizer
        self._drawn: dict[str, Completion] = {}

    async def sample(self, request: SampleRequest) -> Completion:
        """Return what the function answers; the same `request_id` gets the same completion again."""
        if request.request_id not in self._drawn:
            prompt = Prompt(session_id=request.session_id, turns=self._turns(request.prompt_ids))
            self.prompts.append(prompt)
            drawing = ScriptedSampler([self._answer(prompt)], tokenizer=self._tokenizer, moe_layers=0)
            self._drawn[request.request_id] = await drawing.sample(request)
        return self._drawn[request.request_id]

    async def status(self) -> Sequence[SamplerStatus]:
        """Return one sampler that serves version 0."""
        return await ScriptedSampler([], tokenizer=self._tokenizer).status()

    def _turns(self, prompt_ids: Sequence[int]) -> tuple[Turn, ...]:
        """Split at the tokens of the frame, which no message can hold, and leave out the turn that was only opened."""
        start, end = map(self._tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
        turns: list[Turn] = []
        begun = 0
        for place, token_id in enumerate(prompt_ids):
            if token_id == start:
                begun = place + 1
            elif token_id == end:
                text = self._tokenizer.decode(list(prompt_ids[begun:place]), skip_special_tokens=False)
                role, _, said = text.partition("\n")
                turns.append(Turn(role, said))
        return tuple(turns)


def _two_token_support(drawn: Sequence[int]) -> Support:
    """Return a support in which each drawn token had probability 3/4 and its successor 1/4."""
    return Support(
        counts=struct.pack(f"<{len(drawn)}H", *[2] * len(drawn)),
        token_ids=struct.pack(f"<{2 * len(drawn)}I", *[token_id + k for token_id in drawn for k in (0, 1)]),
        logprobs=struct.pack(f"<{2 * len(drawn)}f", *[math.log(0.75), math.log(0.25)] * len(drawn)),
    )
