# pyright: basic, reportAttributeAccessIssue=false
"""Processes that die, fall silent, flap or refuse to end are noticed, started anew, or end the run with the cause."""

import asyncio
import os
import signal
from time import monotonic

import msgspec
import pytest
from supervisor_kit import BLAMING, DEAF, FLAPPING, PATIENT, SLOW, STILLBORN, program, supervised

from etude.errors import RunError
from etude.runtime.services import is_alive, read_leases
from etude.telemetry.events import ServiceEnded, ServiceStarted


async def process_of(one):
    """The process id that the newest lease names, once it is written."""
    async with asyncio.timeout(30):
        while True:
            leases = await read_leases(one.store)
            if leases and leases[0].url and not leases[0].ended:
                return leases[0].pid
            await asyncio.sleep(0.01)


async def test_a_process_that_is_killed_is_started_again_and_everybody_hears_of_it(tmp_path):
    async with supervised(tmp_path) as one:
        one.supervisor.start(program(tmp_path, PATIENT))
        first = await one.supervisor.up("a-0", owner="test", deadline_s=30)
        assert one.supervisor.url("a-0") == first
        os.kill(await process_of(one), signal.SIGKILL)
        assert await one.heard.until("down") == ("down", "a-0", "ended with exit code -9 (SIGKILL)")
        assert (await one.heard.until("up", 2))[2] == one.supervisor.url("a-0")
    assert [event[0] for event in one.heard.events] == ["up", "down", "up", "down"]
    assert one.heard.events[-1][2] == ""
    assert "the sampler a-0 ended with exit code -9 (SIGKILL); it is started again in 0.01 s" in one.notes


async def test_the_ledger_hears_of_every_life_and_of_what_its_writer_left(tmp_path):
    async def read_end(writer):
        return 7, f"chain of {writer}"

    async with supervised(tmp_path, read_end=read_end) as one:
        one.supervisor.start(program(tmp_path, PATIENT))
        await one.heard.until("up")
        first = await process_of(one)
        os.kill(first, signal.SIGKILL)
        await one.heard.until("up", 2)
    begun, ended, again, closed = one.ledger.events
    assert (begun, again.service) == (ServiceStarted(service="a-0", writer=f"writer-{first}", pid=first), "a-0")
    assert (ended.writer, ended.events, ended.chain) == (f"writer-{first}", 7, f"chain of writer-{first}")
    assert ended.reason == "ended with exit code -9 (SIGKILL)"
    assert isinstance(closed, ServiceEnded)
    assert (closed.writer, closed.reason) == (again.writer, "")


async def test_a_process_that_is_stopped_is_mute_and_replaced_within_its_lease(tmp_path):
    async with supervised(tmp_path, lease_s=0.6) as one:
        one.supervisor.start(program(tmp_path, PATIENT))
        await one.heard.until("up")
        mute = await process_of(one)
        os.kill(mute, signal.SIGSTOP)
        started = monotonic()
        assert (await one.heard.until("down"))[2] == "has not answered for 0.6 s"
        assert monotonic() - started < 10
        await one.heard.until("up", 2)
        assert not is_alive(mute)


async def test_a_process_whose_owner_does_not_want_it_is_replaced(tmp_path):
    async with supervised(tmp_path) as one:
        one.supervisor.start(program(tmp_path, PATIENT))
        await one.heard.until("up")
        unwanted = await process_of(one)
        one.supervisor.restart("a-0", "draws nonsense")
        assert (await one.heard.until("down"))[2] == "draws nonsense"
        await one.heard.until("up", 2)
        assert not is_alive(unwanted)


async def test_a_process_that_flaps_beyond_its_budget_ends_the_run_with_its_last_words(tmp_path):
    async with supervised(tmp_path, restarts=2) as one:
        one.supervisor.start(program(tmp_path, FLAPPING, name="trainer", kind="trainer"))
        with pytest.raises(RunError) as caught:
            await asyncio.wait_for(one.supervisor.watch(), 30)
    assert "the trainer ended with exit code 1. It said: " in str(caught.value)
    assert f"flapping (its log is {tmp_path}/trainer.log)" in str(caught.value)
    assert "That was after 2 restarts within 300 s; supervision.restarts allows no more" in str(caught.value)
    assert sum(isinstance(event, ServiceStarted) for event in one.ledger.events) == 3
    assert sum("is started again in" in note for note in one.notes) == 2
    assert [note.split()[-2] for note in one.notes] == ["0.01", "0.02"]


async def test_old_restarts_do_not_count(tmp_path):
    async with supervised(tmp_path, restarts=1, restart_window_s=0.001) as one:
        one.supervisor.start(program(tmp_path, FLAPPING))
        await one.heard.until("up", 4)


async def test_who_waits_for_a_process_that_never_comes_up_is_told_why(tmp_path):
    async with supervised(tmp_path, restarts=1) as one:
        one.supervisor.start(program(tmp_path, STILLBORN))
        with pytest.raises(RunError, match=r"the sampler a-0 ended with exit code 1 before it was ready\. It said: no"):
            await one.supervisor.up("a-0", owner="test", deadline_s=30)


async def test_a_process_that_blames_its_user_is_not_started_again(tmp_path):
    async with supervised(tmp_path) as one:
        one.supervisor.start(program(tmp_path, BLAMING))
        with pytest.raises(RunError, match="It said: your model is broken") as caught:
            await one.supervisor.up("a-0", owner="test", deadline_s=30)
    assert caught.value.exit_code == 2
    assert one.notes == []


async def test_a_program_that_does_not_exist_is_named(tmp_path):
    async with supervised(tmp_path, restarts=0) as one:
        missing = msgspec.structs.replace(program(tmp_path, ""), command=("/nowhere/etude",))
        one.supervisor.start(missing)
        with pytest.raises(RunError, match=r"could not be started \(No such file or directory\): /nowhere/etude"):
            await one.supervisor.up("a-0", owner="test", deadline_s=30)


async def test_a_process_that_takes_too_long_to_come_up_is_replaced_and_named_in_the_end(tmp_path):
    async with supervised(tmp_path, ready_s=0.5, restarts=1) as one:
        one.supervisor.start(program(tmp_path, SLOW))
        with pytest.raises(RunError, match=r"the sampler a-0 did not come up within 0\.5 s\. It said: loading"):
            await one.supervisor.up("a-0", owner="test", deadline_s=30)


async def test_who_cannot_wait_longer_is_told_what_the_process_is_at(tmp_path):
    async with supervised(tmp_path) as one:
        one.supervisor.start(program(tmp_path, SLOW))
        with pytest.raises(
            RunError, match=r"etude run waited 0\.3 s for its start.* the sampler a-0 .*: it comes up \("
        ):
            await one.supervisor.up("a-0", owner="etude run", deadline_s=0.3)


async def test_everything_ends_in_bounded_time_even_a_process_that_ignores_everything(tmp_path):
    async with supervised(tmp_path, grace_s=0.3) as one:
        for name, code in (("deaf-0", DEAF), ("deaf-1", DEAF), ("a-0", PATIENT)):
            one.supervisor.start(program(tmp_path, code, name=name))
        await one.heard.until("up", 3)
        started = monotonic()
    assert monotonic() - started < 5
    leases = await read_leases(one.store)
    assert [lease.name for lease in leases] == ["a-0", "deaf-0", "deaf-1"]
    assert all(lease.ended and lease.reason == "" for lease in leases)
    assert not any(is_alive(lease.pid) for lease in leases)


async def test_a_lease_is_renewed_for_as_long_as_the_process_lives(tmp_path):
    async with supervised(tmp_path, lease_s=0.3) as one:
        one.supervisor.start(program(tmp_path, PATIENT))
        await one.heard.until("up")
        await process_of(one)
        [lease] = await read_leases(one.store)
        assert (lease.kind, lease.url, lease.restarts) == ("sampler", one.supervisor.url("a-0"), 0)
        assert lease.writer == f"writer-{lease.pid}"
        async with asyncio.timeout(30):
            while (await read_leases(one.store))[0].expires <= lease.expires:  # noqa: ASYNC110 files tell nobody
                await asyncio.sleep(0.02)
