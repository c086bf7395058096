"""For tests of whatever meets a model: a sampler that answers from a script, a tokenizer that needs no file."""

import math
import struct
from collections.abc import Sequence

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


def _two_token_support(drawn: Sequence[int]) -> Support:
    """Return a support in which each drawn token had probability 3/4 and its successor 1/4."""
    return Support(
        counts=struct.pack(f"<{len(drawn)}H", *[2] * len(drawn)),
        token_ids=struct.pack(f"<{2 * len(drawn)}I", *[token_id + k for token_id in drawn for k in (0, 1)]),
        logprobs=struct.pack(f"<{2 * len(drawn)}f", *[math.log(0.75), math.log(0.25)] * len(drawn)),
    )
