"""The garbage collector of a process that answers calls."""

import subprocess
import sys

PROGRAM = """
import gc
from etude.gateway.collector import collect_rarely

passes = []
collect_rarely()
gc.callbacks.append(lambda phase, _: passes.append(phase))
requests = [[{"role": "user", "content": str(number)} for number in range(100)] for _ in range(200)]
assert not passes, passes
del requests
ring = []
ring.append(ring)
held = [[number] for number in range(60_000)]
assert passes
"""


def test_objects_of_requests_in_flight_are_not_looked_through_and_cycles_are_found_in_the_end():
    # In a process of its own: the setting is the process's.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
