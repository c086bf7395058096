"""How long the chains of a run's rollouts are, in contexts, and what became of them.

python benchmarks/compaction.py RUN --context TOKENS [--json FILE]
"""

import argparse
import json
from pathlib import Path
from statistics import median

from etude.store.groups import decode_group
from etude.types import Edge, Trajectory


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the chains of a run's rollouts are.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--context", type=int, required=True, help="tokens that the model sees at once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    paths = sorted(options.run.glob("groups/*/*.parquet"))
    chains = [chain for path in paths for chain in decode_group(path.read_bytes()).trajectories]
    passed = [chain for chain in chains if chain.reward]
    figures = {
        "rollouts": len(chains),
        "rollouts with a compaction, share": share([conversations(chain) > 1 for chain in chains]),
        "new conversations recognised as compactions, share": share(
            [node.edge is Edge.COMPACTION for chain in chains for node in chain.nodes[1:] if node.parent is None]
        ),
        "rollouts that passed": len(passed),
        **{f"of those, {name}": value for name, value in lengths(passed, options.context).items()},
    }
    for name, value in figures.items():
        print(f"{name:<56}{value:>10.2f}" if isinstance(value, float) else f"{name:<56}{value:>10}")
    if options.json:
        options.json.write_text(json.dumps(figures))


def lengths(chains: list[Trajectory], context: int) -> dict[str, float]:
    """Return medians over chains, and the least of what counts."""
    if not chains:
        return {}
    added = [sum(len(node.prompt_ids) for node in chain.nodes) / context for chain in chains]
    new = [sum(len(node.prompt_ids) for node in chain.nodes if node.parent is not None) / context for chain in chains]
    return {
        "conversations, median": float(median(map(conversations, chains))),
        "prompt tokens added, contexts, median": median(added),
        "prompt tokens added, contexts, least": min(added),
        "prompt tokens added within conversations, contexts, least": min(new),
        "drawn tokens, median": float(median(drawn(chain) for chain in chains)),
    }


def conversations(chain: Trajectory) -> int:
    return sum(node.parent is None for node in chain.nodes)


def drawn(chain: Trajectory) -> int:
    return sum(len(node.completion.token_ids) for node in chain.nodes)


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


if __name__ == "__main__":
    main()
