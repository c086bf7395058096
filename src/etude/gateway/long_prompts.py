"""Prompts that take too long to make for the loop that all sessions share: a thread makes them, one after the other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

LONG = 1 << 15
"""Characters that take some ten milliseconds to become tokens."""

_SCRIBE = ThreadPoolExecutor(1, thread_name_prefix="long prompts")


class LongPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are still to be made."""

    parent: int | None
    """The call that they follow."""
    work: Callable[[], list[int] | None]


class MadePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; good for as long as the tree has the call in the same place."""

    parent: int | None
    token_ids: list[int] | None
    """None when the renderer cannot go on from there."""


def is_long(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> bool:
    """Return whether these take long to become tokens."""
    size = sum(len(str(message.get("content") or "")) for message in messages)
    return size > LONG or (bool(tools) and size + len(msgspec.json.encode(tools)) > LONG)


async def make(long: LongPrompt) -> MadePrompt:
    """Make the tokens while other sessions go on."""
    token_ids = await asyncio.get_running_loop().run_in_executor(_SCRIBE, long.work)
    return MadePrompt(parent=long.parent, token_ids=token_ids)
