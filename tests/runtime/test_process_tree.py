# pyright: basic
import os
import subprocess
import sys

from etude.runtime.process_tree import descendants, is_running

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "a) (b"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


def test_processes_below_are_found_with_their_commands_and_known_to_be_gone():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    grandchild = int(parent.stdout.readline())
    found = {process.pid: process for process in descendants(os.getpid())}
    assert found[parent.pid].parent == os.getpid()
    assert found[grandchild].parent == parent.pid
    assert found[grandchild].command[-1] == "a) (b"
    assert all(map(is_running, (found[parent.pid], found[grandchild])))
    parent.communicate()
    assert not is_running(found[parent.pid])
    assert not is_running(found[grandchild])
    assert parent.pid not in {process.pid for process in descendants(os.getpid())}
