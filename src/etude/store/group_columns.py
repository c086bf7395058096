"""The columns of a group's Parquet file, each with where its values come from."""
# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from etude.types import Completion, Group, Node, Trajectory, VersionRun

GROUP_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Group], object]]] = {
    "group_id": (pa.string(), lambda group: group.group_id),
    "task_id": (pa.string(), lambda group: group.task_id),
    "ticket": (pa.int64(), lambda group: group.ticket),
    "admitted_version": (pa.int64(), lambda group: group.admitted_version),
}

ROLLOUT_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Trajectory], object]]] = {
    "rollout_id": (pa.string(), lambda rollout: rollout.rollout_id),
    "session_id": (pa.string(), lambda rollout: rollout.session_id),
    "index": (pa.int64(), lambda rollout: rollout.index),
    "outcome": (pa.string(), lambda rollout: rollout.outcome.value),
    "reward": (pa.float64(), lambda rollout: rollout.reward),
    "failure_component": (pa.string(), lambda rollout: rollout.failure and rollout.failure.component),
    "failure_reason": (pa.string(), lambda rollout: rollout.failure and rollout.failure.reason),
    "failure_message": (pa.string(), lambda rollout: rollout.failure and rollout.failure.message),
    "harness_exit": (pa.int64(), lambda rollout: rollout.harness_exit),
    "rollout_seconds": (pa.float64(), lambda rollout: rollout.seconds),
    "timings": (pa.map_(pa.string(), pa.float64()), lambda rollout: list(rollout.timings.items())),
    "metrics": (pa.map_(pa.string(), pa.float64()), lambda rollout: list(rollout.metrics.items())),
}

NODE_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Node], object]]] = {
    "node_id": (pa.int64(), lambda node: node.node_id),
    "parent": (pa.int64(), lambda node: node.parent),
    "edge": (pa.string(), lambda node: node.edge.value),
    "reason": (pa.string(), lambda node: node.reason),
    "link": (pa.int64(), lambda node: node.link),
    "started_s": (pa.float64(), lambda node: node.started_s),
    "seconds": (pa.float64(), lambda node: node.seconds),
    "prompt_ids": (pa.list_(pa.int32()), lambda node: node.prompt_ids),
    "token_ids": (pa.list_(pa.int32()), lambda node: node.completion.token_ids),
    "versions": (pa.list_(pa.int32()), lambda node: version_per_token(node.completion)),
    "logprobs": (pa.list_(pa.float32()), lambda node: node.completion.sampler_logprobs),
    "finish_reason": (pa.string(), lambda node: node.completion.finish_reason.value),
    "pool": (pa.string(), lambda node: node.completion.pool),
    "lineage": (pa.string(), lambda node: node.completion.lineage),
    "cached_tokens": (pa.int64(), lambda node: node.completion.cached_tokens),
    "support_counts": (pa.list_(pa.uint16()), lambda node: node.completion.support and node.completion.support.counts),
    "support_ids": (pa.list_(pa.uint32()), lambda node: node.completion.support and node.completion.support.token_ids),
    "support_logprobs": (
        pa.list_(pa.float32()),
        lambda node: node.completion.support and node.completion.support.logprobs,
    ),
    "experts_start": (pa.int64(), lambda node: node.completion.experts and node.completion.experts.start),
    "experts_layers": (pa.int64(), lambda node: node.completion.experts and node.completion.experts.num_layers),
    "experts_top_k": (pa.int64(), lambda node: node.completion.experts and node.completion.experts.top_k),
    "expert_ids": (pa.binary(), lambda node: node.completion.experts and node.completion.experts.expert_ids),
}

BYTE_COLUMNS = frozenset({"logprobs", "support_counts", "support_ids", "support_logprobs"})
"""Lists in the file, little-endian bytes in the records."""

SCHEMA = pa.schema(
    [pa.field(name, kind) for name, (kind, _) in GROUP_COLUMNS.items()]
    + [pa.field("advantage", pa.float64())]
    + [pa.field(name, kind) for name, (kind, _) in ROLLOUT_COLUMNS.items()]
    + [pa.field(name, kind) for name, (kind, _) in NODE_COLUMNS.items()]
)

ADDED_COLUMNS = frozenset({"reason", "link"})
"""Null in files that were written before there were these."""


def rollout_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Trajectory`, nodes left out, from a row."""
    failure = {name: row[f"failure_{name}"] for name in ("component", "reason", "message")}
    return {
        "group_id": row["group_id"],
        "task_id": row["task_id"],
        "rollout_id": row["rollout_id"],
        "session_id": row["session_id"],
        "index": row["index"],
        "outcome": row["outcome"],
        "reward": row["reward"],
        "failure": None if row["failure_component"] is None else failure,
        "harness_exit": row["harness_exit"],
        "seconds": row["rollout_seconds"],
        "timings": dict(row["timings"]),
        "metrics": dict(row["metrics"]),
    }


def node_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Node` from a row."""
    support = {name: row[f"support_{name}"] for name in ("counts", "logprobs")} | {"token_ids": row["support_ids"]}
    experts = {
        "start": row["experts_start"],
        "num_layers": row["experts_layers"],
        "top_k": row["experts_top_k"],
        "expert_ids": row["expert_ids"],
    }
    plain = ("node_id", "parent", "edge", "link", "started_s", "seconds", "prompt_ids")
    return {name: row[name] for name in plain} | {
        "reason": row["reason"] or "",
        "completion": {
            "token_ids": row["token_ids"],
            "sampler_logprobs": row["logprobs"],
            "versions": [(version, len(list(run))) for version, run in itertools.groupby(row["versions"])],
            "finish_reason": row["finish_reason"],
            "pool": row["pool"],
            "lineage": row["lineage"],
            "cached_tokens": row["cached_tokens"],
            "support": None if row["support_counts"] is None else support,
            "experts": None if row["expert_ids"] is None else experts,
        },
    }


def version_per_token(completion: Completion) -> list[int]:
    """Return the policy version of each drawn token."""
    return [run.version for run in completion.versions for _ in range(run.count)]


def check_completion(completion: Completion) -> None:
    """Raise `ValueError` when the arrays of a completion do not fit each other."""
    tokens = len(completion.token_ids)
    if len(completion.sampler_logprobs) != 4 * tokens:
        msg = f"{tokens} drawn tokens have {len(completion.sampler_logprobs)} bytes of log-probabilities"
        raise ValueError(msg)
    if completion.versions != _merged(completion.versions) or sum(run.count for run in completion.versions) != tokens:
        msg = f"{tokens} drawn tokens have version runs {completion.versions[:8]}, which must add up without repeats"
        raise ValueError(msg)
    support = completion.support
    if support is not None:
        counts = memoryview(support.counts).cast("H") if len(support.counts) % 2 == 0 else ()
        if len(counts) != tokens or not sum(counts) * 4 == len(support.token_ids) == len(support.logprobs):
            msg = f"the support of {tokens} drawn tokens has {len(counts)} counts that do not fit its ids"
            raise ValueError(msg)
    experts = completion.experts
    if experts is not None:
        per_position = 2 * experts.num_layers * experts.top_k
        if experts.num_layers < 1 or experts.top_k < 1 or len(experts.expert_ids) % per_position:
            msg = f"{len(experts.expert_ids)} bytes of experts do not fit {experts.num_layers} layers"
            raise ValueError(msg)


def _merged(runs: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Return the one way of writing runs down: none empty, no two neighbours of the same version."""
    merged = itertools.groupby((run for run in runs if run.count > 0), key=lambda run: run.version)
    return tuple(VersionRun(version, sum(run.count for run in same)) for version, same in merged)
