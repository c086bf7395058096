# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false
"""Who waits for a lock of a file learns who has it."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from etude.errors import StoreError
from etude.store.file_locks import holder_of, try_lock
from etude.store.local import LOCK_NAME, FileStore

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / LOCK_NAME)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


async def test_a_swap_that_waits_for_a_stopped_process_says_which_and_what_to_do(tmp_path, holder):
    store = FileStore(tmp_path, lock_s=0.2)
    with pytest.raises(StoreError, match=rf"'head' in {tmp_path}: .lock was held for 0 s by process {holder.pid}: see"):
        await store.compare_and_swap("head", b"1", expected=None)
    os.kill(holder.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, holder.pid, os.WUNTRACED)
    with pytest.raises(StoreError, match=rf"process {holder.pid}, which is stopped: .*kill -CONT {holder.pid}"):
        await store.compare_and_swap("head", b"1", expected=None)
    await store.put("other", b"")  # what needs no lock goes on
    os.kill(holder.pid, signal.SIGKILL)
    assert await FileStore(tmp_path, lock_s=30.0).compare_and_swap("head", b"1", expected=None)


def test_a_lock_is_free_once_its_file_is_closed(tmp_path):
    place = tmp_path / "lock"
    first, second = (os.open(place, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert try_lock(first, place)
    assert not try_lock(second, place)
    assert holder_of(second, place).startswith(f"process {os.getpid()}")
    os.close(first)
    assert try_lock(second, place)
    os.close(second)
