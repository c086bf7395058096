"""Text that a harness renews in each call: left in, no call would extend the tokens of the one before."""

import re
from collections.abc import Sequence
from re import Pattern

import msgspec

from etude.gateway.conversation import Conversation

CLAUDE_CODE_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of the system prompt with a nonce."""

DECLARED: tuple[Pattern[str], ...] = (CLAUDE_CODE_BILLING,)


def strip_volatile(conversation: Conversation, rules: Sequence[Pattern[str]]) -> tuple[Conversation, list[str]]:
    """Return a conversation without what the rules find in its system messages, and what was removed, in order."""
    removed: list[str] = []
    messages = tuple(_strip(message, rules, removed) for message in conversation.messages)
    return (msgspec.structs.replace(conversation, messages=messages), removed) if removed else (conversation, removed)


def _strip(message: dict[str, object], rules: Sequence[Pattern[str]], removed: list[str]) -> dict[str, object]:
    text = message.get("content")
    if message["role"] != "system" or not isinstance(text, str):
        return message
    for rule in rules:
        removed += [found[0] for found in rule.finditer(text)]
        text = rule.sub("", text)
    return message | {"content": text}
