"""A rollout turn by turn: for a browser, and for a terminal."""

from collections.abc import Iterator
from itertools import chain

import msgspec

from etude.dashboard.chart import short
from etude.dashboard.html import Html, element, joined, visible
from etude.dashboard.run_view import Rollout
from etude.dashboard.session_tree import session_tree_text
from etude.rollout.atif import Sidecar, Step, ToolCall
from etude.telemetry.lines import printable

MAX_HTML_CHARS = 6000
"""Per text; the rollout's own file has the rest."""

_COLOURS = {"scored": "good", "truncated": "mid", "held": "mid", "cancelled": "mid"}


def rollout_html(rollout: Rollout) -> Html:
    """Return a rollout as a block that folds."""
    sidecar = rollout.document.extra.etude
    reward = "no reward" if sidecar.reward is None else f"reward {short(sidecar.reward)}"
    colour = "bad" if sidecar.reward == 0 else _COLOURS.get(sidecar.outcome, "bad")
    steps = rollout.document.steps
    return element(
        "details",
        element(
            "summary",
            element("strong", sidecar.task_id),
            element("span", f"{sidecar.outcome}, {reward}", class_=f"badge {colour}"),
            element("span", " · ".join(_facts(sidecar, steps)), class_="soft"),
            element("small", rollout.name),
        ),
        _failure_html(sidecar),
        _calls_html(sidecar),
        *map(_turn_html, steps),
        class_="rollout card",
    )


def rollout_text(rollout: Rollout) -> str:
    """Return a rollout as plain text in which nothing can steer the terminal."""
    sidecar = rollout.document.extra.etude
    reward = "no reward" if sidecar.reward is None else f"reward {short(sidecar.reward)}"
    facts = ", ".join(_facts(sidecar, rollout.document.steps))
    lines = [printable(f"{rollout.name}  task {sidecar.task_id}  {sidecar.outcome}, {reward}"), printable(facts)]
    if sidecar.failure is not None:
        lines.append(printable(f"failure: {_failure(sidecar)}"))
    if sidecar.calls:
        lines += ["", session_tree_text(sidecar.calls).rstrip("\n")]
    return visible("\n".join(chain(lines, *map(_turn_lines, rollout.document.steps)))) + "\n"


def _facts(sidecar: Sidecar, steps: tuple[Step, ...]) -> list[str]:
    """Return what is worth knowing besides outcome and reward."""
    turns = sum(step.source == "agent" for step in steps)
    facts = [f"{turns} turn" if turns == 1 else f"{turns} turns", f"{short(sidecar.seconds)} s"]
    if sidecar.policy_versions is not None:
        oldest, newest = sidecar.policy_versions
        facts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    if sidecar.truncated:
        facts.append(f"ended by limit: {sidecar.truncated}")
    if sidecar.harness_exit:
        facts.append(f"harness exit {sidecar.harness_exit}")
    return facts


def _failure(sidecar: Sidecar) -> str:
    failure = sidecar.failure or {}
    return f"{failure.get('component', '?')}: {failure.get('reason', '?')}: {failure.get('message', '')}"


def _failure_html(sidecar: Sidecar) -> Html | None:
    return None if sidecar.failure is None else element("p", _failure(sidecar), class_="bad")


def _calls_html(sidecar: Sidecar) -> Html | None:
    """Return the tree of the calls, where there is more to it than one conversation."""
    if all(call.edge in ("root", "continuation") for call in sidecar.calls):
        return None
    return element("details", element("summary", "calls", class_="soft"), _pre(session_tree_text(sidecar.calls)))


def _turn_html(step: Step) -> Html:
    """Return one step with its tool calls and what they gave."""
    results = step.observation.results if step.observation else ()
    parts = [element("div", _heading(step), class_="role")]
    if step.reasoning_content:
        parts.append(
            element("details", element("summary", "reasoning", class_="soft"), _pre(step.reasoning_content))
        )  # fmt: skip
    if step.message:
        parts.append(_pre(step.message))
    parts += [element("div", _pre(_call_text(call)), class_="box call") for call in step.tool_calls or ()]
    parts += [element("div", _pre(result.content or ""), class_="box result") for result in results]
    source = step.source if step.source in ("agent", "user") else "system"
    return element("div", joined(*parts), class_=f"turn {source}")


def _turn_lines(step: Step) -> Iterator[str]:
    """Yield one step as lines."""
    yield ""
    yield f"--- {printable(_heading(step))}"
    if step.reasoning_content:
        yield from _quoted("~ ", step.reasoning_content)
    if step.message:
        # Indented, so that no message can pass for the next turn.
        yield from _quoted("  ", step.message)
    for call in step.tool_calls or ():
        yield from _quoted("> ", _call_text(call))
    for result in step.observation.results if step.observation else ():
        yield from _quoted("< ", result.content or "")


def _heading(step: Step) -> str:
    """Return who speaks, with the tokens of the call."""
    metrics = step.metrics
    if metrics is None:
        return f"{step.step_id}  {step.source}"
    return (
        f"{step.step_id}  {step.source}  {metrics.prompt_tokens or 0} tokens in "
        f"({metrics.cached_tokens or 0} cached), {metrics.completion_tokens or 0} out"
    )


def _call_text(call: ToolCall) -> str:
    """Return a tool call as people would write it: one text argument stands for itself."""
    values = list(call.arguments.values())
    if not values:
        return f"{call.function_name}()"
    if len(values) == 1 and isinstance(values[0], str):
        return f"{call.function_name}: {values[0]}"
    return f"{call.function_name}: {msgspec.json.encode(call.arguments).decode()}"


def _quoted(mark: str, text: str) -> Iterator[str]:
    return (mark + line for line in text.rstrip("\n").split("\n"))


def _pre(text: str) -> Html:
    """Return text as it is, cut where a page would become unreadable."""
    more = len(text) - MAX_HTML_CHARS
    return element("pre", text if more <= 0 else f"{text[:MAX_HTML_CHARS]}\n[{more} more characters]")
