"""Short digests by which two services say that they speak of the same tokens."""

import struct
from collections.abc import Sequence

import xxhash

from etude.types import Completion


def of_ids(token_ids: Sequence[int]) -> str:
    """Return 16 hexadecimal digits over token ids."""
    return xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def of_drawn(completion: Completion) -> str:
    """Return 16 hexadecimal digits over everything that was recorded of the drawn tokens.

    Ids, log-probabilities, policy versions, finish reason, support, and the experts of the positions from the first
    drawn token on. Experts of the prompt are left out: which call owns them is the session tree's affair.
    """
    drawn = len(completion.token_ids)
    state = xxhash.xxh3_64(struct.pack(f"<{drawn}I", *completion.token_ids))
    state.update(completion.sampler_logprobs)
    state.update(repr([(run.version, run.count) for run in completion.versions]).encode())
    state.update(completion.finish_reason.value.encode())
    if completion.support is not None:
        for part in (completion.support.counts, completion.support.token_ids, completion.support.logprobs):
            state.update(part)
    experts = completion.experts
    if experts is not None and drawn > 1:
        state.update(experts.expert_ids[-2 * experts.num_layers * experts.top_k * (drawn - 1) :])
    return state.hexdigest()
