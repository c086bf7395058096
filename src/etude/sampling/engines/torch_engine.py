"""The embedded engine: continuous batching over a slot cache, on a CPU or one GPU."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from etude.errors import ContextOverflowError, PolicyError, SampleRequestError, SamplerError
from etude.policy.decoder import Decoder
from etude.policy.digest import held_digest
from etude.policy.shape import PolicyShape
from etude.policy.views import View, ViewRecord, in_view, out_of_view, view_dtype
from etude.sampling.engine import Answer, Commit, Forced
from etude.sampling.engines.torch_cache import Parked, PrefixCache, SlotCache
from etude.sampling.engines.torch_draw import Draw, Rules, draw, uniforms
from etude.sampling.engines.torch_forward import CachedForward, Chunk
from etude.sampling.engines.torch_rows import Row, RowTable
from etude.types import FinishReason, SampleRequest


class TorchEngine:
    """Draws tokens from a decoder of its own, held in one view.

    Requests are admitted at any time; prompts are computed in packed chunks of at most `prefill_tokens` per step, so
    that rows already decoding wait for one chunk at most; a row leaves with the step that ends it.
    """

    def __init__(
        self,
        shape: PolicyShape,
        tensors: Mapping[str, Tensor],
        *,
        view: View = "fp32",
        max_batch: int = 32,
        max_context: int | None = None,
        prefill_tokens: int = 512,
        prefix_bytes: int = 256 << 20,
        device: str = "cpu",
    ) -> None:
        """Build the decoder and load it.

        Args:
            shape: Of the policy.
            tensors: Its weights by Hugging Face name, in any precision; they are copied.
            view: Precision to hold and multiply them in.
            max_batch: Rows decoded together.
            max_context: Tokens of prompt and answer; the shape's own when None.
            prefill_tokens: Prompt tokens computed per step.
            prefix_bytes: Bound on keys and values kept for sessions' next requests.
            device: Torch device.
        """
        self._device = torch.device(device)
        self._shape = shape
        self._view: View = view
        self._decoder = self._empty_decoder()
        self._context = min(shape.max_context, max_context or shape.max_context)
        self.slots = max_batch
        self._prefill_tokens = prefill_tokens
        self._cache = SlotCache(
            shape, slots=max_batch, context=self._context, dtype=view_dtype(view), device=self._device
        )
        self._prefixes = PrefixCache(prefix_bytes)
        self._table = RowTable(max_batch)
        self._rows: list[Row] = []
        self._filling: deque[Row] = deque()
        """Admitted, prompt not computed. Only the first can be part done; its slot is then the one after the rows."""
        self._salt = 0
        self._forward = CachedForward(self._decoder, self._cache)
        self._held_digest = ""
        self.stage(tensors)()

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self._context

    @property
    def free_slots(self) -> int:
        """Requests that `admit` would take now."""
        return self.slots - len(self._rows) - len(self._filling)

    def admit(self, request: SampleRequest, forced: Forced | None = None) -> None:
        """Take a request between two steps; with `forced`, its draws are given.

        Raises:
            ContextOverflowError: The prompt leaves no room for a token.
            SampleRequestError: Prompt or forced tokens have none, or one outside the vocabulary.
            SamplerError: All slots are taken.
        """
        prompt, params, vocab = request.prompt_ids, request.params, self._shape.vocab_size
        if len(prompt) >= self._context:
            raise ContextOverflowError(
                f"{request.request_id}: a prompt of {len(prompt)} tokens leaves no room in a context of {self._context}"
            )
        for ids in (prompt,) if forced is None else (prompt, forced.token_ids):
            if not ids or min(ids) < 0 or max(ids) >= vocab:
                raise SampleRequestError(f"{request.request_id}: prompt_ids must be 1 or more ids below {vocab}")
        if self.free_slots < 1:
            raise SamplerError(f"{request.request_id}: all {self.slots} slots are taken")
        self._filling.append(
            Row(
                request=request,
                limit=min(len(forced.token_ids) if forced else params.max_tokens, self._context - len(prompt)),
                stops=frozenset(params.stop_token_ids),
                truncated=params.temperature == 0 or params.top_p < 1.0 or 0 < params.top_k < vocab,
                forced=forced,
            )
        )

    def step(self) -> Sequence[Answer]:
        """Compute a chunk of waiting prompts, then draw one token for every row; return what ended."""
        with torch.inference_mode():
            self._prefill()
            return self._decode() if self._rows else []

    def cancel(self, request_id: str) -> Answer | None:
        """Give a request up: return what it has drawn, or None when it is not known."""
        for index, row in enumerate(self._rows):
            if row.request.request_id == request_id:
                with torch.inference_mode():
                    return self._leave(index, FinishReason.CANCELLED)
        for row in self._filling:
            if row.request.request_id == request_id:
                self._filling.remove(row)
                return Answer(request_id=request_id, finish_reason=FinishReason.CANCELLED)
        return None

    def stage(self, tensors: Mapping[str, Tensor]) -> Commit:
        """Prepare weights, published or in the engine's view; the result lets the next step multiply with them.

        They get memory of their own, so nothing is left to do between two steps but to point to it.

        Raises:
            PolicyError: A tensor is missing, unknown or of another shape.
        """
        held = in_view(tensors, self._view)
        weights = out_of_view(held, self._view)
        decoder = self._empty_decoder()
        targets = decoder.hf_tensors()
        wrong = [name for name, target in targets.items() if getattr(weights.get(name), "shape", None) != target.shape]
        wrong += [name for name in weights if name not in targets]
        if wrong:
            raise PolicyError(
                f"weights do not fit the policy: {len(wrong)} tensors are missing, unknown or of another "
                f"shape, such as {wrong[0]}"
            )
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(weights[name])
            digest = held_digest(ViewRecord.of(held, self._view).held(targets))
        retired: list[Decoder] = []

        def commit() -> Mapping[str, int]:
            retired.append(self._decoder)  # freed with this function, and not between two steps
            self._decoder, self._held_digest = decoder, digest
            self._forward.use(decoder)
            self._salt += 1
            self._prefixes.clear()
            return {row.request.request_id: len(row.token_ids) for row in itertools.chain(self._rows, self._filling)}

        return commit

    def held_digest(self) -> str:
        """Return the digest of the weights in the memory that the next step multiplies with, as their view has them.

        It was taken from that memory once it was complete, and nothing writes to it since.
        """
        return self._held_digest

    def _empty_decoder(self) -> Decoder:
        return Decoder(self._shape, view_dtype(self._view)).to(self._device).requires_grad_(requires_grad=False)

    def _prefill(self) -> None:
        budget, slot, chunks = self._prefill_tokens, len(self._rows), list[Chunk]()
        done = 0
        for row in self._filling:
            if budget < 1:
                break
            if row.salt < 0:
                self._begin(row, slot)
            tokens = row.request.prompt_ids[row.filled : row.filled + min(budget, row.to_fill)]
            if tokens:
                chunks.append(Chunk(slot, row.filled, tokens))
                row.filled += len(tokens)
                budget -= len(tokens)
            if row.to_fill:
                break
            done += 1
            slot += 1
        if chunks:
            self._forward.prefill(chunks)
        for _ in range(done):
            row = self._filling.popleft()
            self._table.put(len(self._rows), row.request, self._shape.vocab_size)
            self._rows.append(row)

    def _begin(self, row: Row, slot: int) -> None:
        """Note the weights that the row starts under, and bring in what the session left under the same ones."""
        row.salt = self._salt
        if row.forced is not None:
            return  # its numbers are for comparison: nothing of another request may be in them
        parked = self._prefixes.find(row.request.session_id, self._salt, row.request.prompt_ids)
        if parked is not None:
            row.cached = row.filled = len(parked.token_ids)
            self._cache.kv[:, :, slot, :, : row.cached] = parked.kv

    def _decode(self) -> list[Answer]:
        count, table = len(self._rows), self._table

        def column(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[:count]).to(self._device)  # pyright: ignore[reportUnknownMemberType]

        position = table.position[:count]
        logits = self._forward.decode(column(table.token), column(table.position), int(position.max()))
        numbers = uniforms(table.seed[:count], (position - table.origin[:count]).astype(np.uint64))
        rules = Rules(column(table.temperature), column(table.top_k), column(table.top_p))
        drawn = draw(logits, rules, column(numbers))
        if any(row.forced is not None for row in self._rows):
            self._force(logits, rules, drawn)
        table.token[:count] = drawn.tokens.cpu().numpy()
        position += 1
        # From the back, so that the row moved into a hole is one that stays.
        return [self._leave(index, reason) for index, reason in reversed(self._record(drawn))]

    def _force(self, logits: Tensor, rules: Rules, drawn: Draw) -> None:
        """Put the given tokens of forced rows in the place of what was drawn, and keep the logits asked for."""
        ends = drawn.counts.cpu().numpy().cumsum()
        for index, row in enumerate(self._rows):
            if row.forced is None:
                continue
            place = len(row.token_ids)
            token = row.forced.token_ids[place]
            drawn.tokens[index] = token
            if row.truncated:
                support = slice(int(ends[index]) - int(drawn.counts[index]), int(ends[index]))
                here = drawn.support_ids[support] == token
                drawn.logprobs[index] = drawn.support_logprobs[support].masked_fill(~here, -torch.inf).amax()
            else:
                drawn.logprobs[index] = (logits[index] / rules.temperature[index]).log_softmax(0)[token]
            if place in row.forced.raw_draws:
                row.raw.append(logits[index].log_softmax(0).cpu().numpy())

    def _record(self, drawn: Draw) -> list[tuple[int, FinishReason | None]]:
        """Give each row its token and support; return the rows that end, with None for logits that are not numbers."""
        tokens, logprobs, counts, ids, support, sound = (part.cpu().numpy() for part in drawn)
        edges = counts.cumsum().tolist()
        ended: list[tuple[int, FinishReason | None]] = []
        start = 0
        columns = zip(self._rows, tokens.tolist(), logprobs.tolist(), edges, sound.tolist(), strict=True)
        for index, (row, token, logprob, end, valid) in enumerate(columns):
            reason = row.record(token, logprob, ids[start:end], support[start:end]) if valid else None
            if reason is not None or not valid:
                ended.append((index, reason))
            start = end
        return ended

    def _leave(self, index: int, reason: FinishReason | None) -> Answer:
        """Take a row out, keep its keys and values for the session, and close the hole."""
        row = self._rows[index]
        inputs = (*row.request.prompt_ids, *row.token_ids)[: int(self._table.position[index])]
        if reason is None:
            where = f"position {len(inputs)} of request {row.request.request_id}"
            answer = Answer(request_id=row.request.request_id, failure=f"the logits at {where} are not finite numbers")
            self._cache.wipe(index)
        else:
            routes = self._cache.routes
            taken = None if routes is None else routes[index, row.cached : len(inputs)].cpu().numpy()
            answer = row.answer(reason, taken)
            if row.salt == self._salt and row.forced is None:
                kv = self._cache.kv[:, :, index, :, : len(inputs)].clone()
                self._prefixes.store(row.request.session_id, Parked(self._salt, inputs, kv))
        last = len(self._rows) - 1
        if index != last:
            self._rows[index] = self._rows[last]
            self._table.move(last, index)
            self._cache.move(last, index, int(self._table.position[last]))
        self._rows.pop()
        if self._filling and self._filling[0].salt >= 0:
            self._cache.move(last + 1, last, self._filling[0].filled)
        return answer
