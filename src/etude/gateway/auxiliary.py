"""What a harness's habits say of its calls: rules, as data, and the calls that they make no part of the task."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from etude.config import EdgeRule
from etude.gateway.quotes import text_of
from etude.types import Edge

BUILT_IN = (
    EdgeRule(name="quota_ping", edge="auxiliary", max_tokens=1, single=True),
    EdgeRule(name="warm_up", edge="auxiliary", first_user=r"^\s*Warmup\s*$", single=True),
    EdgeRule(
        name="title", edge="auxiliary", system=r"(?i)\b(generate|write|create)\b[^.\n]{0,60}\btitle\b", single=True
    ),
    EdgeRule(name="title", edge="auxiliary", system=r"(?i)summarize this coding conversation in under", single=True),
    EdgeRule(name="topic", edge="auxiliary", system=r"(?i)\bnew conversation topic\b", single=True),
    EdgeRule(name="small_answer", edge="auxiliary", max_tokens=64, single=True),
    EdgeRule(name="no_tools", edge="auxiliary", no_tools=True, single=True),
    EdgeRule(name="other_model", edge="auxiliary", other_model=True, single=True),
    EdgeRule(name="mini_summary", edge="compaction", first_user=r"(?m)^You wrote down:$"),
)
"""Claude Code's pings, warm-ups, titles and topics, what small calls look like in general, and the built-in harness,
which goes on from an empty summary too."""

_MOST_CHARS = 1 << 16
_WEAK = (Edge.ROOT, Edge.REWRITE)
"""What a call is taken for when little is known of it."""


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says besides its conversation."""

    model: str = ""
    max_tokens: int | None = None
    parent: str = ""
    """The answer, or the tool call in it, for which the request is made, as its harness declares."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A finished session's call, for rules to look at."""

    node_id: int
    is_root: bool
    edge: Edge
    is_guess: bool = False
    """Nothing in its messages proves the edge."""
    hints: Hints
    messages: Sequence[Mapping[str, object]]
    """Those that it added to its parent, without the answer."""
    has_tools: bool
    num_calls: int
    """Calls of its branch from here on; 1 if nothing goes on with it."""


def declared(rules: Sequence[EdgeRule], messages: Sequence[Mapping[str, object]]) -> EdgeRule | None:
    """Return the first rule that holds for the messages of a new conversation, of those that look at nothing else."""
    for rule in rules:
        looks_further = _compares(rule) or rule.single
        if rule.edge != "auxiliary" and not looks_further and _patterns_hold(rule, messages):
            return rule
    return None


def auxiliary(calls: Sequence[Call], rules: Sequence[EdgeRule]) -> dict[int, str]:
    """Return the calls that are nothing of the task, each with the name of the rule that says so.

    The main conversation, which the others are compared with, is the first one of those that offer tools, if any does,
    have no prompt of an auxiliary one, and go on after the first answer.
    """
    roots = [call for call in calls if call.is_root]
    if not roots:
        return {}
    plain = [rule for rule in rules if rule.edge == "auxiliary" and _has_patterns(rule) and not _compares(rule)]
    main = max(
        roots,
        key=lambda call: (
            call.has_tools,
            not any(_fits(rule, call) for rule in plain),
            call.num_calls > 1,
            -call.node_id,
        ),
    )
    found: dict[int, str] = {}
    for call in calls:
        rule = next((rule for rule in rules if _holds(rule, call, main)), None)
        if rule is not None and rule.edge == "auxiliary":
            found[call.node_id] = rule.name
    return found


def _holds(rule: EdgeRule, call: Call, main: Call) -> bool:
    if rule.edge not in ("auxiliary", "root") or call.edge is Edge.RETRY or not (call.is_root or rule.last_user):
        return False
    if not _has_patterns(rule) and (call is main or not (call.is_guess or call.edge in _WEAK)):
        return False
    return (
        (rule.max_tokens is None or _asks_for_little(call.hints, main.hints, rule.max_tokens))
        and (not rule.no_tools or (main.has_tools and not call.has_tools))
        and (not rule.other_model or call.hints.model != main.hints.model)
        and _fits(rule, call)
    )


def _fits(rule: EdgeRule, call: Call) -> bool:
    """Return whether a rule holds for a call, as far as no other one is asked for."""
    return (not rule.single or _is_single(call)) and _patterns_hold(rule, call.messages)


def _asks_for_little(hints: Hints, main: Hints, most: int) -> bool:
    asked = hints.max_tokens
    return asked is not None and asked <= most and (main.max_tokens is None or asked < main.max_tokens)


def _is_single(call: Call) -> bool:
    roles = (message["role"] for message in call.messages if message["role"] != "system")
    return call.num_calls == 1 and list(islice(roles, 2)) == ["user"]


def _compares(rule: EdgeRule) -> bool:
    return rule.max_tokens is not None or rule.no_tools or rule.other_model


def _has_patterns(rule: EdgeRule) -> bool:
    return bool(rule.system or rule.first_user or rule.last_user or rule.anywhere)


def _patterns_hold(rule: EdgeRule, messages: Sequence[Mapping[str, object]]) -> bool:
    if not _has_patterns(rule):
        return True
    users = [message for message in messages if message["role"] == "user"]
    systems = [message for message in messages if message["role"] == "system"]
    sought = (
        (rule.system, systems),
        (rule.first_user, users[:1]),
        (rule.last_user, users[-1:]),
        (rule.anywhere, messages),
    )
    return all(not pattern or _found(pattern, among) for pattern, among in sought)


def _found(pattern: str, messages: Iterable[Mapping[str, object]]) -> bool:
    return any(re.search(pattern, text_of(message)[:_MOST_CHARS]) for message in messages)
