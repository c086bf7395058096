# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import asyncio

import pytest

from etude.store.limited import LimitedStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock


async def test_bytes_move_at_the_average_that_was_allowed():
    clock = ManualClock()
    inner = open_store("memory://")
    store = LimitedStore(inner, clock=clock, upload_bytes_s=100.0, download_bytes_s=1000.0)
    for n in range(5):
        await store.put(f"k{n}", bytes(200))
    assert clock.now() == pytest.approx(8.0), "the last object is still being paid for"
    await store.put("k5", b"")
    assert clock.now() == pytest.approx(10.0)
    for n in range(5):
        await store.get(f"k{n}")
        await store.get_range(f"k{n}", 0, 200)
    assert clock.now() == pytest.approx(10.0 + 1.8)


async def test_looks_at_the_head_and_swaps_do_not_wait_for_bytes():
    clock = ManualClock()
    store = LimitedStore(open_store("memory://"), clock=clock, upload_bytes_s=1.0, download_bytes_s=1.0)
    await store.put("big", bytes(1000))
    assert await store.compare_and_swap("head", b"1", expected=None)
    _, tag = await store.get_if_changed("head", tag=None)
    assert await store.get_if_changed("head", tag=tag) is None
    assert await store.list("") == ["big", "head"]
    assert clock.now() == 0.0


def test_no_more_calls_are_under_way_than_allowed_in_one_event_loop_after_the_other():
    under_way, most = 0, 0

    class Counting:
        async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            for _ in range(5):
                await asyncio.sleep(0)
            under_way -= 1
            return key.encode()

    store = LimitedStore(Counting(), clock=ManualClock(), calls=3)

    async def read() -> list[bytes]:
        return await asyncio.gather(*(store.get(str(n)) for n in range(20)))

    for _ in range(2):
        assert asyncio.run(read()) == [str(n).encode() for n in range(20)]
    assert most == 3
