"""Asynchronous against synchronous training: wall-clock to the same number of trained groups.

    python benchmarks/asynchrony.py [--steps N] [--repeats N] [--policy DIRECTORY] [--json FILE]

The quickstart's recipe is trained from one and the same policy with `max_staleness` 0 and 2, in turn, `repeats` times
each, with real sandboxes, tools and grading. Time is counted from the first optimizer step to the last, without the
start of processes. Without `--policy` the policy is made first by the recipe's own pretrain and sft stages.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training.")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--policy", type=Path, help="a run's policy/sft directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etude-") as scratch:
        policy = options.policy or made_policy(Path(scratch))
        seconds: dict[int, list[float]] = {0: [], 2: []}
        groups = 0
        for repeat in range(options.repeats):
            for staleness, measured in seconds.items():
                run = Path(scratch) / f"{staleness}-{repeat}"
                took, groups = trained(run, policy, staleness=staleness, steps=options.steps)
                measured.append(took)
    best = {staleness: min(measured) for staleness, measured in seconds.items()}
    print(f"{'max_staleness':>14} {'groups':>7} {'seconds (best)':>15} {'median':>8} {'speed':>6}")
    for staleness, measured in seconds.items():
        middle, ratio = statistics.median(measured), best[0] / best[staleness]
        print(f"{staleness:>14} {groups:>7} {best[staleness]:>15.1f} {middle:>8.1f} {ratio:>5.2f}x")
    if options.json:
        options.json.write_text(json.dumps({"groups": groups, "seconds": seconds, "ratio": best[0] / best[2]}))


def etude(command: str, run: Path, *overrides: str) -> None:
    settings = [part for override in (f"run.url={run}", *overrides) for part in ("--set", override)]
    program = [sys.executable, "-m", "etude.cli.main", command, str(RECIPE), *settings]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)


def made_policy(scratch: Path) -> Path:
    etude("pretrain", scratch / "policy")
    etude("sft", scratch / "policy")
    return scratch / "policy" / "policy" / "sft"


def trained(run: Path, policy: Path, *, staleness: int, steps: int) -> tuple[float, int]:
    """Return seconds from the first step to the last, and the groups trained in them."""
    etude(
        "train",
        run,
        f"policy.path={policy}",
        f"rollout.max_staleness={staleness}",
        f"trainer.steps={steps}",
        "checkpoint.every=1000",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_made = [row for row in rows if row["stage"] == "train"]
    groups = sum(int(row["trainer/groups_count"]) for row in steps_made[1:])
    return steps_made[-1]["time"] - steps_made[0]["time"], groups


if __name__ == "__main__":
    main()
