# pyright: basic
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError
from etude.weights.disk import LocalDisk
from etude.weights.journal import JournalWriter, read_end, replay


class State(msgspec.Struct):
    version: int


@st.composite
def changes(draw):
    width = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.sampled_from([1, 7, 300, (1 << 20) + 5]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    old = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = old.view(f"<u{width}").copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.3, 1.0]))
    where = np.flatnonzero(rng.random(count) < share)
    new[where] += 1
    return old, new, where, draw(st.integers(0, 9))


@settings(max_examples=30)
@given(changes())
def test_what_is_written_happens_once_however_often_it_is_carried_out(tmp_path_factory, change):
    old, new, where, before = change
    folder = tmp_path_factory.mktemp("weights")
    (folder / "work").mkdir()
    (folder / "a.safetensors").write_bytes(b"x" * before + old.tobytes() + b"end")
    journal = folder / "work" / "journal"
    writer = JournalWriter(LocalDisk(), journal)
    if where.size:
        writer.change(folder / "a.safetensors", before, where, new[where])
    assert read_end(journal) is None
    writer.commit(State(7))
    end = read_end(journal)
    assert end is not None
    assert msgspec.json.decode(end.state, type=State).version == 7
    for _ in range(2):
        replay(LocalDisk(), journal, folder)
        assert (folder / "a.safetensors").read_bytes() == b"x" * before + new.tobytes() + b"end"


def test_few_changes_make_a_small_journal_and_many_one_of_about_their_size(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(2_000_000))
    sizes = []
    for changed in (0.01, 1.0):
        where = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < changed)
        writer = JournalWriter(LocalDisk(), tmp_path / "journal")
        writer.change(file, 0, where, np.ones(where.size, "<u2"))
        writer.commit(State(0))
        sizes.append((tmp_path / "journal").stat().st_size)
    assert sizes[0] < 0.04 * 2_000_000
    assert sizes[1] < 1.07 * 2_000_000


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_journal_is_refused_before_a_file_is_touched(tmp_path, seed):
    rng = random.Random(seed)
    file = tmp_path / "a"
    file.write_bytes(bytes(1000))
    journal = tmp_path / "journal"
    writer = JournalWriter(LocalDisk(), journal)
    writer.change(file, 0, np.arange(10), np.ones(10, "<u2"))
    writer.commit(State(0))
    data = bytearray(journal.read_bytes())
    if seed % 2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    journal.write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match="damaged"):
        replay(LocalDisk(), journal, tmp_path)
    assert file.read_bytes() == bytes(1000)


def test_a_journal_of_other_files_is_refused(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(1000))
    writer = JournalWriter(LocalDisk(), tmp_path / "journal")
    writer.change(file, 0, np.arange(10), np.ones(10, "<u2"))
    writer.commit(State(0))
    file.write_bytes(bytes(999))
    with pytest.raises(IntegrityError, match="is not there"):
        replay(LocalDisk(), tmp_path / "journal", tmp_path)
