# pyright: basic
import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "disturbed_gateway.py"


def test_cut_repeated_and_doubled_calls_leave_the_tree_that_undisturbed_ones_leave(tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, str(PROGRAM), "--sessions", "8", "--share", "0.5", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    counted = json.loads(table.read_bytes())
    assert (done.returncode, counted["bad"]) == (0, 0), done.stdout + done.stderr
    assert min(counted["cut"], counted["twice"], counted["lost"]) > 3
