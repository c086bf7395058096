"""Whether a completion holds what it must hold, before it enters a session's tree."""

import math
import operator
import struct
from bisect import bisect_left
from itertools import accumulate, islice

from etude.errors import SamplerError
from etude.types import Completion, FinishReason, SampleRequest, Support

TOLERANCE = 1e-3
"""How far a support's mass may be from 1, and a token's log-probability from its support's."""


class CompletionError(SamplerError):
    """A sampler returned something that cannot be trained on; `reason` is short and stable, to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


def check_completion(request: SampleRequest, completion: Completion, *, owned_from: int) -> None:
    """Raise `CompletionError` for the first thing that is wrong.

    `owned_from` is the first position whose experts the call has to bring along.
    """
    drawn = len(completion.token_ids)
    _expect(drawn > 0, "empty", "no token was drawn")
    _expect(drawn <= request.params.max_tokens, "too_long", f"{drawn} tokens, {request.params.max_tokens} allowed")
    _expect(min(completion.token_ids) >= 0, "token_ids", "a token id is negative")
    stopped = completion.token_ids[-1] in request.params.stop_token_ids
    _expect(stopped or completion.finish_reason is not FinishReason.STOP, "finish", "stopped without a stop token")
    _check_logprobs(completion)
    _check_versions(request, completion)
    if completion.support is not None:
        _check_support(completion, completion.support)
    if completion.experts is not None:
        _check_experts(request, completion, owned_from=owned_from)


def _expect(holds: bool, reason: str, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise CompletionError(reason, message)


def _check_logprobs(completion: Completion) -> None:
    drawn = len(completion.token_ids)
    _expect(len(completion.sampler_logprobs) == 4 * drawn, "logprobs_length", f"not one f32 for each of {drawn} tokens")
    logprobs = _floats(completion.sampler_logprobs)
    # Written so that NaN fails as well.
    _expect(all(-math.inf < logprob <= TOLERANCE for logprob in logprobs), "logprobs_range", "not the log of a chance")


def _check_versions(request: SampleRequest, completion: Completion) -> None:
    runs = completion.versions
    _expect(all(run.count > 0 for run in runs), "versions_count", "a run of versions is empty")
    drawn, covered = len(completion.token_ids), sum(run.count for run in runs)
    _expect(covered == drawn, "versions_count", f"versions for {covered} tokens, {drawn} were drawn")
    versions = [run.version for run in runs]
    _expect(versions[0] >= 0 and versions == sorted(versions), "versions_order", f"versions {versions[:8]} fall")
    least, exact = request.min_version, request.exact_version
    _expect(least is None or versions[0] >= least, "version_unasked", f"version {versions[0]}, at least {least} asked")
    _expect(exact is None or set(versions) == {exact}, "version_unasked", f"versions {versions[:8]}, {exact} was asked")


def _check_support(completion: Completion, support: Support) -> None:
    drawn = len(completion.token_ids)
    _expect(len(support.counts) == 2 * drawn, "support_length", f"not one row for each of {drawn} tokens")
    counts = struct.unpack(f"<{drawn}H", support.counts)
    total = sum(counts)
    sizes = (len(support.token_ids), len(support.logprobs))
    _expect(
        sizes == (4 * total, 4 * total), "support_length", f"{sizes} bytes of ids and log-probabilities, {4 * total}"
    )
    ids, logprobs = struct.unpack(f"<{total}I", support.token_ids), _floats(support.logprobs)
    ends = tuple(accumulate(counts))
    ascends = bytearray(map(operator.lt, ids, islice(ids, 1, None)))
    for end in ends:
        # The last id of a row says nothing about the first one of the next.
        if 0 < end < total:
            ascends[end - 1] = True
    _expect(all(ascends), "support_order", "ids are not distinct and ascending")
    _expect(not total or max(logprobs) <= TOLERANCE, "support_mass", "a log-probability is above 0")
    chances, drawn_logprobs = tuple(map(math.exp, logprobs)), _floats(completion.sampler_logprobs)
    start = 0
    # Nothing is put into words before it is wrong: a long answer has many rows.
    for token_id, end, logprob in zip(completion.token_ids, ends, drawn_logprobs, strict=True):
        if end > start:
            mass = math.fsum(chances[start:end])
            if not abs(mass - 1.0) <= TOLERANCE:
                raise CompletionError("support_mass", f"probabilities sum to {mass}")
            at = bisect_left(ids, token_id, start, end)
            if at == end or ids[at] != token_id:
                raise CompletionError("support_token", f"token {token_id} is not in its support")
            if not abs(logprobs[at] - logprob) <= TOLERANCE:
                raise CompletionError("support_token", f"token {token_id}: its two log-probabilities differ")
        start = end


def _check_experts(request: SampleRequest, completion: Completion, *, owned_from: int) -> None:
    experts = completion.experts
    assert experts is not None
    _expect(experts.num_layers > 0 and experts.top_k > 0, "experts_shape", "no layer or no choice")
    _expect(0 <= experts.start <= owned_from, "experts_start", f"rows from {experts.start}, needed from {owned_from}")
    positions = len(request.prompt_ids) + len(completion.token_ids) - 1 - experts.start
    size = 2 * experts.num_layers * experts.top_k * positions
    _expect(len(experts.expert_ids) == size, "experts_length", f"{len(experts.expert_ids)} bytes, {size} expected")


def _floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)
