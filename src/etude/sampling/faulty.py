"""An engine that does its work wrongly on purpose: the double for everything that must notice."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from etude.sampling.engine import Answer, Commit, Engine, Forced
from etude.types import SampleRequest

if TYPE_CHECKING:
    from torch import Tensor


class EngineFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong. Nothing of it shows in how requests are answered."""

    lost_updates: int = 0
    """Swaps, from the first on, that change no weight although they are reported as done."""
    lost_tensors: tuple[str, ...] = ()
    """Tensors that keep their old values in every swap."""
    shift: int = 0
    """Positions by which recorded log-probabilities are late."""
    temperature_ignored: bool = False
    """Drawn and recorded at temperature 1 whatever was asked for."""


class FaultyEngine:
    """Wraps an engine that holds weights, and does some things wrongly."""

    def __init__(self, inner: Engine, faults: EngineFaults, *, held: "Mapping[str, Tensor] | None" = None) -> None:
        """Wrap an engine; `held` are the weights that it was made with, needed to lose tensors of the first swap."""
        self.faults = faults
        """May be replaced at any time: `EngineFaults()` heals the engine."""
        self._inner = inner
        self._swaps = 0
        self._held = dict(held or {})

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self._inner.max_context

    @property
    def free_slots(self) -> int:
        """Requests that `admit` would take now."""
        return self._inner.free_slots

    def admit(self, request: SampleRequest, forced: Forced | None = None) -> None:
        """Take a request, perhaps at another temperature."""
        if self.faults.temperature_ignored:
            params = msgspec.structs.replace(request.params, temperature=1.0)
            request = msgspec.structs.replace(request, params=params)
        self._inner.admit(request, forced)

    def step(self) -> Sequence[Answer]:
        """Draw, and perhaps report log-probabilities of other positions."""
        return [self._told(answer) for answer in self._inner.step()]

    def cancel(self, request_id: str) -> Answer | None:
        """Give a request up."""
        return self._inner.cancel(request_id)

    def stage(self, tensors: "Mapping[str, Tensor]") -> Commit:
        """Prepare weights, of which perhaps not all will arrive."""
        kept = {name: self._held[name] for name in self.faults.lost_tensors if name in self._held}
        lossy = {name: tensor.clone() for name, tensor in {**tensors, **kept}.items()}
        commit = self._inner.stage(lossy)

        def put() -> Mapping[str, int]:
            self._swaps += 1
            if self._swaps <= self.faults.lost_updates:
                return {}
            self._held = lossy
            return commit()

        return put

    def held_digest(self) -> str:
        """Return what is really held: faults are in the memory, not in its digest."""
        return self._inner.held_digest()

    def _told(self, answer: Answer) -> Answer:
        late = 4 * self.faults.shift
        if not late or len(answer.sampler_logprobs) <= late:
            return answer
        logprobs = answer.sampler_logprobs
        return msgspec.structs.replace(answer, sampler_logprobs=logprobs[-late:] + logprobs[:-late])
