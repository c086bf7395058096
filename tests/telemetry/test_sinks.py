# pyright: basic
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import IntegrityError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock, SystemClock, wall_time
from etude.telemetry.rows import decode_rows, encode_row, read_rows
from etude.telemetry.sink import JsonlSink, StoreSink

VALUES = st.floats() | st.integers(-(2**53), 2**53) | st.booleans() | st.none() | st.just("text\n\x1b")


def row(step: int, **values) -> dict[str, object]:
    return {"step": step, "version": step, **values}


@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=5), st.integers(0, 10**6))
def test_a_row_is_read_as_it_was_written(values, step):
    written = {**values, "step": step, "version": step}
    (read,) = decode_rows(encode_row(written, time=5.0), place="here")
    assert repr(sorted(read.items())) == repr(sorted({"time": 5.0, **written}.items()))


@pytest.mark.parametrize("wrong", [{}, {"step": 1}, {"step": 1, "version": "2"}, {"step": 1.0, "version": 2}])
def test_a_row_without_step_and_version_is_refused(wrong):
    with pytest.raises(ValueError, match="step and version"):
        encode_row(wrong, time=0.0)


def test_a_huge_row_is_refused():
    with pytest.raises(ValueError, match="more than"):
        encode_row(row(1, text="x" * (1 << 20)), time=0.0)


def test_a_torn_last_line_is_cut_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "metrics" / "trainer.jsonl"
    sink = JsonlSink(path, wall=lambda: 7.0)
    sink.record(row(1, loss=0.5))
    sink.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert len(decode_rows(path.read_bytes(), place="here")) == 1
        sink = JsonlSink(path, wall=lambda: 8.0)
        sink.record(row(2))
        sink.close()
        assert [read["step"] for read in decode_rows(path.read_bytes(), place="here")] == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    with pytest.raises(IntegrityError, match="here, line 2"):
        decode_rows(b'{"step":1}\nnonsense\n{"step":2}\n', place="here")


def test_two_writers_never_share_a_file(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(StoreError, match="another process"):
        JsonlSink(tmp_path / "m.jsonl")
    sink.close()
    JsonlSink(tmp_path / "m.jsonl").close()


BOUNDED = """
import pathlib, resource, sys
from etude.telemetry.sink import JsonlSink
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sink = JsonlSink(pathlib.Path(sys.argv[1]))
for step in range(4):
    sink.record({"step": step, "version": step, "text": "x" * 1000})
"""


def test_a_disk_that_takes_no_more_is_reported_and_leaves_whole_rows(tmp_path):
    path = tmp_path / "m.jsonl"
    ended = subprocess.run([sys.executable, "-c", BOUNDED, str(path)], capture_output=True, text=True, check=False)
    assert f"StoreError: cannot write metrics to {path}" in ended.stderr
    assert path.read_bytes().endswith(b"\n")
    assert [read["step"] for read in decode_rows(path.read_bytes(), place="here")] == [0, 1]


ENDLESS = """
import sys, pathlib
from etude.telemetry.sink import JsonlSink
sink = JsonlSink(pathlib.Path(sys.argv[1]))
step = 0
while True:
    sink.record({"step": step, "version": step, "text": "x" * 1000})
    print(step, flush=True)
    step += 1
"""


def test_rows_that_were_recorded_survive_kill_9(tmp_path):
    path = tmp_path / "m.jsonl"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(200)]
        os.kill(writer.pid, signal.SIGKILL)
        seen += [int(line) for line in writer.stdout if line.endswith("\n")]
    steps = [read["step"] for read in decode_rows(path.read_bytes(), place="here")]
    assert steps[: len(seen)] == seen


async def test_rows_in_a_store_survive_failures_and_new_writers():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults())
    written = 0
    for _ in range(3):
        sink = StoreSink(store, "metrics/trainer", wall=lambda: 1.0)
        for _ in range(4):
            sink.record(row(written, text="x" * 100_000))
            written += 1
            store.faults = Faults(fail=1.0)
            with pytest.raises(StoreError, match="injected"):
                await sink.flush()
            store.faults = Faults()
            await sink.flush()
            await sink.flush()
            assert [read["step"] for read in await read_rows(store, "metrics")] == list(range(written))
    keys = await store.list("metrics/trainer")
    assert keys == [f"metrics/trainer/{n:06d}.jsonl" for n in range(6)]


async def test_a_listing_that_lags_does_not_make_a_writer_overwrite():
    store = FaultyStore(open_store("memory://"), clock=ManualClock(), faults=Faults(list_lag=1))
    for step in range(2):
        sink = StoreSink(store, "metrics/trainer")
        sink.record(row(step))
        await sink.flush()
    store.faults = Faults()
    assert [read["step"] for read in await read_rows(store, "metrics")] == [0, 1]


async def test_a_local_file_of_rows_is_read_through_the_store(tmp_path):
    sink = JsonlSink(tmp_path / "metrics" / "trainer" / "000000.jsonl")
    sink.record(row(1, loss=math.nan))
    (read,) = await read_rows(open_store(str(tmp_path)), "metrics")
    sink.close()
    assert read["step"] == 1
    assert isinstance(read["loss"], float)
    assert math.isnan(read["loss"])
    assert abs(float(str(read["time"])) - wall_time()) < 60


async def test_the_manual_clock_moves_only_when_told():
    clock = ManualClock(10.0)
    await clock.sleep(5.0)
    clock.advance(1.0)
    assert clock.now() == 16.0


async def test_the_system_clock_does_not_go_back():
    clock = SystemClock()
    before = clock.now()
    await clock.sleep(0.0)
    assert clock.now() >= before
