# pyright: basic
import json
import subprocess
import sys
from pathlib import Path

FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz_gateway.py"


def test_mutated_requests_crash_nothing_and_show_no_session_to_another(tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, str(FUZZER), "--requests", "600", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    counted = json.loads(table.read_bytes())
    assert (done.returncode, counted["bad"]) == (0, 0), done.stdout + done.stderr
    assert counted["status 200"] > 100, "most of what is well-formed is answered"
    assert counted["status 400"] > 100, "most of what is not is refused"
