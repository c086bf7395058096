"""What a conversation that extends no other one shares with those before it."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import msgspec

from etude.gateway.conversation import extend_history, history_keys
from etude.gateway.edges import Told
from etude.types import Edge

_HISTORY_CHANGED = "history_changed"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as digests."""

    messages: Sequence[Mapping[str, object]]
    keys: tuple[bytes, ...]
    """Of the messages."""
    history: bytes
    """Of all of them, in their order."""
    tools: bytes
    """Of the tool definitions."""


class Kinship:
    """The conversations of a session by their beginnings, with and without their system prompts."""

    def __init__(self) -> None:
        self._histories: dict[bytes, int] = {}
        self._bare: dict[bytes, int] = {}
        self._prompts: dict[tuple[bytes, bytes], int] = {}
        self._ends: list[tuple[bytes, bytes]] = []

    def add(self, asked: Asked, *, after: int | None, keys: Sequence[bytes]) -> None:
        """Take in the next call.

        `keys` are the digests of what it adds to the conversation of the call `after`, of all its messages if that is
        None; the last one is that of its answer.
        """
        node_id = len(self._ends)
        if after is None:
            system = _num_system(asked.messages)
            prompt, bare = history_keys(keys[:system])[-1], b""
            keys = keys[system:]
        else:
            prompt, bare = self._ends[after]
        bare_asked = history_keys(keys[:-1], bare)[-1]
        bare_answered = extend_history(bare_asked, keys[-1])
        self._histories |= dict.fromkeys((asked.history, extend_history(asked.history, keys[-1])), node_id)
        self._bare |= dict.fromkeys((bare_asked, bare_answered), node_id)
        self._prompts[prompt, asked.tools] = node_id
        self._ends.append((prompt, bare_answered))

    def of(self, asked: Asked) -> Told:
        """Return the call that a conversation shares most with, and what became of the rest.

        TOOLS_CHANGED when all up to the last answer is known, under other tools; REWRITE when less is, or only the
        system prompt and the tools are. A conversation that shares nothing is a ROOT.
        """
        keys, messages = asked.keys, asked.messages
        system = _num_system(messages)
        histories, bare = history_keys(keys), history_keys(keys[system:])
        answers = [end for end, message in enumerate(messages, start=1) if message["role"] == "assistant"]
        for end in (len(keys), answers[-1] if answers else 0):
            if end > system and (link := self._histories.get(histories[end])) is not None:
                return Told(edge=Edge.TOOLS_CHANGED, reason="tools_differ", link=link)
        link = _deepest(self._histories, histories[system + 1 :])
        if link is not None:
            return Told(edge=Edge.REWRITE, reason=_HISTORY_CHANGED, link=link)
        link = _deepest(self._bare, bare[1:])
        if link is not None:
            return Told(edge=Edge.REWRITE, reason="system_prompt_changed", link=link)
        link = self._prompts.get((histories[system], asked.tools))
        if link is not None:
            return Told(edge=Edge.REWRITE, reason=_HISTORY_CHANGED, link=link)
        is_known = any(prompt == histories[system] for prompt, _ in self._prompts)
        return Told(edge=Edge.ROOT, reason="own_tools" if is_known else "own_system_prompt")


def _deepest(known: Mapping[bytes, int], histories: Sequence[bytes]) -> int | None:
    return next((known[history] for history in reversed(histories) if history in known), None)


def _num_system(messages: Sequence[Mapping[str, object]]) -> int:
    return sum(1 for _ in takewhile(lambda message: message["role"] == "system", messages))
