# pyright: basic, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""What is reported to lie in model directories, and what is done to them while they are followed."""

import errno
import json
import os
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import ConfigError, HostError, IntegrityError, StoreError
from etude.store.local import FileStore
from etude.store.opening import open_store
from etude.telemetry.clock import ManualClock, SystemClock
from etude.weights.chain import HEAD_KEY, WEIGHTS, parse_head
from etude.weights.directory import VERSION_FILE, WeightsDirectory, read_state
from etude.weights.follow_directory import DirectoryFollower
from etude.weights.follower import PathFollower
from etude.weights.publisher import open_publisher
from etude.weights.replica import ReplicaOptions, copy_files, follow_into, materialised


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}.w": torch.randn(60, 40, generator=generator) + 1e-3 * version for n in range(3)}


async def published(count: int, store=None, *, lineage="one"):
    store = store or open_store("memory://")
    publisher = await open_publisher(store, lineage=lineage)
    for version in range(count):
        await publisher.publish(version=version, step=version, tensors=weights(version))
    return store


class Following:
    """A directory that is followed, poll by poll."""

    def __init__(self, store, folder) -> None:
        self.directory = WeightsDirectory(folder)
        self.follower = DirectoryFollower(self.directory, paths=PathFollower(store, clock=ManualClock(), attempts=2))

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.directory.close()

    async def poll(self):
        return await self.follower.poll()


async def follow(store, folder):
    async with Following(store, folder) as following:
        await following.poll()
        return following.directory.state


def is_at(folder, version: int) -> bool:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found.keys() == weights(0).keys() and all(
        torch.equal(found[name], tensor) for name, tensor in weights(version).items()
    )


ODD_NAMES = [
    "model copy.safetensors",
    "model\u00e9.safetensors",
    "model" + "x" * 230 + ".safetensors",
    "model(1).safetensors",
]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_weights_under_any_name_that_engines_read_go_with_the_first_version(tmp_path, name):
    store = await published(2)
    save_file({"stale": torch.zeros(3)}, tmp_path / "model.safetensors")
    shutil.copy(tmp_path / "model.safetensors", tmp_path / name)
    assert (await follow(store, tmp_path)).version == 1
    assert is_at(tmp_path, 1)


async def test_shards_by_other_names_go_when_the_layout_changes(tmp_path):
    store = await published(1)
    save_file({"a": torch.zeros(3)}, tmp_path / "shard-a.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "shard-b.safetensors")
    index = {"weight_map": {"a": "shard-a.safetensors", "b": "shard-b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (await follow(store, tmp_path)).version == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == [VERSION_FILE, "model.safetensors"]
    assert is_at(tmp_path, 0)


async def test_a_file_that_engines_prefer_to_the_shards_does_not_stay(tmp_path):
    # transformers reads model.safetensors where there is one, whatever the index says
    store = await published(2)
    await follow(store, tmp_path)
    tensors = weights(1)
    names = sorted(tensors)
    for number, name in enumerate(names):
        save_file({name: tensors[name]}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    directory = WeightsDirectory(tmp_path)
    directory.close()
    assert "model.safetensors as well" in directory.why
    await follow(store, tmp_path)
    assert is_at(tmp_path, 1)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "old weights.safetensors"])
async def test_weights_that_engines_would_load_on_top_are_refused_by_name(tmp_path, name):
    store = await published(1)
    save_file({"layers.0.w": torch.zeros(60, 40)}, tmp_path / name)
    with pytest.raises(HostError, match=rf"{name}.*move it away"):
        await follow(store, tmp_path)
    assert load_file(tmp_path / name)["layers.0.w"].sum() == 0
    (tmp_path / name).unlink()
    await follow(store, tmp_path)
    assert is_at(tmp_path, 0)


@pytest.mark.parametrize("what", ["removed", "shortened", "replaced by a link", "replaced by another model"])
async def test_weights_that_somebody_takes_away_meanwhile_are_loaded_anew(tmp_path, what):
    store = await published(1)
    publisher = await open_publisher(store, lineage="one")
    file = tmp_path / "model" / "model.safetensors"
    async with Following(store, tmp_path / "model") as following:
        await following.poll()
        if what == "shortened":
            with file.open("r+b") as opened:
                opened.truncate(100)
        else:
            file.unlink()
        if what == "replaced by a link":
            (tmp_path / "elsewhere").write_bytes(b"x" * 10)
            file.symlink_to(tmp_path / "elsewhere")
        if what == "replaced by another model":
            save_file({"other": torch.zeros(8)}, file)
        await publisher.publish(version=1, step=1, tensors=weights(1))
        assert (await following.poll()).version == 1
    assert is_at(tmp_path / "model", 1)
    assert what != "replaced by a link" or (tmp_path / "elsewhere").read_bytes() == b"x" * 10


async def test_a_snapshot_of_links_becomes_files_and_what_it_linked_to_stays(tmp_path):
    # how huggingface_hub lays out what it downloads
    store = await published(2)
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save_file(weights(0), tmp_path / "blobs" / "abc")
    (tmp_path / "blobs" / "config").write_text("{}")
    before = (tmp_path / "blobs" / "abc").read_bytes()
    (folder / "model.safetensors").symlink_to("../blobs/abc")
    (folder / "config.json").symlink_to("../blobs/config")
    await follow(store, folder)
    assert is_at(folder, 1)
    assert not (folder / "model.safetensors").is_symlink()
    assert (tmp_path / "blobs" / "abc").read_bytes() == before
    copy_files(folder, tmp_path / "other")
    assert (tmp_path / "other" / "config.json").read_text() == "{}"


def test_what_an_engine_needs_beside_the_weights_is_copied_and_no_list_of_weights(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    wanted = ["config.json", "generation_config.json", "merges.txt", "qwen.tiktoken", "tokenizer.model"]
    wanted += ["chat_template.jinja", "modeling_own.py"]
    left = ["model.safetensors.index.json", "pytorch_model.bin.index.json", "pytorch_model.bin", ".hidden.json"]
    for name in [*wanted, *left, "model.safetensors"]:
        (source / name).write_text("{}")
    copy_files(source, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(wanted)


async def test_versions_do_not_go_back_across_a_start(tmp_path):
    store = await published(3)
    folder = tmp_path / "model"
    old = {}
    await follow(store, folder)
    other = await published(2)
    for key in await store.list("weights"):
        await store.delete(key)
    for key in await other.list("weights"):
        old[key] = await other.get(key)
        await store.put(key, old[key])
    with pytest.raises(IntegrityError, match=r"went from version 2 to 1 .* empty directory"):
        await follow(store, folder)
    assert is_at(folder, 2)
    assert read_state(folder).state == "ready"
    assert (await follow(store, tmp_path / "another")).version == 1


async def test_a_version_with_other_bytes_than_before_is_refused_across_a_start(tmp_path):
    store = await published(2)
    await follow(store, tmp_path)
    other = open_store("memory://")
    publisher = await open_publisher(other, lineage="one")
    await publisher.publish(version=1, step=1, tensors=weights(7))
    with pytest.raises(IntegrityError, match="other bytes of it within lineage one"):
        await follow(other, tmp_path)
    assert is_at(tmp_path, 1)


class ReadOnly(FileStore):
    """A store that this reader may not write to."""

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        msg = f"cannot write {key}: access denied"
        raise StoreError(msg)

    async def delete(self, key: str) -> None:
        msg = f"cannot delete {key}: access denied"
        raise StoreError(msg)


async def followed_once(store, folder, **options):
    options = ReplicaOptions(folder=folder, **options)
    states = follow_into(store, WEIGHTS, options, clock=SystemClock(), once=True, report=lambda _: None)
    return [state async for state in states]


async def test_who_may_only_read_is_told_how_and_then_reads(tmp_path):
    await published(2, FileStore(tmp_path / "run"))
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    store = ReadOnly(tmp_path / "run")
    with pytest.raises(StoreError, match=r"no lease could be written, .* with --no-lease"):
        await materialised(store, WEIGHTS, "1", tmp_path / "refused", clock=ManualClock())
    (state,) = await followed_once(store, tmp_path / "model", leased=False)
    assert state.version == 1
    assert is_at(tmp_path / "model", 1)
    assert (await materialised(store, WEIGHTS, "0", tmp_path / "zero", clock=ManualClock(), leased=False)).version == 0
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    with pytest.raises(ConfigError, match="by their leases"):
        await followed_once(store, tmp_path / "model", leased=False, cluster="x")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
async def test_a_directory_that_may_not_be_written_is_named(tmp_path, code):
    store = await published(1)
    model = tmp_path / "model"
    states = follow_into(store, WEIGHTS, ReplicaOptions(folder=model), clock=SystemClock(), once=False, report=print)
    assert (await anext(states)).version == 0
    with pytest.raises(HostError, match=rf"cannot write .*{model}.*give this user the right"):
        await states.athrow(OSError(code, os.strerror(code), str(model / "model.safetensors")))


async def test_a_state_of_a_newer_format_is_not_taken_for_what_it_is_not(tmp_path):
    store = await published(2)
    await follow(store, tmp_path)
    state = json.loads((tmp_path / VERSION_FILE).read_text())
    (tmp_path / VERSION_FILE).write_text(json.dumps(state | {"format": 2}))
    directory = WeightsDirectory(tmp_path)
    directory.close()
    assert directory.state is None
    assert "format 2 is not 1" in directory.why
    await follow(store, tmp_path)
    assert read_state(tmp_path).format == 1


def test_two_processes_at_one_directory_are_told_of_each_other(tmp_path):
    first = WeightsDirectory(tmp_path)
    with pytest.raises(HostError, match=rf"{tmp_path} current, (process {os.getpid()}|another process)"):
        WeightsDirectory(tmp_path)
    first.close()
    WeightsDirectory(tmp_path).close()


async def test_a_head_of_another_format_says_which_side_is_old():
    store = await published(1)
    head = msgspec.json.decode(await store.get(HEAD_KEY))
    for number, wanted in ((3, "update this reader"), (1, "the etude that wrote it")):
        # What its fields are then nobody knows.
        changed = {"format": number} | ({"page": 1} if number == 3 else {**head, "format": 1, "routes": []})
        with pytest.raises(IntegrityError, match=f"{HEAD_KEY} is refused: format {number} .*{wanted}"):
            parse_head(msgspec.json.encode(changed))
