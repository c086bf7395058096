# pyright: basic
"""Calls of a session's tree, made by hand."""

import struct

from etude.types import Completion, Edge, FinishReason, Node, VersionRun


def node(node_id, parent, prompt, drawn, edge=Edge.CONTINUATION, link=None, logp=-0.5):
    """Return a call that read and drew these tokens, the first of them by version 3 and the others by version 4."""
    versions = (VersionRun(3, 1), VersionRun(4, len(drawn) - 1))
    return Node(
        node_id=node_id,
        parent=parent,
        edge=edge,
        reason="why",
        link=link,
        prompt_ids=tuple(prompt),
        completion=Completion(
            token_ids=tuple(drawn),
            sampler_logprobs=struct.pack(f"<{len(drawn)}f", *[logp] * len(drawn)),
            versions=versions[: len(drawn)],
            finish_reason=FinishReason.STOP,
            pool="local",
        ),
        started_s=float(node_id),
    )
