"""Why a conversation begins, and what a call brings along: to which other call of the session it belongs."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from etude.config import EdgeRule
from etude.gateway.auxiliary import Hints, declared
from etude.gateway.quotes import LEAST_CHARS, Quoting, blank_free, quotable, text_of
from etude.types import Edge

GOES_ON = (Edge.COMPACTION, Edge.REWRITE, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE)
"""Roots that go on with the work of the call that they are linked to."""

TOOL_CALL_OPEN = "tool_call_open"
"""The one reason that is a guess: a conversation began while a tool had not answered."""

_PROMPT = "prompt_of_tool_call"
_CALL_ID = re.compile(r"[0-9a-f]{24}")
_MOST_CALLS = 64
"""Newest calls whose answers are looked for in a new conversation."""
_NEWEST = 4
"""Those of them whose answers may be shorter than `LEAST_CHARS`."""
_FIRST_MESSAGES, _LAST_MESSAGES = 8, 4
_MOST_ARGUMENTS = 32


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Why a call has its edge."""

    edge: Edge
    reason: str
    link: int | None = None


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that extends no other one, as it begins."""

    messages: Sequence[Mapping[str, object]]
    hints: Hints
    asked: int
    """Calls that had been answered when it was asked for."""
    prompt_tokens: int
    kin: Told
    """What its messages share with others."""


class Return(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of sub-agents that a call brings to the agent that started them."""

    link: int
    """The call that gave the last of them."""
    started: tuple[int, ...]
    """Their roots, which this proves to be sub-agents."""


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    arguments: tuple[str, ...]
    length: int
    asked: int


class Relations:
    """What one session's calls said, as far as others can be recognised by it."""

    def __init__(self, rules: Sequence[EdgeRule]) -> None:
        self._rules = rules
        self._known: list[_Known] = []
        self._ids: dict[str, int] = {}
        self._agents: list[int] = []
        self._moved: dict[int, int] = {}
        self._went_on: dict[int, int] = {}
        self._with_calls: deque[int] = deque(maxlen=_MOST_CALLS)
        self._claimed: set[tuple[int, int]] = set()
        self._out: dict[int, int] = {}
        self._unlinked: list[int] = []

    def learn(
        self, told: Told, *, parent: int | None, answer: Mapping[str, object], asked: int, length: int, call_id: str
    ) -> None:
        """Take in the next call; `length` counts the tokens from its root to its last drawn one."""
        node_id = len(self._known)
        calls = cast("Sequence[Mapping[str, Mapping[str, str]]]", answer.get("tool_calls") or ())
        arguments = tuple(call["function"]["arguments"] for call in calls)
        self._known.append(_Known(text=text_of(answer), arguments=arguments, length=length, asked=asked))
        self._ids[call_id] = node_id
        if arguments:
            self._with_calls.append(node_id)
        if parent is not None:
            self._went_on.setdefault(parent, asked)
        self._settle_agent(node_id, told, parent)

    def agent(self, node_id: int) -> int:
        """Return the root of the agent that a call belongs to."""
        root = self._agents[node_id]
        while root in self._moved:
            root = self._moved[root]
        return root

    def move(self, root: int, parent: int) -> None:
        """Make a root the child of a call that was answered after it."""
        agent = self.agent(parent)
        # The parent may be of the same agent: then nobody moves.
        if self._agents[root] == root != agent:
            self._moved[root] = agent
        self._out.pop(root, None)
        self._unlinked = [other for other in self._unlinked if other != root]
        self._went_on.setdefault(parent, self._known[root].asked)

    def of(self, opening: Opening) -> Told:
        """Return why a conversation begins."""
        for parent in _CALL_ID.findall(opening.hints.parent):
            if parent in self._ids:
                return Told(edge=Edge.SUBAGENT_CALL, reason="header", link=self._ids[parent])
        summary = self.summary(opening)
        rule = declared(self._rules, opening.messages)
        if rule is not None and not (rule.edge == "compaction" and summary is not None):
            return self._by_rule(rule, opening)
        prompt = self._prompt(opening)
        if prompt is not None:
            return Told(edge=Edge.SUBAGENT_CALL, reason=_PROMPT, link=prompt)
        if summary is not None:
            return Told(edge=Edge.COMPACTION, reason="summary_in_prompt", link=summary)
        waiting = self._waiting(opening.asked)
        if opening.kin.edge is Edge.ROOT and waiting is not None:
            return Told(edge=Edge.SUBAGENT_CALL, reason=TOOL_CALL_OPEN, link=waiting)
        return opening.kin

    def twin(self, opening: Opening) -> Told | None:
        """Return why a conversation begins like a sub-agent's: two tool calls may ask for the same, word for word."""
        prompt = self._prompt(msgspec.structs.replace(opening, kin=Told(edge=Edge.ROOT, reason="")))
        return None if prompt is None else Told(edge=Edge.SUBAGENT_CALL, reason=_PROMPT, link=prompt)

    def summary(self, opening: Opening, *, since: int = 0) -> int | None:
        """Return the newest call, answered after so many others, whose answer a shorter conversation quotes.

        One with prompts of its own is that of another agent, who may well be told an answer: there a summary is looked
        for in the system prompt only.
        """
        is_own = opening.kin.edge is Edge.ROOT
        said = [message for message in _few(opening.messages) if not is_own or message["role"] == "system"]
        quoting = [Quoting(text_of(message)) for message in said]
        for age, node_id in enumerate(range(len(self._known) - 1, max(since, len(self._known) - _MOST_CALLS) - 1, -1)):
            known = self._known[node_id]
            texts = [text for text in quotable(known.text) if age < _NEWEST or len(text) >= LEAST_CHARS]
            is_shorter = opening.prompt_tokens < known.length
            if is_shorter and any(one.quotes(text) for one in quoting for text in texts):
                return node_id
        return None

    def returned(self, parent: int, tail: Sequence[Mapping[str, object]]) -> Return | None:
        """Return the sub-agents whose answers are in the messages that a call adds to its parent, if any is."""
        started = [root for root, link in self._out.items() if self.agent(link) == self.agent(parent)]
        late = [root for root in self._unlinked if self._known[root].asked > parent]
        if not started and not late:
            return None
        quoting = [Quoting(text_of(message)) for message in tail if message["role"] != "assistant"]
        found = {root: self._quoted(root, quoting, is_known=True) for root in started}
        found |= {root: self._quoted(root, quoting, is_known=False) for root in late}
        links = {root: link for root, link in found.items() if link is not None}
        for root in links:
            self._out.pop(root, None)
        self._unlinked = [root for root in self._unlinked if root not in links]
        if not links:
            return None
        return Return(link=max(links.values()), started=tuple(links))

    def _settle_agent(self, node_id: int, told: Told, parent: int | None) -> None:
        before = parent if parent is not None else told.link if told.edge in (*GOES_ON, Edge.RETRY) else None
        self._agents.append(node_id if before is None else self.agent(before))
        if told.edge is Edge.SUBAGENT_CALL and told.link is not None:
            self._out[node_id] = told.link
        if told.edge is Edge.ROOT and node_id:
            self._unlinked.append(node_id)

    def goes_on(self, node_id: int) -> bool:
        """Return whether another call extends this one."""
        return node_id in self._went_on

    def _by_rule(self, rule: EdgeRule, opening: Opening) -> Told:
        """Return what a rule says, with the call that fits best."""
        newest = opening.asked - 1 if opening.asked else None
        waiting = self._waiting(opening.asked)
        links = {
            Edge.COMPACTION: newest,
            Edge.SUBAGENT_CALL: newest if waiting is None else waiting,
            Edge.REWRITE: opening.kin.link,
        }
        edge = Edge(rule.edge)
        return Told(edge=edge, reason=rule.name, link=links.get(edge))

    def _prompt(self, opening: Opening) -> int | None:
        """Return the call that asks a tool for what this conversation begins with, once for each such tool call."""
        users = [text_of(message) for message in _few(opening.messages) if message["role"] == "user"]
        whole = {blank_free(text) for text in users}
        # An agent that shares its prompts with another one may as well have written down what it did so far.
        quoting = [Quoting(text) for text in users] if opening.kin.edge is Edge.ROOT else []
        for node_id in reversed(self._with_calls):
            if node_id >= opening.asked:
                continue
            texts = [text for one in self._known[node_id].arguments for text in _strings(one)]
            for place, text in enumerate(texts):
                sought = blank_free(text)
                is_long = len(sought) >= LEAST_CHARS
                fits = sought in whole if sought else False
                fits = fits or (is_long and any(one.quotes(text) for one in quoting))
                if fits and (node_id, place) not in self._claimed:
                    self._claimed.add((node_id, place))
                    return node_id
        return None

    def _waiting(self, asked: int) -> int | None:
        """Return the newest call whose tools had not answered when so many calls were answered."""
        for node_id in reversed(self._with_calls):
            if node_id < asked and self._went_on.get(node_id, asked + 1) > asked:
                return node_id
        return None

    def _quoted(self, root: int, quoting: Sequence[Quoting], *, is_known: bool) -> int | None:
        """Return the newest call of an agent whose answer is quoted; one that only this shows needs a long answer."""
        for node_id in range(len(self._known) - 1, max(root, len(self._known) - _MOST_CALLS) - 1, -1):
            text = self._known[node_id].text
            if self.agent(node_id) != root or (not is_known and len(blank_free(text)) < LEAST_CHARS):
                continue
            if any(one.quotes(text) for one in quoting):
                return node_id
        return None


def _few(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the messages that can hold a summary or a task."""
    said = [message for message in messages if message["role"] in ("system", "user")]
    most = _FIRST_MESSAGES + _LAST_MESSAGES
    return said if len(said) <= most else [*said[:_FIRST_MESSAGES], *said[-_LAST_MESSAGES:]]


def _strings(arguments: str) -> list[str]:
    """Return the texts in the arguments of a tool call."""
    try:
        pending: list[object] = [msgspec.json.decode(arguments)]
    except (msgspec.DecodeError, RecursionError):
        return []
    texts: list[str] = []
    while pending and len(texts) < _MOST_ARGUMENTS:
        value = pending.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            pending += cast("dict[str, object]", value).values()
        elif isinstance(value, list):
            pending += cast("list[object]", value)
    return texts
