# pyright: basic
import asyncio
import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_kit import RUN, Files, read

from etude.errors import ConfigError, IntegrityError, StoreError
from etude.store.faulty import Faults, FaultyStore
from etude.store.ledger import LedgerWriter, upload_spool
from etude.store.ledger_format import RUN_KEY, open_run_id, segment_key
from etude.store.ledger_reader import writers
from etude.store.local import FileStore
from etude.store.opening import open_store
from etude.telemetry.clock import SystemClock
from etude.telemetry.events import (
    Admitted,
    Closed,
    Drawn,
    GroupReady,
    Opened,
    RolloutEnded,
    Sealed,
    Trained,
    TrainedGroup,
)

TEXT = st.text(max_size=40)
COUNT = st.integers(0, 2**53)
FACT = st.one_of(
    st.builds(Admitted, ticket=COUNT, task=TEXT, version=COUNT),
    st.builds(RolloutEnded, rollout=TEXT, session=TEXT, outcome=TEXT, reward=st.none() | st.floats(-1e9, 1e9)),
    st.builds(GroupReady, ticket=COUNT, key=TEXT, digest=TEXT, rollouts=st.tuples(TEXT, TEXT), drawn=COUNT),
    st.builds(
        Drawn,
        request=TEXT,
        prompt=COUNT,
        prompt_digest=TEXT,
        tokens=COUNT,
        digest=TEXT,
        versions=st.tuples(st.tuples(COUNT, COUNT)),
        lineage=TEXT,
    ),
    st.builds(
        Trained,
        lineage=TEXT,
        version=COUNT,
        step=COUNT,
        groups=st.tuples(st.builds(TrainedGroup, group=TEXT, drawn=COUNT, trained=COUNT)),
    ),
    st.builds(Sealed, files=st.dictionaries(TEXT, st.tuples(COUNT, TEXT)), writers=st.just({})),
)


def fact(ticket):
    return Admitted(ticket=ticket, task=f"task {ticket}", version=3)


async def opened(root, store=None, **options):
    store = store or open_store(str(root))
    return await LedgerWriter.open(store, root, "controller", RUN, **options)


def untimed(facts):
    return [repr(one).partition(", t=")[0].partition("(t=")[0] for one in facts]


@settings(max_examples=25)
@given(steps=st.lists(st.lists(FACT, max_size=6), max_size=6), segment_bytes=st.sampled_from([300, 2000, 1 << 20]))
async def test_any_facts_read_back_as_they_were_recorded_whatever_is_flushed_when(
    tmp_path_factory, steps, segment_bytes
):
    root = tmp_path_factory.mktemp("run")
    async with await opened(root, segment_bytes=segment_bytes) as ledger:
        for facts in steps:
            for one in facts:
                ledger.record(one)
            await ledger.flush()
    facts, reader = await read(open_store(str(root)), ledger.writer)
    assert facts[0].service == "controller"
    assert [one.__class__ for one in facts[1:]] == [one.__class__ for one in itertools.chain(*steps, [Closed()])]
    assert untimed(facts[1:-1]) == untimed(itertools.chain(*steps))
    assert all(one.t > 1e9 for one in facts)
    assert (reader.events, reader.chain) == (ledger.events, ledger.chain)
    assert (reader.torn_bytes, reader.closed, reader.ended) == (0, True, True)


async def test_what_was_flushed_can_be_read_while_the_writer_goes_on(tmp_path):
    store = open_store(str(tmp_path))
    async with await opened(tmp_path, segment_bytes=2000) as ledger:
        for ticket in range(60):
            ledger.record(fact(ticket))
            await ledger.flush()
            facts, reader = await read(store, ledger.writer)
            assert [one.ticket for one in facts[1:]] == list(range(ticket + 1))
            assert (reader.torn_bytes, reader.closed) == (0, False)
    assert len(list(tmp_path.glob("ledger/*/*"))) > 1


async def test_facts_reach_the_disk_soon_when_nobody_asks(tmp_path):
    async with await opened(tmp_path) as ledger:
        ledger.record(fact(1))
        async with asyncio.timeout(10):
            while ledger.events < 2:  # noqa: ASYNC110 another thread makes it so
                await asyncio.sleep(0.01)
        facts, _ = await read(open_store(str(tmp_path)), ledger.writer)
        assert facts[1].ticket == 1


async def test_threads_record_at_once_and_none_of_their_facts_is_lost_or_moved(tmp_path):
    async with await opened(tmp_path, segment_bytes=20_000) as ledger:

        def record(thread):
            for number in range(300):
                ledger.record(Admitted(ticket=number, task=str(thread), version=0))
                if number % 50 == 0:
                    ledger.flush_now()

        threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    facts, _ = await read(open_store(str(tmp_path)), ledger.writer)
    for thread in range(4):
        assert [one.ticket for one in facts[1:-1] if one.task == str(thread)] == list(range(300))


async def test_long_facts_and_many_at_once_are_kept(tmp_path):
    tasks = ["x" * size for size in (10, 40_000, 10, 9_000_000, 5)] * 2
    async with await opened(tmp_path) as ledger:
        for task in tasks:
            ledger.record(Admitted(ticket=1, task=task, version=0))
    facts, _ = await read(open_store(str(tmp_path)), ledger.writer)
    assert [one.task for one in facts[1:-1]] == tasks


async def test_a_fact_beyond_the_limit_is_refused_and_the_ledger_goes_on(tmp_path):
    async with await opened(tmp_path) as ledger:
        with pytest.raises(ValueError, match="does not fit"):
            ledger.record(Admitted(ticket=1, task="x" * (33 << 20), version=0))
    facts, _ = await read(open_store(str(tmp_path)), ledger.writer)
    assert [type(one) for one in facts] == [Opened, Closed]


async def test_every_life_of_a_service_has_a_folder_of_its_own(tmp_path):
    lives = []
    for life in range(3):
        async with await opened(tmp_path) as ledger:
            ledger.record(fact(life))
        lives.append(ledger.writer)
        before = {path: path.read_bytes() for path in tmp_path.glob("ledger/*/*")}
    assert await writers(open_store(str(tmp_path))) == sorted(set(lives))
    assert len(before) == 3
    for life, writer in enumerate(lives):
        facts, _ = await read(open_store(str(tmp_path)), writer)
        assert facts[1].ticket == life


async def test_a_disk_that_refuses_is_told_at_the_next_record_and_nothing_taken_before_is_lost(tmp_path):
    ledger = await opened(tmp_path, segment_bytes=1)
    async with ledger:
        next_segment = tmp_path / segment_key(ledger.writer, 1)
        next_segment.mkdir()  # in the way, as a full disk is
        ledger.record(fact(1))
        with pytest.raises(StoreError, match=r"cannot write the ledger to .*000001"):
            await ledger.flush()
        with pytest.raises(StoreError, match="cannot write the ledger"):
            ledger.record(fact(2))
        next_segment.rmdir()
        await ledger.flush()
        ledger.record(fact(3))
    facts, reader = await read(open_store(str(tmp_path)), ledger.writer)
    assert [one.ticket for one in facts[1:-1]] == [1, 3]
    assert reader.closed


async def test_leaving_a_ledger_that_cannot_be_written_raises_why(tmp_path):
    ledger = await opened(tmp_path, segment_bytes=1)
    with pytest.raises(StoreError, match="cannot write the ledger"):
        async with ledger:
            (tmp_path / segment_key(ledger.writer, 1)).mkdir()


async def test_a_place_that_takes_no_files_is_told_at_once(tmp_path):
    (tmp_path / "ledger").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write the ledger"):
        await opened(tmp_path)


async def test_a_run_far_away_has_what_was_flushed_and_at_the_end_everything(tmp_path):
    store = open_store("memory://")
    async with await opened(tmp_path, store, segment_bytes=500) as ledger:
        ledger.record(fact(1))
        await ledger.flush()
        facts, _ = await read(store, ledger.writer)
        assert facts[1].ticket == 1
        for ticket in range(2, 30):
            ledger.record(fact(ticket))
        await ledger.flush_local()
    facts, reader = await read(store, ledger.writer)
    assert [one.ticket for one in facts[1:-1]] == list(range(1, 30))
    assert reader.closed


async def test_a_store_that_fails_is_told_by_flush_and_gets_the_facts_once_it_works(tmp_path):
    inner = FileStore(tmp_path / "far")
    store = FaultyStore(inner, clock=SystemClock(), faults=Faults(fail=1.0))
    async with await opened(tmp_path, store) as ledger:
        ledger.record(fact(1))
        with pytest.raises(StoreError):
            await ledger.flush()
        ledger.record(fact(2))
        await ledger.flush_local()
        store.faults = Faults()
        await ledger.flush()
        facts, _ = await read(inner, ledger.writer)
        assert [one.ticket for one in facts[1:]] == [1, 2]


async def test_what_a_killed_process_left_in_the_spool_is_put_into_the_run_by_the_next_one(tmp_path):
    inner = FileStore(tmp_path / "far")
    store = FaultyStore(inner, clock=SystemClock(), faults=Faults())
    ledger = await opened(tmp_path, store)
    await ledger.__aenter__()
    ledger.record(fact(1))
    await ledger.flush()
    ledger.record(fact(2))
    store.faults = Faults(fail=1.0)
    with pytest.raises(StoreError):
        await ledger.__aexit__()
    await upload_spool(inner, tmp_path, ["another"])
    facts, _ = await read(inner, ledger.writer)
    assert [one.ticket for one in facts[1:]] == [1]
    await upload_spool(inner, tmp_path)
    facts, reader = await read(inner, ledger.writer)
    assert [one.ticket for one in facts[1:-1]] == [1, 2]
    assert reader.closed


async def test_whoever_asks_first_gives_the_run_its_id(tmp_path):
    stores = [open_store(str(tmp_path)) for _ in range(8)]
    found = await asyncio.gather(*map(open_run_id, stores))
    assert len(set(found)) == 1
    assert await open_run_id(stores[0]) == found[0]
    other = await open_run_id(open_store(str(tmp_path / "other")))
    assert other != found[0]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"format":2,"run":"abc"}', ConfigError),
        (b'{"format":1}', IntegrityError),
        (b"not json", IntegrityError),
        (b'{"format":1,"run":"\xff"}', IntegrityError),
    ],
)
async def test_a_run_file_of_another_kind_is_refused_and_left_alone(tmp_path, data, error):
    store = open_store(str(tmp_path))
    await store.put(RUN_KEY, data)
    with pytest.raises(error, match=r"ledger/run\.json"):
        await open_run_id(store)
    assert await store.get(RUN_KEY) == data


async def test_a_ledger_without_its_first_segment_is_damage(tmp_path):
    with pytest.raises(IntegrityError, match="no segment 0"):
        await read(Files())
