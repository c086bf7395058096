# pyright: basic
"""Lines of the table of harnesses: what became of the tokens of any number of sessions."""

from collections import Counter
from collections.abc import Sequence

import msgspec
from harness_kit import TOKENIZER, Session

from etude.algorithm.ingest import IngestRules
from etude.algorithm.samples import SampleRules, samples_of
from etude.learning_config import AlgorithmSection
from etude.types import Group


def row(name: str, sessions: Sequence[Session]) -> dict[str, object]:
    """Count what sessions of a harness left: a line of the table."""
    nodes = [node for session in sessions for node in session.trajectory.nodes]
    trajectories = tuple(
        msgspec.structs.replace(session.trajectory, rollout_id=f"r{index}", index=index)
        for index, session in enumerate(sessions)
    )
    rules = SampleRules(
        algorithm=AlgorithmSection(),
        ingest=IngestRules(vocab_size=TOKENIZER.get_vocab_size() + 1, newest_version=0),
        group_size=len(sessions),
        temperature=1.0,
        needs_support=True,
    )
    group = Group(group_id="g", task_id="kit", ticket=0, admitted_version=0, trajectories=trajectories)
    account = samples_of(group, rules).account
    accounted = account.trained + sum(account.masked.values()) + sum(account.dropped.values())
    drawn = sum(len(node.completion.token_ids) for node in nodes)
    assert drawn == account.drawn == accounted, f"{name}: {drawn} tokens were drawn and {accounted} are accounted for"
    breaks = sum(session.prefix_breaks for session in sessions)
    return {
        "harness": name,
        "sessions": len(sessions),
        "calls": len(nodes),
        "edges": dict(Counter(node.edge.value for node in nodes)),
        "prefix_break_rate": breaks / max(1, len(nodes)),
        "drawn": account.drawn,
        "trained": account.trained,
        "masked": account.masked,
        "dropped": account.dropped,
    }
