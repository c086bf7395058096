# pyright: basic, reportArgumentType=false
"""Runs that go on, that were cut, that are no runs."""

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from obstore.exceptions import PermissionDeniedError
from s3_kit import ENVIRONMENT

from etude.cli.main import main
from etude.errors import StoreError
from etude.runtime.audit.audit import audit
from etude.runtime.audit.doubles import LINEAGE, RunDouble, write_run
from etude.store.ledger_format import SEAL_KEY, SealFile, open_run_id, segment_key
from etude.store.ledger_reader import read_writer
from etude.store.local import FileStore
from etude.store.opening import open_store
from etude.store.remote import RemoteStore
from etude.telemetry import events as facts


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished") / "run"
    directory.mkdir()
    asyncio.run(write_run(directory))
    return directory


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def broken(report) -> dict[str, tuple[str, ...]]:
    return {finding.name: finding.first for finding in report.findings if finding.violations}


async def test_what_must_hold_already_holds_at_every_moment_of_a_run(tmp_path):
    states = set()
    moments = 0

    async def look():
        nonlocal moments
        moments += 1
        if moments % 3 or not (tmp_path / "run/ledger").exists():
            return
        report = await audit(FileStore(tmp_path / "run"), run="run")
        assert broken(report) == {}, f"at moment {moments}"
        states.add(report.state)

    (tmp_path / "run").mkdir()
    await write_run(tmp_path / "run", on_moment=look)
    assert moments > 60
    assert "open" in states
    assert (await audit(FileStore(tmp_path / "run"), run="run")).state == "sealed"


class BusyStore(FileStore):
    """A run in which something happens just before a ledger is read."""

    def __init__(self, root, happen):
        super().__init__(root)
        self.happen = happen

    async def get(self, key, *, max_bytes=None):
        if key.startswith("ledger/local-0"):
            happen, self.happen = self.happen, None
            if happen is not None:
                await happen()
        return await super().get(key, max_bytes=max_bytes)


async def test_what_begins_while_the_ledgers_are_read_is_no_violation(tmp_path):
    store = FileStore(tmp_path / "run")
    run = RunDouble(store, await open_run_id(store), lambda: asyncio.sleep(0))
    controller, trainer, sampler = (run.writer(name, 1) for name in ("controller", "trainer", "local-0"))

    async def publish(version):
        trainer.record(facts.Trained(lineage=LINEAGE, version=version, step=version, groups=()))
        digest = await run.publish(trainer, version)
        sampler.record(facts.Applied(lineage=LINEAGE, version=version, digest=digest))

    async def happen():
        await publish(1)
        await run.play(controller, sampler, ("eval-v1-task", 0, "task"), 1)

    await publish(0)
    assert broken(await audit(BusyStore(tmp_path / "run", happen), run="run")) == {}
    sampler.record(facts.Applied(lineage=LINEAGE, version=2, digest="f00d"))
    run.draw(sampler, "nobody/0", (1,), 2)
    found = broken(await audit(FileStore(tmp_path / "run"), run="run"))
    assert set(found) == {"replicas_hold_what_was_published", "tokens_conserved"}


def test_a_ledger_that_lost_its_end_with_the_seal_is_not_called_sealed(copy, capsys):
    assert main(["verify", str(copy), "--json"]) == 0
    sealed = json.loads(capsys.readouterr().out)
    path = copy / segment_key("controller-00000004", 0)
    path.write_bytes(path.read_bytes()[:-400])
    main(["verify", str(copy), "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "open"
    assert main(["verify", str(copy), "--seal", sealed["seal"]]) == 5
    assert "the seal is missing" in capsys.readouterr().out


def test_the_seal_of_another_run_is_not_taken_for_this_ones(copy, capsys):
    assert main(["verify", str(copy), "--seal", "f00d"]) == 5
    assert "not f00d" in capsys.readouterr().out


def test_a_violation_has_an_exit_code_of_its_own_and_names_the_offender(copy, capsys):
    path = copy / "groups/0/g000000.parquet"
    path.unlink()
    assert main(["verify", str(copy)]) == 5
    assert "groups/0/g000000.parquet: gone" in capsys.readouterr().out


def test_a_stranger_in_the_run_is_found_and_logs_are_none(copy, capsys):
    (copy / "logs/sampler.log").write_text("hello")
    assert main(["verify", str(copy)]) == 0
    (copy / "ledger/notes.txt").write_text("hello")
    (copy / "extra.bin").write_text("hello")
    assert main(["verify", str(copy)]) == 5
    said = capsys.readouterr().out
    assert "ledger/notes.txt: no fact speaks of it" in said
    assert "extra.bin: no fact speaks of it" in said


@pytest.mark.parametrize("files", [{}, {"README.md": b"a project"}, {"run.toml": b"", "summary.json": b"{}"}])
def test_a_directory_that_is_no_run_with_a_ledger_is_refused_and_left_as_it_is(tmp_path, capsys, files):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 4
    assert "there is no run with a ledger here" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_a_directory_that_does_not_exist_is_not_made(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "gone")]) == 4
    assert "there is no run directory" in capsys.readouterr().err
    assert not (tmp_path / "gone").exists()


def test_a_newer_ledger_is_refused_with_the_format_that_it_has(copy, capsys):
    path = copy / "ledger/run.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"format": 2}))
    assert main(["verify", str(copy)]) == 2
    assert "ledger format 2" in capsys.readouterr().err


async def test_a_copy_in_a_bucket_is_verified_like_the_run_itself(finished, endpoint, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = open_store("s3://bucket/copied-run")
    here = FileStore(finished)
    keys = await here.list("")
    for key in keys:
        await bucket.put(key, await here.get(key))
    assert (await audit(bucket, run="copy")).findings == (await audit(here, run="run")).findings
    assert await bucket.list("") == keys
    await bucket.put("groups/0/g000000.parquet", b"")
    assert "files_are_those_claimed" in broken(await audit(bucket, run="copy"))


class DeniedBackend:
    """A bucket that this user may not look into."""

    def get(self, key):
        raise PermissionDeniedError(f"403 Forbidden: {key}")

    def list(self, prefix):
        raise PermissionDeniedError("403 Forbidden")


async def test_a_bucket_without_permission_is_an_error_that_says_so():
    with pytest.raises(StoreError, match="access denied"):
        await audit(RemoteStore(DeniedBackend(), name="s3://bucket/run"), run="s3://bucket/run")


async def test_a_ledger_cut_between_two_batches_before_its_seal_is_noticed(copy):
    seal = msgspec.json.decode((copy / SEAL_KEY).read_bytes(), type=SealFile)
    path = copy / segment_key(seal.writer, 0)
    whole = path.read_bytes()
    clean_cuts = 0
    for length in range(len(whole) - 1, 0, -1):
        path.write_bytes(whole[:length])
        reader = read_writer(FileStore(copy), seal.writer)
        events = sum([len(batch) async for batch in reader])
        if reader.torn_bytes or events >= seal.events:
            continue
        clean_cuts += 1
        assert "ledger_intact" in broken(await audit(FileStore(copy), run="run", quick=True))
        if clean_cuts == 3:
            break
    assert clean_cuts == 3
