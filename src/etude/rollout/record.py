"""From a trajectory and the session behind it to an ATIF document."""

from collections.abc import Mapping, Sequence

import msgspec

from etude.rollout.atif import (
    SCHEMA_VERSION,
    Agent,
    Document,
    Extra,
    FinalMetrics,
    Metrics,
    Observation,
    Result,
    Sidecar,
    Step,
    ToolCall,
)
from etude.rollout.identity import HarnessIdentity
from etude.rollout.untrusted import MAX_TEXT_CHARS, as_list, as_mapping, as_text, clean_mapping, cut
from etude.types import Node, Trajectory

_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rollout leaves for people: cheap to make, turned into a document by whoever writes it."""

    trajectory: Trajectory
    purpose: str
    """`train` or `eval`."""
    instruction: str
    harness: HarnessIdentity
    messages: tuple[dict[str, object], ...] = ()
    """The longest conversation as the harness saw it: hostile, of any shape."""
    tools: tuple[dict[str, object], ...] = ()
    truncated: str = ""
    """The limit that ended the session."""

    @property
    def key(self) -> str:
        """Place in the run directory; replaced attempts keep theirs beside their replacement."""
        trajectory = self.trajectory
        name = trajectory.rollout_id.removeprefix(f"{trajectory.group_id}-")
        return f"rollouts/{trajectory.group_id}/{name}.json"


def encode_record(record: RolloutRecord) -> bytes:
    """Return the rollout as an ATIF v1.8 document in JSON."""
    return msgspec.json.encode(document(record))


def document(record: RolloutRecord) -> Document:
    """Return the rollout as an ATIF v1.8 document."""
    trajectory = record.trajectory
    steps = _steps(record.messages, _turns(record.messages, trajectory.nodes))
    if not steps:
        steps = [Step(step_id=1, source="user", message=cut(record.instruction))]
    lengths = _context_lengths(trajectory.nodes)
    tools = tuple(map(clean_mapping, record.tools))
    harness = record.harness
    return Document(
        schema_version=SCHEMA_VERSION,
        session_id=trajectory.group_id,
        trajectory_id=trajectory.rollout_id,
        agent=Agent(name=cut(harness.name), version=cut(harness.version), tool_definitions=tools or None),
        steps=tuple(steps),
        final_metrics=FinalMetrics(
            total_prompt_tokens=sum(lengths.values()),
            total_completion_tokens=sum(len(node.completion.token_ids) for node in trajectory.nodes),
            total_cached_tokens=sum(node.completion.cached_tokens for node in trajectory.nodes),
            total_steps=len(steps),
        ),
        extra=Extra(etude=_sidecar(record)),
    )


def _sidecar(record: RolloutRecord) -> Sidecar:
    """Return what ATIF has no field for."""
    trajectory = record.trajectory
    versions = [run.version for node in trajectory.nodes for run in node.completion.versions]
    failure = trajectory.failure
    return Sidecar(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        index=trajectory.index,
        purpose=record.purpose,
        outcome=trajectory.outcome.value,
        reward=trajectory.reward,
        failure=None
        if failure is None
        else {"component": failure.component, "reason": failure.reason, "message": cut(failure.message)},
        harness_hash=record.harness.config_hash or None,
        harness_exit=trajectory.harness_exit,
        truncated=record.truncated or None,
        seconds=trajectory.seconds,
        timings=trajectory.timings,
        metrics=dict(trajectory.metrics),
        policy_versions=(min(versions), max(versions)) if versions else None,
    )


def _steps(messages: Sequence[Mapping[str, object]], turns: Sequence[tuple[Node, int]]) -> list[Step]:
    """Return one step per message that is not a tool's answer; answers join the step that called the tool."""
    steps: list[Step] = []
    num_turns = 0
    for message in messages:
        role = as_text(message.get("role"))
        if role == "tool" and steps and steps[-1].source == "agent":
            steps[-1] = _observed(steps[-1], message)
            continue
        source = _SOURCES.get(role)
        step = Step(step_id=len(steps) + 1, source=source or "user", message=as_text(message.get("content")))
        if source is None:
            step = msgspec.structs.replace(step, extra={"role": role})
        elif source == "agent":
            step = _answered(step, message, turns[num_turns] if turns else None)
            num_turns += 1
        steps.append(step)
    return steps


def _answered(step: Step, message: Mapping[str, object], turn: tuple[Node, int] | None) -> Step:
    """Return an agent's step with its tool calls and, where they are known, the tokens it was drawn as."""
    calls = as_list(message.get("tool_calls"))
    step = msgspec.structs.replace(
        step,
        reasoning_content=as_text(message.get("reasoning_content")) or None,
        tool_calls=tuple(_call(call, place) for place, call in enumerate(calls)) or None,
        llm_call_count=1,
    )
    if turn is None:
        return step
    node, context_length = turn
    completion = node.completion
    return msgspec.structs.replace(
        step,
        metrics=Metrics(
            prompt_tokens=context_length,
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.cached_tokens,
        ),
        extra={
            "node": node.node_id,
            "edge": node.edge.value,
            "finish_reason": completion.finish_reason.value,
            "versions": [[run.version, run.count] for run in completion.versions],
            "pool": completion.pool,
            "started_s": node.started_s,
            "seconds": node.seconds,
        },
    )


def _observed(step: Step, message: Mapping[str, object]) -> Step:
    """Return an agent's step with one more tool answer; an answer to no call of the step stays unattributed."""
    named = as_text(message.get("tool_call_id"))
    known = {call.tool_call_id for call in step.tool_calls or ()}
    result = Result(source_call_id=named if named in known else None, content=as_text(message.get("content")))
    before = step.observation.results if step.observation else ()
    return msgspec.structs.replace(step, observation=Observation(results=(*before, result)))


def _call(call: object, place: int) -> ToolCall:
    """Return one tool call of an OpenAI message, whatever shape it has."""
    outer = as_mapping(call)
    function = as_mapping(outer.get("function"))
    raw = function.get("arguments")
    arguments = raw
    if isinstance(raw, str) and len(raw) <= MAX_TEXT_CHARS:
        try:
            arguments = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            arguments = None
    return ToolCall(
        tool_call_id=as_text(outer.get("id")) or f"call-{place}",
        function_name=as_text(function.get("name")) or "unnamed",
        arguments=clean_mapping(arguments) if isinstance(arguments, dict) else {"_raw": as_text(raw)},  # pyright: ignore[reportUnknownArgumentType]
    )


def _turns(messages: Sequence[Mapping[str, object]], nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    """Return the node behind each assistant message with its context length, or nothing if that is not certain.

    Certain means: exactly one branch of the session has as many calls as the conversation has assistant messages.
    """
    num_answers = sum(message.get("role") == "assistant" for message in messages)
    by_id = {node.node_id: node for node in nodes}
    parents = {node.parent for node in nodes}
    branches: list[list[Node]] = []
    for leaf in nodes:
        if leaf.node_id in parents:
            continue
        branch = [leaf]
        while (parent := branch[-1].parent) is not None:
            branch.append(by_id[parent])
        branches.append(branch[::-1])
    fitting = [branch for branch in branches if len(branch) == num_answers]
    if len(fitting) != 1:
        return []
    lengths = _context_lengths(nodes)
    return [(node, lengths[node.node_id]) for node in fitting[0]]


def _context_lengths(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of tokens each call was given, by node."""
    ends: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for node in nodes:
        before = 0 if node.parent is None else ends[node.parent]
        lengths[node.node_id] = before + len(node.prompt_ids)
        ends[node.node_id] = lengths[node.node_id] + len(node.completion.token_ids)
    return lengths
