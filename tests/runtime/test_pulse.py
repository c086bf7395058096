# pyright: basic, reportOptionalMemberAccess=false
"""A loop that is blocked is seen while it is blocked, with the place that blocks it."""

import asyncio
import os
from time import monotonic

import pytest

from etude.errors import StoreError
from etude.runtime.pulse import Pulse
from etude.runtime.services import read_controller
from etude.store.local import FileStore
from etude.telemetry.waits import waiting


def spin_in_user_code(seconds, look):
    """Block the loop, and look at what others see of it meanwhile."""
    until, seen = monotonic() + seconds, []
    while monotonic() < until:
        seen.append(look())
    return seen


def tidy_up(seconds):
    until = monotonic() + seconds
    while monotonic() < until:
        pass


async def published(store, holds):
    async with asyncio.timeout(30):
        while True:
            state = await read_controller(store)
            if state is not None and holds(state):
                return state
            await asyncio.sleep(0.02)


async def test_what_the_controller_waits_for_can_be_read_by_others(tmp_path):
    store = FileStore(tmp_path)
    async with Pulse(store, publish_s=0.05) as pulse:
        pulse.stage = "train"
        async with waiting("a slot", owner="admit", on="trainer", deadline_s=60):
            state = await published(store, lambda state: state.waits)
    [wait] = state.waits
    assert (wait.name, wait.owner, wait.on, state.stage, state.pid) == (
        "a slot",
        "admit",
        "trainer",
        "train",
        os.getpid(),
    )
    assert state.ended == 0
    last = await read_controller(store)
    assert last.ended > 0
    assert (last.error, last.waits) == ("", ())


async def test_a_blocked_loop_is_seen_with_the_place_while_it_lasts_and_told_afterwards(tmp_path):
    notes = []
    path = tmp_path / "services/controller.json"

    def look():
        return path.read_text() if path.exists() else ""

    async with Pulse(FileStore(tmp_path), note=notes.append, publish_s=0.05) as pulse:
        await published(FileStore(tmp_path), lambda state: state.beat)
        seen = spin_in_user_code(2.5, look)
        assert any("spin_in_user_code" in text for text in seen)
        await published(FileStore(tmp_path), lambda state: not state.blocked_in)
        assert pulse.worst_lag() > 1.5
        assert pulse.worst_lag() < 1.5
    [note] = notes
    assert note.startswith("the event loop stood still for ")
    assert "spin_in_user_code" in note


async def test_what_the_loop_does_after_a_block_is_not_taken_for_it(tmp_path):
    notes = []
    async with Pulse(FileStore(tmp_path), note=notes.append, publish_s=0.05) as pulse:
        await published(FileStore(tmp_path), lambda state: state.beat)
        spin_in_user_code(1.6, lambda: None)
        # Longer than the time between two looks.
        tidy_up(0.6)
        await published(FileStore(tmp_path), lambda state: not state.blocked_in)
        assert pulse.worst_lag() > 1.5
    [note] = notes
    assert "spin_in_user_code" in note


async def test_a_block_that_is_known_to_compute_raises_no_alarm(tmp_path):
    notes = []
    async with Pulse(FileStore(tmp_path), note=notes.append, publish_s=0.05) as pulse:
        with pulse.resting():
            spin_in_user_code(1.6, lambda: None)
        await published(FileStore(tmp_path), lambda state: state.beat)
        assert pulse.worst_lag() < 1
    assert notes == []


async def test_what_ended_the_command_is_kept(tmp_path):
    store = FileStore(tmp_path)
    with pytest.raises(StoreError):
        async with Pulse(store):
            raise StoreError("the disk is gone")
    state = await read_controller(store)
    assert state.error == "StoreError: the disk is gone"
    assert state.ended > 0
