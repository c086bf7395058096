"""The tree of one session: where a request hangs, and the tokens that each call added.

Calls have numbers in the order in which they were answered. A parent can have the greater one: calls that run at the
same time may be answered in any order, and a call's place is known for good only when all others are.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from etude.config import EdgeRule
from etude.gateway.auxiliary import BUILT_IN, Call, Hints, auxiliary
from etude.gateway.conversation import Conversation, extend_history, history_keys, message_key, tools_key
from etude.gateway.edges import TOOL_CALL_OPEN, Opening, Relations, Told
from etude.gateway.experts import keep_experts
from etude.gateway.kinship import Asked, Kinship
from etude.gateway.prefixes import TokenPrefixes
from etude.gateway.spelling import respelled
from etude.gateway.token_ids import joined
from etude.types import Completion, Edge, Node

TOKENS_EXTEND, LATE_PARENT = "tokens_extend", "late_parent"
_CONTINUE_LINK = (Edge.COMPACTION, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE)
_NONE = Hints()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request hangs in the tree, before anything is drawn for it."""

    parent: int | None
    told: Told | None = None
    """Why it hangs there; None for a conversation that extends none, of which more is known when it is answered."""
    conversation: Conversation
    hints: Hints = Hints()
    covered: int = 0
    """Leading messages whose tokens the parent's sequence holds already."""
    prompt_ids: tuple[int, ...] | None = None
    """What the call adds to its parent, when an earlier call added the same."""
    asked: Asked
    answered_before: int
    """Calls that had been answered by then."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the tree knows of a node beyond its tokens."""

    length: int
    """Tokens from the root to the last drawn one."""
    messages: tuple[dict[str, object], ...]
    """Messages that the call added, its answer last."""
    num_messages: int
    is_whole: bool
    """`messages` begin at the beginning."""
    tools: tuple[dict[str, object], ...]
    hints: Hints


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, for people."""

    root: int
    drawn_by: tuple[int | None, ...]
    """The call behind each answer; None where the harness brought it along."""
    conversation: Conversation


class SessionTree:
    """Calls of one session by the conversation they continue.

    A parent is the deepest call whose messages, answer included, are a prefix of the request; where no messages are,
    the one whose tokens are a prefix of its tokens. The messages only find it: the tokens of a branch are always those
    that the sampler saw and drew. What begins a branch is explained by `rules`, and by what it quotes.
    """

    def __init__(self, rules: Sequence[EdgeRule] = ()) -> None:
        self._rules = (*rules, *BUILT_IN)
        self._nodes: list[Node] = []
        self._facts: list[_Facts] = []
        self._loose: list[int] = []
        self._compacted: dict[int, int] = {}
        self._asked: dict[tuple[bytes, bytes], int] = {}
        self._answered: dict[tuple[bytes, bytes], int] = {}
        self._answers: dict[bytes, dict[str, object]] = {}
        self._kinship = Kinship()
        self._tokens = TokenPrefixes()
        self._relations = Relations(self._rules)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every call that was answered, parents before children, with what is known of it by now."""
        reasons = auxiliary(self._calls(), self._rules)
        nodes = [
            replace(node, edge=Edge.AUXILIARY, reason=reasons[node.node_id], link=None)
            if node.node_id in reasons
            else node
            for node in self._nodes
        ]
        return tuple(_parents_first(_without_links_to(nodes, set(reasons))))

    def node(self, node_id: int) -> Node:
        """Return a call as it is known so far."""
        return self._nodes[node_id]

    def length(self, node_id: int | None) -> int:
        """Return how many tokens lead from the root to the last drawn token of a node; 0 for None."""
        return 0 if node_id is None else self._facts[node_id].length

    def sequence(self, node_id: int | None) -> list[int]:
        """Return those tokens."""
        pieces: list[Sequence[int]] = []
        while node_id is not None:
            node = self._nodes[node_id]
            pieces += [node.completion.token_ids, node.prompt_ids]
            node_id = node.parent
        return joined(reversed(pieces))

    def place(self, conversation: Conversation, hints: Hints = _NONE) -> Place:
        """Find where a request hangs.

        The same prompt again is a RETRY beside the earlier call. A request that adds only user, tool or system messages
        to a known conversation is its CONTINUATION. Anything else starts a branch of its own, for now.
        """
        tools = tools_key(conversation.tools)
        keys = tuple(map(message_key, conversation.messages))
        histories = history_keys(keys)
        # Every known history ends with an answer, so only the messages up to the last answer can be one.
        covered = _count_to_last_answer(conversation.messages)
        asked, answered = (histories[-1], tools), (histories[covered], tools)
        place = Place(
            parent=None,
            conversation=conversation,
            hints=hints,
            asked=Asked(messages=conversation.messages, keys=keys, history=histories[-1], tools=tools),
            answered_before=len(self._nodes),
        )
        if asked in self._asked:
            twin = self._nodes[self._asked[asked]]
            return replace(place, parent=twin.parent, told=_retry(twin.node_id), prompt_ids=twin.prompt_ids)
        if answered in self._answered:
            told = Told(edge=Edge.CONTINUATION, reason="messages_extend")
            return replace(place, parent=self._answered[answered], told=told, covered=covered)
        return place

    def unextendable(self, place: Place) -> Place:
        """Return the place of a call whose tokens cannot extend those of the parent that its messages have."""
        told = Told(edge=Edge.UNEXTENDABLE, reason="renderer_cannot_extend", link=place.parent)
        return replace(place, parent=None, told=told, covered=0)

    def restore(self, messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the messages with every answer that this session gave in its own spelling."""
        return [
            respelled(message, self._answers.get(message_key(message))) if message["role"] == "assistant" else message
            for message in messages
        ]

    def attach(
        self,
        place: Place,
        answer: dict[str, object],
        *,
        prompt_ids: tuple[int, ...],
        completion: Completion,
        call_id: str = "",
        started_s: float = 0.0,
        seconds: float = 0.0,
    ) -> Node:
        """Add an answered call.

        `prompt_ids` are the tokens between the parent's last drawn one and the call's first one; `answer` is the
        assistant message that the harness gets, and `call_id` what it may call it by. What happened since the call was
        placed is made up for here: the same prompt may have been answered, or a conversation that it goes on from.
        """
        node_id = len(self._nodes)
        place, prompt_ids = self._settle(place, prompt_ids)
        told = self._explain(place, prompt_ids)
        before = self.length(place.parent)
        node = Node(
            node_id=node_id,
            parent=place.parent,
            edge=told.edge,
            reason=told.reason,
            link=told.link,
            prompt_ids=prompt_ids,
            completion=keep_experts(completion, parent_length=before),
            started_s=started_s,
            seconds=seconds,
        )
        is_whole = self._is_whole(place)
        known = 0 if is_whole or place.parent is None else self._facts[place.parent].num_messages
        messages = place.conversation.messages
        facts = _Facts(
            length=before + len(prompt_ids) + len(completion.token_ids),
            messages=(*messages[known:], answer),
            num_messages=len(messages) + 1,
            is_whole=is_whole,
            tools=place.conversation.tools,
            hints=place.hints,
        )
        self._nodes.append(node)
        self._facts.append(facts)
        self._index(node, place, answer)
        self._relations.learn(
            told, parent=place.parent, answer=answer, asked=place.answered_before, length=facts.length, call_id=call_id
        )
        self._adopt(node)
        return node

    def agent(self, node_id: int) -> int:
        """Return the root of the agent that a call belongs to: sub-agents are agents of their own."""
        return self._relations.agent(node_id)

    def conversations(self) -> list[Shown]:
        """Return the longest conversation that grew from each root, for people; the newest of equals."""
        longest: dict[int, int] = {}
        for node in self._nodes:
            root = self._root(node.node_id)
            best = longest.get(root, root)
            if self._facts[node.node_id].num_messages >= self._facts[best].num_messages:
                longest[root] = node.node_id
        return [self._shown(root, leaf) for root, leaf in sorted(longest.items())]

    def answer(self, node_id: int) -> dict[str, object]:
        """Return the message that the harness got for a call."""
        return self._facts[node_id].messages[-1]

    def _shown(self, root: int, leaf: int) -> Shown:
        path: list[int] = []
        node_id: int | None = leaf
        while node_id is not None:
            path.append(node_id)
            node_id = None if self._facts[node_id].is_whole else self._nodes[node_id].parent
        messages: list[dict[str, object]] = []
        drawn_by: list[int | None] = []
        for one in reversed(path):
            *told, answer = self._facts[one].messages
            messages += [*told, answer]
            drawn_by += [None for message in told if message["role"] == "assistant"] + [one]
        conversation = Conversation(messages=tuple(messages), tools=self._facts[leaf].tools)
        return Shown(root=root, drawn_by=tuple(drawn_by), conversation=conversation)

    def _root(self, node_id: int) -> int:
        while (parent := self._nodes[node_id].parent) is not None:
            node_id = parent
        return node_id

    def _is_whole(self, place: Place) -> bool:
        """Return whether the parent's messages may be others than those that the request begins with."""
        if place.parent is None or place.told is None or place.told.reason == TOKENS_EXTEND:
            return True
        return place.told.edge is Edge.RETRY and place.told.link is not None and self._facts[place.told.link].is_whole

    def _settle(self, place: Place, prompt_ids: tuple[int, ...]) -> tuple[Place, tuple[int, ...]]:
        """Return the place again, now that calls which ran at the same time may have been attached."""
        twin = self._tokens.twin(place.parent, prompt_ids)
        if twin is not None:
            known = self._nodes[twin]
            return replace(place, parent=known.parent, told=_retry(twin)), known.prompt_ids
        if place.parent is None and (parent := self._tokens.longest(prompt_ids)) is not None:
            told = Told(edge=Edge.CONTINUATION, reason=TOKENS_EXTEND)
            return replace(place, parent=parent, told=told), prompt_ids[self.length(parent) :]
        return place, prompt_ids

    def _explain(self, place: Place, prompt_ids: tuple[int, ...]) -> Told:
        """Return why a call has its edge."""
        told = place.told
        if told is not None and told.edge is Edge.CONTINUATION:
            return self._returned(place) or told
        if not self._nodes:
            return Told(edge=Edge.ROOT, reason="first_call")
        opening = Opening(
            messages=place.conversation.messages,
            hints=place.hints,
            asked=place.answered_before,
            prompt_tokens=len(prompt_ids),
            kin=self._kinship.of(place.asked) if told is None else told,
        )
        if told is None or told.edge is not Edge.RETRY:
            return self._relations.of(opening)
        assert told.link is not None
        first = self._nodes[told.link]
        if first.edge is not Edge.COMPACTION:
            return (self._relations.twin(opening) if first.edge is Edge.SUBAGENT_CALL else None) or told
        newest = self._compacted.get(first.node_id, first.node_id)
        summary = self._relations.summary(opening, since=newest)
        if summary is None and self._relations.goes_on(newest):
            summary = place.answered_before - 1
        if summary is None:
            return _retry(newest)
        # Two summaries with the same words, or with none: the harness did not ask again, it went on.
        self._compacted[first.node_id] = len(self._nodes)
        return Told(edge=first.edge, reason=first.reason, link=summary)

    def _returned(self, place: Place) -> Told | None:
        """Return what makes a continuation the return of a sub-agent, which it may be the first to show."""
        assert place.parent is not None
        tail = place.conversation.messages[place.covered or self._facts[place.parent].num_messages :]
        returned = self._relations.returned(place.parent, tail)
        if returned is None:
            return None
        for root in returned.started:
            known = self._nodes[root]
            if known.edge is Edge.ROOT or known.reason == TOOL_CALL_OPEN:
                link = place.parent if known.link is None else known.link
                self._nodes[root] = replace(known, edge=Edge.SUBAGENT_CALL, reason="answer_returned", link=link)
        return Told(edge=Edge.SUBAGENT_RETURN, reason="answer_in_tool_result", link=returned.link)

    def _index(self, node: Node, place: Place, answer: dict[str, object]) -> None:
        asked, key = place.asked, message_key(answer)
        self._asked[asked.history, asked.tools] = node.node_id
        self._answered[extend_history(asked.history, key), asked.tools] = node.node_id
        self._answers[key] = answer
        after = None if self._facts[node.node_id].is_whole else node.parent
        known = 0 if after is None else self._facts[after].num_messages
        self._kinship.add(asked, after=after, keys=(*asked.keys[known:], key))
        drawn, length = node.completion.token_ids, self.length(node.node_id)
        self._tokens.add(parent=node.parent, prompt_ids=node.prompt_ids, drawn=drawn, length=length)

    def _adopt(self, parent: Node) -> None:
        """Make children of all calls whose tokens go on from a call that was answered after them.

        Those are roots, or hang on a call further up of which only the tokens are known to fit.
        """
        length, drawn = self.length(parent.node_id), parent.completion.token_ids
        for node in [self._nodes[node_id] for node_id in self._loose]:
            end = length - self.length(node.parent)
            # The drawn tokens alone refuse nearly all of them, at once.
            if not len(drawn) <= end < len(node.prompt_ids) or node.prompt_ids[end - len(drawn) : end] != drawn:
                continue
            prompt_ids = [*self.sequence(node.parent), *node.prompt_ids]
            if self._tokens.begins(parent.node_id, prompt_ids, length=length):
                is_retry = node.edge is Edge.RETRY
                self._nodes[node.node_id] = replace(
                    node,
                    parent=parent.node_id,
                    edge=Edge.RETRY if is_retry else Edge.CONTINUATION,
                    reason=node.reason if is_retry else LATE_PARENT,
                    link=node.link if is_retry else None,
                    prompt_ids=node.prompt_ids[end:],
                    completion=keep_experts(node.completion, parent_length=length),
                )
                self._relations.move(node.node_id, parent.node_id)
        if self._facts[parent.node_id].is_whole:
            self._loose.append(parent.node_id)

    def _calls(self) -> list[Call]:
        """Return all calls for rules to look at."""
        branch = [1] * len(self._nodes)
        for node in reversed(_parents_first(self._nodes)):
            before = node.link if node.edge in _CONTINUE_LINK else node.parent
            if before is not None:
                branch[before] += branch[node.node_id]
        return [
            Call(
                node_id=node.node_id,
                is_root=node.parent is None,
                edge=node.edge,
                is_guess=node.reason == TOOL_CALL_OPEN,
                hints=facts.hints,
                messages=facts.messages[:-1],
                has_tools=bool(facts.tools),
                num_calls=branch[node.node_id],
            )
            for node, facts in zip(self._nodes, self._facts, strict=True)
        ]


def _retry(node_id: int) -> Told:
    return Told(edge=Edge.RETRY, reason="same_prompt", link=node_id)


def _parents_first(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in their order, each behind its parent."""
    ordered: list[Node] = []
    placed: set[int] = set()
    for node in nodes:
        path: list[Node] = []
        current: Node | None = node
        while current is not None and current.node_id not in placed:
            path.append(current)
            current = None if current.parent is None else nodes[current.parent]
        placed |= {one.node_id for one in path}
        ordered += reversed(path)
    return ordered


def _without_links_to(nodes: Sequence[Node], auxiliary_ids: set[int]) -> list[Node]:
    """Return nodes of which none goes on from a call that is nothing of the task."""
    return [
        replace(node, edge=Edge.ROOT, reason="own_conversation", link=None)
        if node.edge in (Edge.REWRITE, Edge.TOOLS_CHANGED, Edge.UNEXTENDABLE) and node.link in auxiliary_ids
        else node
        for node in nodes
    ]


def _count_to_last_answer(messages: Sequence[dict[str, object]]) -> int:
    """Return how many leading messages end with the last assistant message; 0 when there is none."""
    return max((index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
