# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from etude.errors import HostError, IntegrityError
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock
from etude.weights.chain import WEIGHTS
from etude.weights.directory import WeightsDirectory, read_state
from etude.weights.disk import LocalDisk
from etude.weights.follow_directory import DirectoryFollower
from etude.weights.follower import PathFollower
from etude.weights.publisher import open_publisher
from etude.weights.replica import copy_files, materialised


class KilledError(BaseException):
    """What `kill -9` is to a process: nothing of it runs any more."""


class DyingDisk(LocalDisk):
    """Ends the process, or is full, at a call; of a write it does a part first."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.left = at
        self.error = error or KilledError()

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def write(self, path, data, *, at=0):
        if self.left == 1:
            super().write(path, memoryview(data)[: len(data) // 2], at=at)
        self._step()
        super().write(path, data, at=at)

    def sync(self, path):
        self._step()
        super().sync(path)

    def replace(self, path, target):
        self._step()
        path.replace(target)

    def remove(self, path):
        self._step()
        super().remove(path)


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{n}.w": torch.randn(60, 40, generator=generator) + 1e-3 * version for n in range(3)}
    tensors |= {"scalar": torch.tensor(float(version)), "empty": torch.zeros(0, 3), "ids": torch.arange(8) + version}
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


async def publish(store, versions, *, lineage="one"):
    publisher = await open_publisher(store, lineage=lineage, dtype="bfloat16")
    for version in versions:
        await publisher.publish(version=version, step=version, tensors=weights(version))


async def follow(store, folder, *, disk=None):
    directory = WeightsDirectory(folder, disk=disk)
    try:
        paths = PathFollower(store, clock=ManualClock(), attempts=2)
        await DirectoryFollower(directory, paths=paths).poll()
        return directory.state
    finally:
        directory.close()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_is(folder: Path, version: int, state: str = "ready") -> None:
    said = read_state(folder)
    assert said is not None
    assert (said.version, said.state) == (version, state)
    found, expected = loaded(folder), weights(version)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_a_directory_follows_in_place_and_keeps_what_is_not_weights(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    await publish(store, [0])
    await follow(store, folder)
    assert_is(folder, 0)
    inode = (folder / "model.safetensors").stat().st_ino
    for version in range(1, 5):
        await publish(store, [version])
        state = await follow(store, folder)
        assert state is not None
        assert (state.step, state.lineage) == (version, "one")
        assert_is(folder, version)
    assert (folder / "model.safetensors").stat().st_ino == inode
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in (folder / ".etude").iterdir()) == ["lock"]


async def test_a_directory_of_several_files_keeps_its_layout_when_it_is_replaced_whole(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    folder.mkdir()
    names = sorted(weights(0))
    files = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, part in files.items():
        save_file({name: torch.zeros(3) for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    await publish(store, [0])
    await follow(store, folder)
    assert_is(folder, 0)
    for file, part in files.items():
        with safe_open(folder / file, framework="pt") as opened:
            assert sorted(opened.keys()) == part
    written = json.loads((folder / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == index["weight_map"]
    await publish(store, [1])
    await follow(store, folder)
    assert_is(folder, 1)


async def test_files_of_other_tensors_are_replaced(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    folder.mkdir()
    save_file({"old": torch.zeros(3)}, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map":{"old":"model-00001-of-00001.safetensors"}}')
    await publish(store, [0])
    await follow(store, folder)
    assert_is(folder, 0)
    assert not (folder / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("start", ["nothing", "damaged", "sound"])
async def test_killed_at_any_step_it_is_at_the_old_version_or_the_new_one(tmp_path, start):
    store = open_store("memory://")
    await publish(store, range(2))
    before = tmp_path / "before"
    before.mkdir()
    if start != "nothing":
        await follow(store, before)
    if start == "damaged":  # so it is replaced whole
        with (before / "model.safetensors").open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"?")
    await publish(store, [2])
    at, ended = 0, False
    while not ended:
        at += 1 if start == "sound" else 2
        folder = tmp_path / str(at)
        shutil.copytree(before, folder)
        try:
            await follow(store, folder, disk=DyingDisk(at))
            ended = True
        except KilledError:
            opened = WeightsDirectory(folder)
            opened.close()
            if opened.state is None:
                assert start != "sound"
            else:
                assert opened.state.state == "passing" or opened.state.version in (1, 2)
                assert_is(folder, opened.state.version, opened.state.state)
        await follow(store, folder)
        assert_is(folder, 2)
    assert at > 10


async def test_a_full_disk_leaves_the_old_version_and_the_next_start_goes_on(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, [0])
    await follow(store, folder)
    await publish(store, [1])
    refusals = 0
    for at in range(1, 40):
        try:
            await follow(store, folder, disk=DyingDisk(at, OSError(errno.ENOSPC, "full")))
        except OSError:
            refusals += 1
            opened = WeightsDirectory(folder)
            opened.close()
            assert opened.state is not None
            assert_is(folder, opened.state.version)
            await publish(store, [opened.state.version + 1])
    assert refusals > 10


async def test_weights_that_are_not_what_the_directory_says_are_loaded_anew(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, range(2))
    await follow(store, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    opened = WeightsDirectory(folder)
    opened.close()
    assert opened.state is None
    assert "are not version 1" in opened.why
    await publish(store, [2])
    await follow(store, folder)
    assert_is(folder, 2)


async def test_weights_damaged_while_it_runs_are_never_taken_for_a_base(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, range(2))
    directory = WeightsDirectory(folder)
    paths = PathFollower(store, clock=ManualClock(), attempts=3)
    follower = DirectoryFollower(directory, paths=paths)
    await follower.poll()
    path = folder / "model.safetensors"
    with path.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"?")
    await publish(store, [2])
    await follower.poll()
    assert_is(folder, 2)
    directory.close()


@pytest.mark.parametrize("content", ["{", "[]", '{"lineage":"one"}', "\x00" * 10])
async def test_a_damaged_version_file_means_that_nothing_is_known(tmp_path, content):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, [0])
    await follow(store, folder)
    (folder / "etude.version").write_text(content)
    with pytest.raises(IntegrityError):
        read_state(folder)
    await follow(store, folder)
    assert_is(folder, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_damaged_headers_of_weights_are_refused_and_replaced(tmp_path, seed):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, [0])
    await follow(store, folder)
    rng = random.Random(seed)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[rng.randrange(8 if seed % 2 else 300)] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))
    await follow(store, folder)
    assert_is(folder, 0)


async def test_of_several_versions_on_the_way_only_the_last_is_shown(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, range(2))
    await follow(store, folder)
    await publish(store, range(2, 5))
    shown = set()

    class Watching(LocalDisk):
        def sync(self, path):
            super().sync(path)
            if (state := read_state(folder)) is not None and state.state == "ready":
                shown.add(state.version)

    await follow(store, folder, disk=Watching())
    assert shown == {1, 4}
    assert_is(folder, 4)


async def test_a_version_that_was_passed_through_is_shown_once_it_is_wanted(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, range(3))
    await materialised(store, WEIGHTS, "1", folder, clock=ManualClock())
    path = folder / "etude.version"
    path.write_bytes(path.read_bytes().replace(b"ready", b"passing"))
    state = await materialised(store, WEIGHTS, "1", folder, clock=ManualClock())
    assert state.state == "ready"
    assert_is(folder, 1)


async def test_a_new_lineage_replaces_the_directory(tmp_path):
    store, folder = open_store("memory://"), tmp_path / "model"
    await publish(store, range(3))
    await follow(store, folder)
    await publish(store, [1], lineage="two")
    state = await follow(store, folder)
    assert state is not None
    assert state.lineage == "two"
    assert_is(folder, 1)


def test_only_one_process_writes(tmp_path):
    first = WeightsDirectory(tmp_path)
    with pytest.raises(HostError, match="another process"):
        WeightsDirectory(tmp_path)
    first.close()
    WeightsDirectory(tmp_path).close()


async def test_any_kept_version_can_be_materialised(tmp_path):
    store = open_store("memory://")
    await publish(store, range(4))
    source = tmp_path / "base"
    source.mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors", "model.safetensors.index.json", "x.bin"):
        (source / name).write_text(name)
    for name, version in (("2", 2), ("one/3", 3), ("head", 3), ("0", 0)):
        folder = tmp_path / "model"
        copy_files(source, folder)
        state = await materialised(store, WEIGHTS, name, folder, clock=ManualClock())
        assert state.version == version
        assert_is(folder, version)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [".etude", "config.json", "etude.version", "model.safetensors", "tokenizer.model"]
    )


ENDLESS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
from test_directory import WeightsDirectory, follow, open_publisher, open_store, weights
async def main():
    store, folder = open_store(sys.argv[2]), Path(sys.argv[3])
    publisher = await open_publisher(store, lineage="one", dtype="bfloat16")
    version = publisher.head.version if publisher.head else -1
    while True:
        version += 1
        await publisher.publish(version=version, step=version, tensors=weights(version))
        await follow(store, folder)
        print(version, flush=True)
asyncio.run(main())
"""


def test_a_process_killed_at_random_moments_never_shows_a_torn_version(tmp_path):
    rng = random.Random(0)
    folder = tmp_path / "model"
    seen = set()

    def look() -> None:
        """Read as the documentation tells readers to."""
        state = read_state(folder)
        if state is None or state.state != "ready":
            return
        found = {name: tensor.clone() for name, tensor in loaded(folder).items()}  # what is mapped would change
        if read_state(folder) == state:
            assert all(torch.equal(found[name], tensor) for name, tensor in weights(state.version).items())
            seen.add(state.version)

    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS, __file__, str(tmp_path / "run"), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(2, 8)):
                assert process.stdout.readline()
                look()
            until = time.monotonic() + rng.uniform(0, 0.05)
            while time.monotonic() < until:
                look()
            process.kill()
        opened = WeightsDirectory(folder)
        opened.close()
        assert opened.state is not None
        assert_is(folder, opened.state.version)
    assert len(seen) > 3
