# pyright: basic
import os
import subprocess
import sys

from etude.runtime.process_tree import descendants

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "a) (b"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


def test_processes_below_are_found_with_their_commands_as_long_as_they_run():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    grandchild = int(parent.stdout.readline())
    found = {process.pid: process for process in descendants(os.getpid())}
    assert found[parent.pid].parent == os.getpid()
    assert found[grandchild].parent == parent.pid
    assert found[grandchild].command[-1] == "a) (b"
    parent.communicate()
    assert not {parent.pid, grandchild} & {process.pid for process in descendants(os.getpid())}
