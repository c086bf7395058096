"""What the control API is told and tells: OpenEnv's names where it has them."""

import math
from typing import Literal

import msgspec

from etude.algorithm.trace import logprobs_of, node_name, where_it_hangs
from etude.gateway.refusals import malformed
from etude.interfaces import SessionRecord, SessionSpec
from etude.types import SamplingParams

_ID_LENGTH_MAX = 128


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution that the session's tokens are drawn from; what is left out is `SamplingParams`' own."""

    temperature: float = 1.0
    top_p: float = 0.97
    top_k: int = 64
    max_tokens: int = 512
    n: int = 1


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /sessions`."""

    session_id: str = ""
    task_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    purpose: Literal["train", "eval"] = "train"
    sampling: Sampling = Sampling()
    eval_sampling: Sampling | None = None
    """Used instead of `sampling` when `purpose` is eval."""
    max_model_calls: int = 100
    max_total_tokens: int = 1 << 17
    """Drawn tokens of all calls together; `sampling.max_tokens` are those of one call."""
    deadline_s: float | None = None
    on_limit: Literal["error", "message"] = "error"
    seed: int = 0
    min_version: int | None = None
    exact_version: int | None = None
    model: str = ""
    """Recorded: the gateway has one model."""
    parent_session: str = ""
    """Recorded."""
    metadata: dict[str, msgspec.Raw] = {}

    @property
    def sampling_in_force(self) -> Sampling:
        """That of the session's purpose."""
        return self.eval_sampling or self.sampling if self.purpose == "eval" else self.sampling


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/reward`."""

    reward: float
    components: dict[str, float] = {}


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/pause`."""

    mode: Literal["drain", "abort", "keep"] = "drain"


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/resume`."""

    weight_version: int | None = None


def spec_of(request: OpenRequest, session_id: str) -> SessionSpec:
    """Return what the gateway is told; raise `CallRefusedError` (400) naming what makes no sense."""
    sampling = request.sampling_in_force
    _require(0 < len(session_id) <= _ID_LENGTH_MAX, f"session_id: 1 to {_ID_LENGTH_MAX} characters")
    _require(session_id.isprintable() and "/" not in session_id, "session_id: printable characters without /")
    _require(sampling.n == 1, "sampling.n: each call is answered once")
    _require(math.isfinite(sampling.temperature) and sampling.temperature >= 0, "sampling.temperature: from 0")
    _require(0 < sampling.top_p <= 1, "sampling.top_p: above 0, at most 1")
    _require(sampling.top_k >= 0, "sampling.top_k: from 0")
    _require(sampling.max_tokens > 0, "sampling.max_tokens: at least 1")
    _require(request.max_model_calls > 0, "max_model_calls: at least 1")
    _require(request.max_total_tokens > 0, "max_total_tokens: at least 1")
    _require(request.deadline_s is None or 0 < request.deadline_s < math.inf, "deadline_s: above 0")
    return SessionSpec(
        session_id=session_id,
        purpose=request.purpose,
        seed=request.seed,
        params=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        ),
        max_calls=request.max_model_calls,
        max_session_tokens=request.max_total_tokens,
        deadline_s=request.deadline_s,
        on_limit=request.on_limit,
        min_version=request.min_version,
        exact_version=request.exact_version,
    )


def nodes_of(record: SessionRecord) -> list[dict[str, object]]:
    """Return the tree: for each call what it added to its parent, whether or not it is trained on."""
    return [
        {
            "node_id": node_name(node.node_id),
            "prompt_token_ids": node.prompt_ids,
            "completion_token_ids": node.completion.token_ids,
            "per_token_logps": logprobs_of(node.completion),
            "finish_reason": node.completion.finish_reason.value,
            "started_s": node.started_s,
            "seconds": node.seconds,
            **where_it_hangs(node),
        }
        for node in record.nodes
    ]


def _require(holds: bool, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise malformed(f"{message} expected")
