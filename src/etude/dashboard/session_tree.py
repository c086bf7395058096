"""The tree of a session as text: conversations from the top, sub-agents below the call that started them."""

import io
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from etude.rollout.atif import Call
from etude.telemetry.lines import printable

_WIDTH = 500


def session_tree_text(calls: Sequence[Call]) -> str:
    """Return one line per call: what it is and why, tokens read and drawn, versions, tools that its answer calls.

    What goes on with a conversation stands below its first call, one level deeper; so does what branches off from a
    call, and what it started. Tokens `in` are those that were added to the ones before.
    """
    tree = Tree(Text(f"{len(calls)} calls" if len(calls) != 1 else "1 call"))
    _Branches(calls).add_to(tree)
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, emoji=False, highlight=False).print(tree)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


class _Branches:
    def __init__(self, calls: Sequence[Call]) -> None:
        known = {call.node for call in calls}
        self._children: defaultdict[int | None, list[Call]] = defaultdict(list)
        self._started: defaultdict[int, list[Call]] = defaultdict(list)
        self._sizes: dict[int, int] = {}
        for call in calls:
            starts = call.parent is None and call.edge == "subagent_call" and call.link in known
            if starts and call.link is not None and call.link < call.node:
                self._started[call.link].append(call)
            else:
                self._children[call.parent].append(call)
        for call in reversed(calls):
            self._sizes[call.node] = 1 + sum(self._sizes[child.node] for child in self._children[call.node])

    def add_to(self, tree: Tree) -> None:
        """Add all calls."""
        pending = [(tree, call, True) for call in reversed(self._children[None])]
        while pending:
            branch, call, begins = pending.pop()
            label = branch.add(Text(_line(call), no_wrap=True, overflow="ellipsis"))
            children = self._children[call.node]
            # The newest of equals: earlier answers to the same prompt led nowhere.
            goes_on = max(children, key=lambda child: (self._sizes[child.node], child.node), default=None)
            beside = [child for child in children if child is not goes_on] + self._started[call.node]
            if goes_on is not None:
                pending.append((label if begins else branch, goes_on, False))
            pending += [(label, child, True) for child in reversed(beside)]


def _line(call: Call) -> str:
    link = "" if call.link is None else f" -> {call.link}"
    why = f" ({call.reason})" if call.reason else ""
    parts = [f"{call.node} {call.edge}{link}{why}", f"{call.prompt_tokens} in, {call.drawn_tokens} out"]
    if call.versions is not None:
        oldest, newest = call.versions
        parts.append(f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}")
    if call.finish_reason not in ("", "stop"):
        parts.append(call.finish_reason)
    return printable("  ".join([*parts, ", ".join(call.tools)]).rstrip())
