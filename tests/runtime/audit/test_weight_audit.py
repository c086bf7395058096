# pyright: basic, reportOptionalMemberAccess=false
"""What `etude verify` says of the weight chain: of garbage that was collected, takeovers and versions made anew."""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from etude.runtime.audit.audit import audit
from etude.runtime.audit.doubles import LINEAGE, RunDouble, write_run
from etude.store.ledger_format import open_run_id
from etude.store.local import FileStore
from etude.telemetry import events as facts
from etude.telemetry.clock import ManualClock
from etude.weights.chain import HEAD_KEY, WEIGHTS, parse_head
from etude.weights.reader import read_head
from etude.weights.retention import collect


def broken(report) -> dict[str, tuple[str, ...]]:
    return {finding.name: finding.first for finding in report.findings if finding.violations}


def notes(report) -> str:
    return " ".join(note for finding in report.findings for note in finding.notes)


async def test_a_run_whose_garbage_was_collected_is_what_it_claims(tmp_path):
    store = await write_run(tmp_path)
    before = set(await store.list("weights"))
    found = await collect(store, clock=ManualClock(), keep=1, grace_s=0.0, orphan_grace_s=0.0)
    assert found.floor == 2
    assert len(found.deleted) > 4
    assert set(await store.list("weights")) - {"weights/garbage.json"} < before
    report = await audit(store, run="run")
    assert broken(report) == {}
    assert "below the floor" in notes(report)
    assert "floor rose" in notes(report)


async def test_pages_that_were_replaced_may_be_gone_before_the_floor_ever_rose(tmp_path):
    store = await write_run(tmp_path)
    before = await store.list("weights")
    found = await collect(store, clock=ManualClock(), keep=9, grace_s=0.0, orphan_grace_s=0.0)
    assert found.floor == (await read_head(store)).floor
    assert set(found.deleted) == set(before).difference(await store.list("weights")) != set()
    assert not broken(await audit(store, run="run"))
    head = await read_head(store)
    await store.delete(WEIGHTS.object(head.lineage, head.routes))
    assert "files_are_those_claimed" in broken(await audit(store, run="run"))


async def test_weights_above_the_floor_may_not_be_gone(tmp_path):
    store = await write_run(tmp_path)
    await collect(store, clock=ManualClock(), keep=1, grace_s=0.0, orphan_grace_s=0.0)
    for path in tmp_path.glob("weights/*/manifests/2-*.json.zst"):
        path.unlink()
    assert {"versions_are_intact", "files_are_those_claimed"} <= set(broken(await audit(store, run="run")))


@pytest.mark.parametrize("change", [{"anchor": 0}, {"writer": "ff"}, {"floor": 1, "epoch": 2}])
async def test_a_head_that_changed_in_more_than_its_floor_is_found(tmp_path, change):
    store = await write_run(tmp_path)
    head = parse_head(await store.get(HEAD_KEY))
    await store.put(HEAD_KEY, msgspec.json.encode(replace(head, **change)))
    assert "files_are_those_claimed" in broken(await audit(store, run="run"))


async def told(tmp_path, *, digests, epochs, last=3):
    """A run of versions 0 to `last`, of which version 2 was told of with other digests as well, in other epochs."""
    store = FileStore(tmp_path / "run")
    run = RunDouble(store, await open_run_id(store), lambda: asyncio.sleep(0))
    trainer = run.writer("trainer", 1)
    for version in range(last + 1):
        trainer.record(facts.Trained(lineage=LINEAGE, version=version, step=version, groups=()))
        for digest, epoch in zip(digests, epochs, strict=True):
            if version == 2:
                other = facts.Published(lineage=LINEAGE, version=2, digest=digest, manifest=digest, epoch=epoch)
                trainer.record(other)
        await run.publish(trainer, version)
    head = await read_head(store)
    assert head.version == last
    return broken(await audit(store, run="run"))


async def test_a_version_that_was_made_anew_by_who_took_over_is_no_second_one(tmp_path):
    found = await told(tmp_path, digests=["ab" * 32], epochs=[0])
    assert "versions_grow_by_one" not in found


async def test_a_version_that_was_made_twice_by_one_publisher_is_found(tmp_path):
    found = await told(tmp_path, digests=["ab" * 32], epochs=[1])
    assert "with different weights" in found["versions_grow_by_one"][0]


async def test_a_version_that_the_head_named_and_a_successor_made_otherwise_is_found(tmp_path):
    found = await told(tmp_path, digests=["ab" * 32], epochs=[2])
    assert any("with different weights" in problem for problem in found["versions_grow_by_one"])


async def test_a_publisher_that_goes_on_after_it_was_replaced_is_found(tmp_path):
    store = FileStore(tmp_path / "run")
    run = RunDouble(store, await open_run_id(store), lambda: asyncio.sleep(0))
    trainer = run.writer("trainer", 1)
    for version in range(3):
        trainer.record(facts.Trained(lineage=LINEAGE, version=version, step=version, groups=()))
        if version == 1:
            trainer.record(facts.Published(lineage=LINEAGE, version=1, digest="", manifest="", epoch=7))
        await run.publish(trainer, version)
    found = broken(await audit(store, run="run"))
    assert "published in epoch 1, after one of epoch 7" in " ".join(found["versions_grow_by_one"])
