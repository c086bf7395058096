# pyright: basic
import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.errors import ConfigError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.local import FileStore
from etude.store.opening import open_store, probe_conditional_writes
from etude.telemetry.clock import ManualClock, SystemClock


@pytest.mark.parametrize("url", ["", "memory://"])
@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".lock", "a/.hidden", "a\\b", "a\nb", "é", "a%2fb", "a#1"],
)
async def test_a_key_that_could_leave_the_run_directory_is_refused(url, key, tmp_path):
    store = open_store(url or str(tmp_path))
    for call in (store.get(key), store.put(key, b""), store.compare_and_swap(key, b"", expected=None)):
        with pytest.raises(StoreError, match="not allowed"):
            await call


async def test_a_symbolic_link_in_a_shared_directory_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    store = FileStore(tmp_path / "run")
    (store.root / "a").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        await store.get("a/secret")
    with pytest.raises(StoreError, match="symbolic link"):
        await store.put("a/new", b"")
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def test_readers_see_old_bytes_or_new_ones_while_a_file_is_replaced(tmp_path):
    store = FileStore(tmp_path)
    versions = [bytes([n]) * 300_000 for n in range(2)]
    await store.put("k", versions[0])
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append((tmp_path / "k").read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(40):
        await store.put("k", versions[n % 2])
    done.set()
    reader.join()
    assert seen
    assert set(seen) <= set(versions)


COUNT = """
import asyncio, sys
from etude.store.opening import open_store
async def main():
    store = open_store(sys.argv[1])
    for _ in range(25):
        while True:
            current = await store.get("counter")
            if await store.compare_and_swap("counter", str(int(current) + 1).encode(), expected=current):
                break
asyncio.run(main())
"""


def test_no_swap_is_lost_between_processes(tmp_path):
    store = open_store(str(tmp_path))
    asyncio.run(store.put("counter", b"0"))
    workers = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)]) for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0, 0]
    assert asyncio.run(store.get("counter")) == b"100"
    assert asyncio.run(store.list("")) == ["counter"]


FILL = """
import asyncio, pathlib, subprocess, sys
from etude.errors import StoreError
from etude.store.opening import open_store
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
async def main():
    store = open_store(sys.argv[1])
    await store.put("k", b"old")
    try:
        await store.put("k", bytes(1 << 20))
    except StoreError as error:
        print(error)
    assert await store.get("k") == b"old"
asyncio.run(main())
"""


def test_a_full_disk_is_called_by_its_name_and_leaves_the_old_object(tmp_path):
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FILL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare" in ended.stderr or "mount" in ended.stderr:
        pytest.skip(f"this kernel gives no private mounts: {ended.stderr.strip()[-200:]}")
    assert ended.returncode == 0, ended.stderr
    assert "disk is full" in ended.stdout
    assert "'k'" in ended.stdout


def test_a_run_directory_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use"):
        open_store(str(tmp_path / "file" / "run"))


@pytest.mark.parametrize("url", ["ftp://host/x", "file://host/x", "http://bucket"])
def test_an_unknown_scheme_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match="s3://"):
        open_store(url)


async def test_a_faulty_store_repeats_its_faults_for_the_same_seed():
    async def outcomes(seed: int) -> list[object]:
        faults = Faults(fail=0.2, lost_reply=0.2, torn_write=0.2, torn_read=0.2, lost_swap=0.3, max_delay_s=5.0)
        clock = ManualClock()
        store = FaultyStore(open_store("memory://"), clock=clock, faults=faults, seed=seed)
        seen: list[object] = []
        for n in range(60):
            calls = (store.put(f"k{n % 5}", b"0123456789"), store.get(f"k{n % 5}"))
            results = [await asyncio.gather(call, return_exceptions=True) for call in calls]
            seen += [str(result) for result in results]
        return [*seen, clock.now()]

    assert await outcomes(1) == await outcomes(1)
    assert await outcomes(1) != await outcomes(2)


async def test_a_faulty_store_lists_its_newest_keys_late():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults(list_lag=1))
    await store.put("a", b"")
    await store.put("b", b"")
    assert await store.list("") == ["a"]
    store.faults = Faults()
    assert await store.list("") == ["a", "b"]


async def test_a_key_is_listed_some_time_after_its_first_write():
    clock = ManualClock()
    store = FaultyStore(open_store("memory://"), clock=clock, faults=Faults(list_delay_s=2.0))
    await store.put("a", b"")
    clock.advance(1.5)
    await store.put("a", b"again")
    await store.put("b", b"")
    assert await store.list("") == []
    clock.advance(1.0)
    assert await store.list("") == ["a"]
    assert await store.get("b") == b""
    clock.advance(1.0)
    assert await store.list("") == ["a", "b"]


async def test_calls_made_together_end_in_another_order():
    ended: list[int] = []
    store = FaultyStore(open_store("memory://"), clock=SystemClock(), faults=Faults(max_delay_s=0.05), seed=3)

    async def call(n: int) -> None:
        await store.put(f"k{n}", b"")
        ended.append(n)

    await asyncio.gather(*(call(n) for n in range(12)))
    assert sorted(ended) == list(range(12))
    assert ended != list(range(12))


async def test_the_probe_refuses_a_store_that_ignores_conditions(tmp_path):
    class Careless(FileStore):
        async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
            await super().put(key, data)

    with pytest.raises(StoreError, match="ignores conditions"):
        await probe_conditional_writes(Careless(Path(tmp_path)))
