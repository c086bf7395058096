"""The conversations of a finished session that people are shown."""

from collections.abc import Mapping, Sequence

import msgspec

from etude.gateway.quotes import text_of
from etude.gateway.tree import SessionTree
from etude.interfaces import ShownConversation
from etude.types import Edge, Node

MOST_CONVERSATIONS = 64
MOST_CHARS = 4 << 20
"""Of all conversations but the first, together."""
_OF_THEIR_OWN = (Edge.ROOT, Edge.COMPACTION, Edge.SUBAGENT_CALL, Edge.AUXILIARY)
"""Roots of conversations that say something new; a changed history repeats another one."""


def shown_conversations(tree: SessionTree, nodes: Sequence[Node]) -> list[ShownConversation]:
    """Return the main agent's longest conversation, then those of the other roots, as many as are worth keeping."""
    edges = {node.node_id: node.edge for node in nodes}
    found = tree.conversations()
    if not found:
        return []
    main = min(found, key=lambda shown: (edges[tree.agent(shown.root)] is Edge.AUXILIARY, tree.agent(shown.root)))
    of_main = [shown for shown in found if tree.agent(shown.root) == tree.agent(main.root)]
    first = max(of_main, key=lambda shown: (len(shown.conversation.messages), shown.root))
    kept, chars = [first], 0
    for shown in found:
        if shown is first or edges[shown.root] not in _OF_THEIR_OWN or len(kept) == MOST_CONVERSATIONS:
            continue
        chars += sum(_num_chars(message) for message in shown.conversation.messages)
        if chars <= MOST_CHARS:
            kept.append(shown)
    return [
        ShownConversation(messages=shown.conversation.messages, tools=shown.conversation.tools, drawn_by=shown.drawn_by)
        for shown in kept
    ]


def _num_chars(message: Mapping[str, object]) -> int:
    return len(text_of(message)) + len(msgspec.json.encode(message.get("tool_calls")))
