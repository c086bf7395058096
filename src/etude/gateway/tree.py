"""The tree of one session: where a request hangs, and the tokens that each call added."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from etude.gateway.conversation import Conversation, extend_history, history_keys, message_key, tools_key
from etude.types import Completion, Edge, Experts, Node


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request hangs in the tree, before anything is drawn for it."""

    parent: int | None
    edge: Edge
    conversation: Conversation
    covered: int = 0
    """Leading messages whose tokens the parent's sequence holds already."""
    prompt_ids: tuple[int, ...] | None = None
    """What the call adds to its parent, when an earlier call added the same."""
    history: bytes
    """Digest of the messages."""
    tools: bytes
    """Digest of the tool definitions."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the tree knows of a node beyond its tokens."""

    length: int
    """Tokens from the root to the last drawn one."""
    messages: tuple[dict[str, object], ...]
    """Messages that the call added, its answer last."""
    num_messages: int
    tools: tuple[dict[str, object], ...]


class SessionTree:
    """Calls of one session by the conversation they continue.

    A parent is the deepest call whose messages, answer included, are a prefix of the request. The messages only find
    it: the tokens of a branch are always those that the sampler saw and drew.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._facts: list[_Facts] = []
        self._asked: dict[tuple[bytes, bytes], int] = {}
        self._answered: dict[tuple[bytes, bytes], int] = {}
        self._histories: set[bytes] = set()
        self._answers: dict[bytes, dict[str, object]] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every call that was answered, parents before children."""
        return tuple(self._nodes)

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
        return [token_id for piece in reversed(pieces) for token_id in piece]

    def place(self, conversation: Conversation) -> Place:
        """Find where a request hangs.

        The same prompt again is a RETRY beside the earlier call. A request that adds only user, tool or system messages
        to a known conversation is its CONTINUATION. Anything else starts a branch of its own: ROOT for the first call,
        TOOLS_CHANGED when only the tool definitions differ from a known conversation, else REWRITE.
        """
        tools = tools_key(conversation.tools)
        histories = history_keys([message_key(message) for message in conversation.messages])
        # Every known history ends with an answer, so only the messages up to the last answer can be one.
        covered = _count_to_last_answer(conversation.messages)
        asked, answered = histories[-1], histories[covered]
        place = Place(parent=None, edge=Edge.ROOT, conversation=conversation, history=asked, tools=tools)
        if (asked, tools) in self._asked:
            twin = self._nodes[self._asked[asked, tools]]
            return replace(place, parent=twin.parent, edge=Edge.RETRY, prompt_ids=twin.prompt_ids)
        if (answered, tools) in self._answered:
            parent = self._answered[answered, tools]
            return replace(place, parent=parent, edge=Edge.CONTINUATION, covered=covered)
        if not self._nodes:
            return place
        known = asked in self._histories or answered in self._histories
        return replace(place, edge=Edge.TOOLS_CHANGED if known else Edge.REWRITE)

    def restore(self, messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the messages with every answer that this session gave in its own spelling."""
        return [
            self._answers.get(message_key(message), message) if message["role"] == "assistant" else message
            for message in messages
        ]

    def attach(
        self,
        place: Place,
        answer: dict[str, object],
        *,
        prompt_ids: tuple[int, ...],
        completion: Completion,
        started_s: float = 0.0,
        seconds: float = 0.0,
    ) -> Node:
        """Add an answered call.

        `prompt_ids` are the tokens between the parent's last drawn one and the call's first one; `answer` is the
        assistant message that the harness gets. Calls that ran at the same time are told apart here: the second of two
        equal ones becomes a RETRY.
        """
        parent_length = self.length(place.parent)
        node = Node(
            node_id=len(self._nodes),
            parent=place.parent,
            edge=self._settle(place, prompt_ids),
            prompt_ids=prompt_ids,
            completion=keep_experts(completion, parent_length=parent_length),
            started_s=started_s,
            seconds=seconds,
        )
        conversation = place.conversation
        known = 0 if place.parent is None else self._facts[place.parent].num_messages
        facts = _Facts(
            length=parent_length + len(prompt_ids) + len(completion.token_ids),
            messages=(*conversation.messages[known:], answer),
            num_messages=len(conversation.messages) + 1,
            tools=conversation.tools,
        )
        self._nodes.append(node)
        self._facts.append(facts)
        self._index(node.node_id, place, answer)
        return node

    def longest_conversation(self) -> Conversation:
        """Return the conversation with the most messages, for people; the newest of equals."""
        if not self._nodes:
            return Conversation(messages=())
        deepest = max(self._nodes, key=lambda node: (self._facts[node.node_id].num_messages, node.node_id)).node_id
        pieces: list[tuple[dict[str, object], ...]] = []
        node_id: int | None = deepest
        while node_id is not None:
            pieces.append(self._facts[node_id].messages)
            node_id = self._nodes[node_id].parent
        messages = tuple(message for piece in reversed(pieces) for message in piece)
        return Conversation(messages=messages, tools=self._facts[deepest].tools)

    def _settle(self, place: Place, prompt_ids: tuple[int, ...]) -> Edge:
        """Return the edge again, now that calls which ran at the same time may have been attached."""
        twin = self._asked.get((place.history, place.tools))
        if twin is not None and self._nodes[twin].parent == place.parent and self._nodes[twin].prompt_ids == prompt_ids:
            return Edge.RETRY
        return Edge.REWRITE if place.edge is Edge.ROOT and self._nodes else place.edge

    def _index(self, node_id: int, place: Place, answer: dict[str, object]) -> None:
        key = message_key(answer)
        history = extend_history(place.history, key)
        self._asked[place.history, place.tools] = node_id
        self._answered[history, place.tools] = node_id
        self._histories |= {place.history, history}
        self._answers[key] = answer


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


def _count_to_last_answer(messages: Sequence[dict[str, object]]) -> int:
    """Return how many leading messages end with the last assistant message; 0 when there is none."""
    return max((index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
