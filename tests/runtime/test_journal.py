# pyright: basic, reportAttributeAccessIssue=false
import pytest

from etude.errors import IntegrityError, StoreError
from etude.rollout.buffer import Ticket
from etude.runtime.checkpoints import Checkpoint, latest_checkpoint, trainer_file_key, write_checkpoint
from etude.runtime.directory import RunDirectory
from etude.runtime.journal import open_journal, read_log
from etude.runtime.recovery import look_back
from etude.runtime.run_state import RunState
from etude.store.ledger import LedgerWriter
from etude.store.ledger_format import open_run_id
from etude.telemetry.events import Admitted, GroupLost, Opened, StageStarted


def admitted(ticket):
    return Admitted(ticket=ticket, task=f"t{ticket}", version=0)


async def one_life(run, *facts):
    """A controller that goes on from the last one, and the facts of its predecessors."""
    async with open_journal(run) as (journal, log):
        found = await look_back(run.store, log, lambda _: None)
        journal.begin(found.state)
        for fact in facts:
            journal.record(fact)
        await journal.flush()
        return journal, found


@pytest.fixture
def run(tmp_path):
    return RunDirectory.open(str(tmp_path / "run"))


async def test_each_controller_goes_on_where_the_ones_before_it_were(run):
    _, found = await one_life(run, StageStarted(stage="train"), admitted(0), admitted(1))
    assert found.state == RunState()
    await one_life(run, GroupLost(ticket=0, reason="sandbox"))
    await one_life(run)
    _, found = await one_life(run)
    assert [ticket.number for ticket in found.state.in_flight] == [1]
    assert found.state.lost == {"sandbox": 1}
    assert found.admitted == ("t0", "t1")


async def test_a_checkpoint_spares_the_facts_before_it(run):
    async with open_journal(run) as (journal, _):
        journal.record(admitted(0))
        checkpoint = Checkpoint(step=0, cursor=b"here", state=journal.state, position=journal.position, seconds=2.0)
        journal.record(admitted(1))
        await write_checkpoint(run.store, journal, checkpoint, {})
    _, found = await one_life(run, admitted(2))
    assert (found.cursor, found.seconds, found.admitted) == (b"here", 2.0, ("t1",))
    _, found = await one_life(run)
    assert (found.admitted, found.state.next_number) == (("t1", "t2"), 3)
    assert [checkpoint.step for checkpoint in found.state.checkpoints] == [0]


async def test_a_damaged_checkpoint_is_made_up_for_by_the_whole_ledger(run):
    async with open_journal(run) as (journal, _):
        journal.record(admitted(0))
        checkpoint = Checkpoint(step=0, cursor=b"here", state=journal.state, position=journal.position, seconds=2.0)
        await write_checkpoint(run.store, journal, checkpoint, {})
    await run.store.put(trainer_file_key(0, "controller.json"), b"{}")
    with pytest.raises(IntegrityError):
        await latest_checkpoint(run.store)
    notes = []
    async with open_journal(run) as (_, log):
        found = await look_back(run.store, log, notes.append)
    assert found.cursor is None
    assert found.state.in_flight == (Ticket(number=0, task_id="t0", admitted_version=0),)
    assert "reading the whole ledger" in notes[0]


async def test_a_run_whose_ledger_is_gone_is_not_started_over(run):
    async with open_journal(run) as (journal, _):
        checkpoint = Checkpoint(step=0, cursor=b"", state=journal.state, position=journal.position, seconds=0.0)
        await write_checkpoint(run.store, journal, checkpoint, {})
    for key in await run.store.list("ledger"):
        await run.store.delete(key)
    async with open_journal(run) as (_, log):
        with pytest.raises(StoreError, match="ledger/ is gone"):
            await look_back(run.store, log, lambda _: None)


async def test_what_a_controller_says_after_another_followed_it_is_not_part_of_the_run(run):
    run_id = await open_run_id(run.store)
    async with open_journal(run) as (slow, _):
        slow.record(admitted(0))
        await slow.flush()
        await one_life(run, GroupLost(ticket=0, reason="sandbox"))
        slow.record(GroupLost(ticket=0, reason="too_late"))
        await slow.flush()
    log = await read_log(run.store, run_id)
    facts = [fact async for fact in log.facts()]
    assert [fact.reason for fact in facts if isinstance(fact, GroupLost)] == ["sandbox"]


async def test_two_controllers_after_one_are_refused(run):
    await one_life(run)
    run_id = await open_run_id(run.store)
    after = (await (await read_log(run.store, run_id)).end()).after
    for _ in range(2):
        opened = Opened(service="controller", after=after, after_events=1)
        async with await LedgerWriter.open(run.store, run.local, "controller", run_id, opened=opened):
            pass
    with pytest.raises(IntegrityError, match="go on from"):
        await read_log(run.store, run_id)


async def test_a_fact_that_contradicts_the_state_never_reaches_the_ledger(run):
    journal, _ = await one_life(run, admitted(0))
    before = journal.position
    with pytest.raises(IntegrityError):
        journal.record(admitted(0))
    assert journal.position == before
