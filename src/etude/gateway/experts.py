"""Which rows of routed experts a call owns."""

from msgspec.structs import replace

from etude.types import Completion, Experts


def keep_experts(completion: Completion, *, parent_length: int) -> Completion:
    """Drop the experts of positions that the parent's branch holds already.

    The parent's last drawn token was no input of the parent's call, so its row is the first that this call owns.
    """
    experts = completion.experts
    first = max(0, parent_length - 1)
    if experts is None or experts.start == first:
        return completion
    row_bytes = 2 * experts.num_layers * experts.top_k
    kept = experts.expert_ids[(first - experts.start) * row_bytes :]
    sliced = Experts(start=first, num_layers=experts.num_layers, top_k=experts.top_k, expert_ids=kept)
    return replace(completion, experts=sliced)
