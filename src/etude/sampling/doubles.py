"""An engine without a model, for tests and dry runs of everything around it."""

import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from etude.errors import ContextOverflowError, SamplerError
from etude.policy.digest import view_digest
from etude.policy.views import View
from etude.sampling.engine import Answer, Commit, Forced
from etude.types import Experts, FinishReason, SampleRequest, Support

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = 8
_LAYERS = 2
_TOP_K = 2


class FakeEngine:
    """Answers by script, one token per request and step; the same request always gets the same answer.

    Supports and experts are made up, but hold together: the drawn token is in its support, the support's mass is one,
    and experts cover every input position.
    """

    def __init__(
        self,
        *,
        vocab: int = 512,
        max_batch: int = 32,
        max_context: int = 1024,
        step_s: float = 0.0,
        answers: Callable[[SampleRequest], Sequence[int]] | None = None,
        breaks_after: int | None = None,
        hangs_after: int | None = None,
        drops: Callable[[SampleRequest], bool] = lambda _: False,
        loses_updates: bool = False,
        view: View = "fp32",
    ) -> None:
        """Set the script.

        Args:
            vocab: Made-up tokens lie below it.
            max_batch: Requests held at once.
            max_context: Tokens of prompt and answer together.
            step_s: Seconds that a step takes.
            answers: Tokens to answer a request with; cut at `max_tokens`. Made up from seed and prompt when None.
            breaks_after: Steps after which the engine fails for good; never when None.
            hangs_after: Steps after which one does not return before `go_on` is set; never when None.
            drops: Requests that are drawn and whose answer is lost.
            loses_updates: Weights are accepted and not put in place.
            view: Precision that it pretends to hold its weights in.
        """
        self._vocab = vocab
        self._max_batch = max_batch
        self._context = max_context
        self._step_s = step_s
        self._answers = answers or self._made_up
        self._steps_left = breaks_after
        self._steps_until_hang = hangs_after
        self._drops = drops
        self._loses_updates = loses_updates
        self._pause = threading.Event()
        self._running: dict[str, tuple[SampleRequest, Sequence[int], int]] = {}
        self._view: View = view
        self._tensors: Mapping[str, Tensor] = {}
        self.loads = 0
        """Weights put in place so far."""
        self.go_on = threading.Event()
        """Ends the hang that `hangs_after` scripted."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self._context

    @property
    def free_slots(self) -> int:
        """Requests that `admit` would take now."""
        return self._max_batch - len(self._running)

    def admit(self, request: SampleRequest, forced: Forced | None = None) -> None:
        """Take a request. Raise `ContextOverflowError` when its prompt leaves no room."""
        if len(request.prompt_ids) >= self._context:
            raise ContextOverflowError(f"{request.request_id}: the prompt leaves no room in {self._context} tokens")
        if forced is not None:
            self._running[request.request_id] = (request, forced.token_ids, 0)
            return
        limit = min(request.params.max_tokens, self._context - len(request.prompt_ids))
        self._running[request.request_id] = (request, tuple(self._answers(request))[:limit], 0)

    def step(self) -> Sequence[Answer]:
        """Draw one token for each request, after `step_s` seconds."""
        if self._steps_left is not None:
            if self._steps_left == 0:
                raise SamplerError("the scripted engine breaks here")
            self._steps_left -= 1
        if self._steps_until_hang is not None:
            if self._steps_until_hang == 0:
                self.go_on.wait()
            self._steps_until_hang -= 1
        if self._step_s:
            self._pause.wait(self._step_s)
        ended: list[Answer] = []
        for name, (request, tokens, drawn) in list(self._running.items()):
            self._running[name] = (request, tokens, drawn + 1)
            if drawn + 1 >= len(tokens):
                stopped = tokens[-1:] and tokens[-1] in request.params.stop_token_ids
                answer = self._leave(name, FinishReason.STOP if stopped else FinishReason.LENGTH)
                ended += [] if self._drops(request) else [answer]
        return ended

    def cancel(self, request_id: str) -> Answer | None:
        """Give a request up: return what it has drawn, or None when it is not known."""
        return self._leave(request_id, FinishReason.CANCELLED) if request_id in self._running else None

    def stage(self, tensors: "Mapping[str, Tensor]") -> Commit:
        """Accept anything."""

        def commit() -> Mapping[str, int]:
            self.loads += 1
            if not self._loses_updates:
                self._tensors = tensors
            return {name: drawn for name, (_, _, drawn) in self._running.items()}

        return commit

    def held_digest(self) -> str:
        """Return the digest of what was put in place last."""
        return view_digest(self._tensors, self._view)

    def _made_up(self, request: SampleRequest) -> Sequence[int]:
        seed = repr((request.params.seed, request.prompt_ids)).encode()
        stream = hashlib.shake_256(seed).digest(2 * request.params.max_tokens)
        return [word % self._vocab for (word,) in struct.iter_unpack("<H", stream)]

    def _leave(self, name: str, reason: FinishReason) -> Answer:
        request, tokens, drawn = self._running.pop(name)
        kept = tuple(tokens[:drawn])
        # Each token shared its support with one other, at even odds.
        pairs = [sorted((token, (token + 1) % self._vocab)) for token in kept]
        half = struct.pack("<f", -0.6931472)
        positions = max(0, len(request.prompt_ids) + drawn - 1)
        row = struct.pack(f"<{_LAYERS * _TOP_K}H", *[rank * (_EXPERTS // _TOP_K) for rank in range(_TOP_K)] * _LAYERS)
        return Answer(
            request_id=name,
            token_ids=kept,
            sampler_logprobs=half * drawn,
            finish_reason=reason,
            support=Support(
                counts=struct.pack("<H", 2) * drawn,
                token_ids=b"".join(struct.pack("<2I", *pair) for pair in pairs),
                logprobs=half * (2 * drawn),
            ),
            experts=Experts(start=0, num_layers=_LAYERS, top_k=_TOP_K, expert_ids=row * positions),
        )
