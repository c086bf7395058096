"""From a trajectory and the session behind it to an ATIF document."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from etude.interfaces import ShownConversation
from etude.rollout.atif import (
    SCHEMA_VERSION,
    Agent,
    Document,
    Embedded,
    Extra,
    FinalMetrics,
    Metrics,
    Observation,
    Result,
    Sidecar,
    Step,
    ToolCall,
    TrajectoryRef,
)
from etude.rollout.identity import HarnessIdentity
from etude.rollout.outline import outline
from etude.rollout.untrusted import MAX_TEXT_CHARS, as_list, as_mapping, as_text, clean_mapping, cut
from etude.types import Edge, Node, Trajectory

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
    drawn_by: tuple[int | None, ...] = ()
    """The call behind each of its assistant's messages, as in `SessionRecord`; empty when that is not known."""
    others: tuple[ShownConversation, ...] = ()
    """Conversations beside it."""
    answers: dict[int, dict[str, object]] = {}
    """What each call's answer says, by node."""
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
    nodes = trajectory.nodes
    others = tuple(_embedded(record, other) for other in record.others)
    steps = _steps(record.messages, nodes, record.drawn_by)
    if not steps:
        steps = [Step(step_id=1, source="user", message=cut(record.instruction))]
    return Document(
        schema_version=SCHEMA_VERSION,
        session_id=trajectory.group_id,
        trajectory_id=trajectory.rollout_id,
        agent=_agent(record, record.tools),
        steps=tuple(_with_sub_agents(steps, record)),
        final_metrics=FinalMetrics(
            total_prompt_tokens=sum(_context_lengths(nodes).values()),
            total_completion_tokens=sum(len(node.completion.token_ids) for node in nodes),
            total_cached_tokens=sum(node.completion.cached_tokens for node in nodes),
            total_steps=len(steps),
        ),
        subagent_trajectories=others or None,
        extra=Extra(etude=_sidecar(record)),
    )


def _agent(record: RolloutRecord, tools: Sequence[Mapping[str, object]]) -> Agent:
    harness = record.harness
    return Agent(
        name=cut(harness.name),
        version=cut(harness.version),
        tool_definitions=tuple(map(clean_mapping, tools)) or None,
    )


def _embedded(record: RolloutRecord, other: ShownConversation) -> Embedded:
    """Return a conversation beside the main one, with the call that it begins with."""
    nodes = record.trajectory.nodes
    root = _path(nodes, other.drawn_by[-1])[0]
    steps = _steps(other.messages, nodes, other.drawn_by)
    return Embedded(
        schema_version=SCHEMA_VERSION,
        session_id=record.trajectory.group_id,
        trajectory_id=_name(record, root),
        agent=_agent(record, other.tools),
        steps=tuple(_with_sub_agents(steps, record)),
        extra={"node": root.node_id, "edge": root.edge.value, "reason": root.reason, "link": root.link},
    )


def _name(record: RolloutRecord, root: Node) -> str:
    return f"{record.trajectory.rollout_id}/{root.node_id}"


def _with_sub_agents(steps: Sequence[Step], record: RolloutRecord) -> list[Step]:
    """Return steps that name the sub-agents which they started, as far as those are embedded."""
    started: defaultdict[object, list[TrajectoryRef]] = defaultdict(list)
    for other in record.others:
        root = _path(record.trajectory.nodes, other.drawn_by[-1])[0]
        if root.edge is Edge.SUBAGENT_CALL:
            started[root.link].append(TrajectoryRef(trajectory_id=_name(record, root)))
    shown = list(steps)
    for place, step in enumerate(shown):
        refs = started.get((step.extra or {}).get("node"))
        if refs and step.source == "agent":
            results = step.observation.results if step.observation else ()
            observation = Observation(results=(*results, Result(subagent_trajectory_ref=tuple(refs))))
            shown[place] = msgspec.structs.replace(step, observation=observation)
    return shown


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
        calls=outline(trajectory.nodes, record.answers),
    )


def _steps(
    messages: Sequence[Mapping[str, object]], nodes: Sequence[Node], drawn_by: Sequence[int | None]
) -> list[Step]:
    """Return one step per message that is not a tool's answer; answers join the step that called the tool."""
    steps: list[Step] = []
    turns = _turns(messages, nodes, drawn_by)
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
            turn = turns[num_turns]
            step = _answered(step, message, turn)
            if turn is None and drawn_by:
                step = msgspec.structs.replace(step, is_copied_context=True)
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
            "reason": node.reason,
            "link": node.link,
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


def _turns(
    messages: Sequence[Mapping[str, object]], nodes: Sequence[Node], drawn_by: Sequence[int | None]
) -> list[tuple[Node, int] | None]:
    """Return the node behind each assistant message with its context length; None where there is none.

    If it is not known, the one branch of the session is taken that has as many calls as the conversation has assistant
    messages, if it is the only one.
    """
    num_answers = sum(message.get("role") == "assistant" for message in messages)
    if not drawn_by:
        parents = {node.parent for node in nodes}
        branches = [_path(nodes, node.node_id) for node in nodes if node.node_id not in parents]
        fitting = [branch for branch in branches if len(branch) == num_answers]
        drawn_by = [node.node_id for node in fitting[0]] if len(fitting) == 1 else [None] * num_answers
    lengths = _context_lengths(nodes)
    by_id = {node.node_id: node for node in nodes}
    return [None if one is None else (by_id[one], lengths[one]) for one in drawn_by]


def _path(nodes: Sequence[Node], last: int | None) -> list[Node]:
    """Return the calls from a root to this one."""
    by_id = {node.node_id: node for node in nodes}
    path: list[Node] = []
    while last is not None:
        path.append(by_id[last])
        last = by_id[last].parent
    return path[::-1]


def _context_lengths(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of tokens each call was given, by node."""
    ends: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for node in nodes:
        before = 0 if node.parent is None else ends[node.parent]
        lengths[node.node_id] = before + len(node.prompt_ids)
        ends[node.node_id] = lengths[node.node_id] + len(node.completion.token_ids)
    return lengths
