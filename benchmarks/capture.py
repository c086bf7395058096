"""What arrived with the drawn tokens of a run, per pool: versions, supports, experts, and swaps under running rollouts.

python benchmarks/capture.py RUN [--json FILE]
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from etude.store.groups import decode_group
from etude.types import Node


def main() -> None:
    parser = argparse.ArgumentParser(description="What arrived with the drawn tokens of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pools: dict[str, Counter[str]] = {}
    for path in sorted(options.run.glob("groups/*/*.parquet")):
        for trajectory in decode_group(path.read_bytes()).trajectories:
            for pool in {node.completion.pool for node in trajectory.nodes}:
                nodes = [node for node in trajectory.nodes if node.completion.pool == pool]
                pools.setdefault(pool, Counter()).update(counted(nodes))
    columns = ("rollouts", "across versions", "calls", "swapped inside", "tokens", "versions", "supports", "experts")
    print(f"{'pool':<10}" + "".join(f"{name:>16}" for name in columns))
    for pool, counts in sorted(pools.items()):
        shares = [f"{counts[name] / counts['tokens']:.2%}" for name in columns[5:]]
        print(f"{pool:<10}" + "".join(f"{value:>16}" for value in [*(counts[name] for name in columns[:5]), *shares]))
    if options.json:
        options.json.write_text(json.dumps(pools))


def counted(nodes: list[Node]) -> dict[str, int]:
    """Count one rollout's calls to one pool."""
    versions = {run.version for node in nodes for run in node.completion.versions}
    return {
        "rollouts": 1,
        "across versions": int(len(versions) > 1),
        "calls": len(nodes),
        "swapped inside": sum(len(node.completion.versions) > 1 for node in nodes),
        "tokens": sum(len(node.completion.token_ids) for node in nodes),
        "versions": sum(run.count for node in nodes for run in node.completion.versions),
        "supports": sum(supported(node) for node in nodes),
        "experts": sum(routed(node) for node in nodes),
    }


def supported(node: Node) -> int:
    support = node.completion.support
    return 0 if support is None else sum(count > 0 for count in memoryview(support.counts).cast("H"))


def routed(node: Node) -> int:
    """Count drawn tokens whose distribution came from a position with recorded experts."""
    experts = node.completion.experts
    drawn = len(node.completion.token_ids)
    return 0 if experts is None else min(drawn, experts.num_positions)


if __name__ == "__main__":
    main()
