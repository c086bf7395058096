# pyright: basic
"""Ledgers that were cut, changed or made up: what is read is what was written, or an error says where it is not."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_kit import RUN, Files, read, written

from etude.errors import ConfigError, IntegrityError, ObjectMissingError
from etude.store.ledger_format import (
    FRAME_HEADER,
    MAX_SEGMENT_BYTES,
    ChainLine,
    SegmentLine,
    chain_line,
    compressor,
    segment_key,
)
from etude.telemetry.events import Admitted, Drawn

BATCHES = (1, 3, 1, 6, 2, 1, 4, 1, 1)


def line(number):
    digits = random.Random(number)
    drawn = Drawn(
        t=1764499310.123 + number,
        request=f"g{number:06d}-0-{digits.randbytes(4).hex()}/0",
        prompt=digits.randrange(2000),
        prompt_digest=digits.randbytes(8).hex(),
        tokens=12,
        digest=digits.randbytes(8).hex(),
        versions=((3, 12),),
        lineage="main",
    )
    return msgspec.json.encode(drawn) + b"\n"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Three segments, the last one open, with what was on the disk after each batch."""
    numbers = iter(range(100))
    batches = [[line(next(numbers)) for _ in range(size)] for size in BATCHES]
    files, places = written(tmp_path_factory.mktemp("run"), batches, segment_bytes=1500)
    assert len(files) == 3
    return files, places


def changed(files, key, data):
    return Files({**files, key: bytes(data)})


async def same_or_refused(files, facts):
    try:
        found, _ = await read(files)
    except (IntegrityError, ConfigError):
        return
    assert found == facts


async def test_a_ledger_cut_anywhere_gives_the_batches_before_and_says_how_much_is_torn(ledger):
    files, places = ledger
    facts, _ = await read(files)
    key = max(files)
    for size in range(len(files[key])):
        found, reader = await read(changed(files, key, files[key][:size]))
        whole = sum(count < 3 or end <= size for count, end in places)
        assert found == facts[: sum(BATCHES[:whole])]
        kept = max([end for count, end in places if count == 3 and end <= size], default=min(size, len(FRAME_HEADER)))
        if size >= len(FRAME_HEADER):
            assert reader.torn_bytes == size - max(kept, len(FRAME_HEADER))


async def test_no_flipped_bit_changes_a_fact(ledger):
    files, _ = ledger
    facts, _ = await read(files)
    for key, data in files.items():
        for bit in range(0, 8 * len(data), 1 if key == max(files) else 5):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            await same_or_refused(changed(files, key, flipped), facts)


async def test_no_flipped_bit_before_a_torn_tail_passes_for_a_part_of_it(ledger):
    files, places = ledger
    key = max(files)
    torn = files[key][:-5]
    facts, reader = await read(changed(files, key, torn))
    assert reader.torn_bytes
    for bit in range(8 * places[-2][1]):
        flipped = bytearray(torn)
        flipped[bit // 8] ^= 1 << bit % 8
        await same_or_refused(changed(files, key, flipped), facts)


@given(number=st.integers(0, 1), place=st.floats(0, 1), removed=st.integers(0, 60), added=st.binary(max_size=60))
async def test_what_is_edited_in_a_segment_that_others_follow_is_found(ledger, number, place, removed, added):
    files, _ = ledger
    facts, _ = await read(files)
    key = segment_key("trainer-1", number)
    start = int(place * len(files[key]))
    edited = files[key][:start] + added + files[key][start + removed :]
    await same_or_refused(changed(files, key, edited), facts)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_segment_that_breaks_off_or_is_gone_before_another_is_damage(ledger, number):
    files, _ = ledger
    key = segment_key("trainer-1", number)
    for size in range(0, len(files[key]), 5):
        with pytest.raises(IntegrityError, match=f"segment {number}"):
            await read(changed(files, key, files[key][:size]))
    with pytest.raises(IntegrityError):
        await read(Files({name: data for name, data in files.items() if name != key}))


async def test_segments_in_another_order_or_folder_are_damage(ledger):
    files, _ = ledger
    first, second, third = sorted(files)
    with pytest.raises(IntegrityError, match="it is segment 2"):
        await read(Files({first: files[first], second: files[third], third: files[second]}))
    moved = Files({key.replace("trainer-1", "trainer-2"): data for key, data in files.items()})
    with pytest.raises(IntegrityError, match="it is segment 0 of 'trainer-1'"):
        await read(moved, "trainer-2")


async def test_zeros_after_the_last_batch_are_what_a_power_failure_leaves(ledger):
    files, _ = ledger
    facts, _ = await read(files)
    key = max(files)
    found, reader = await read(changed(files, key, files[key] + bytes(300)))
    assert (found, reader.torn_bytes) == (facts, 300)
    with pytest.raises(IntegrityError):
        await read(changed(files, key, files[key] + bytes(300) + b"\1"))


async def test_a_fact_of_several_blocks_that_was_cut_is_torn(tmp_path):
    long = msgspec.json.encode(Admitted(ticket=1, task=random.Random(1).randbytes(200_000).hex(), version=0)) + b"\n"
    files, places = written(tmp_path, [[line(1)], [long]])
    (key,) = files
    facts, _ = await read(files)
    for size in range(places[0][1] + 1, places[1][1], 9973):
        found, reader = await read(changed(files, key, files[key][:size]))
        assert (found, reader.torn_bytes) == (facts[:1], size - places[0][1])


class Growing(Files):
    """A store in which each segment is still being written when it is first read, and seen late."""

    def __init__(self, files, cut):
        super().__init__(files)
        self.cut = cut
        self.asked = set()

    async def get(self, key, *, max_bytes=None):
        data = await super().get(key, max_bytes=max_bytes)
        first = key not in self.asked
        self.asked.add(key)
        if first and key != min(self):
            raise ObjectMissingError(key)
        return data[: self.cut] if first else data


@pytest.mark.parametrize("cut", [0, 3, 100, 700])
async def test_what_grows_while_it_is_read_is_read_to_its_end(ledger, cut):
    files, _ = ledger
    assert (await read(Growing(files, cut)))[0] == (await read(files))[0]


async def test_bytes_after_the_end_of_a_closed_ledger_are_damage(tmp_path):
    files, _ = written(tmp_path, [[line(1)]], end=True)
    (key,) = files
    with pytest.raises(IntegrityError, match="follow its end"):
        await read(changed(files, key, files[key] + b"x"))


def made(*texts, chained=True):
    """Return a segment with these batches behind its first line, with chain lines that check."""
    head = SegmentLine(format=1, run=RUN, writer="trainer-1", n=0, chain="")
    packer = compressor().compressobj()
    packed, chain, events, begin = b"", "", 0, msgspec.json.encode(head) + b"\n"
    for text in texts:
        events += text.count(b"\n")
        chain, chained_line = chain_line(chain, events, begin + text)
        packed += packer.compress(begin + text + (chained_line if chained else b"")) + packer.flush(1)
        begin = b""
    return Files({segment_key("trainer-1", 0): packed})


FACT = msgspec.json.encode(Admitted(ticket=1, task="t", version=0)) + b"\n"


@pytest.mark.parametrize(
    "text",
    [
        b"\n",
        FACT + b"\n",
        FACT[:-1] + FACT,
        b"{}\n",
        b'{"e":"unheard"}\n',
        b'{"e":"admitted","ticket":"one","task":"t","version":0}\n',
        b'{"e":"admitted","ticket":1,"task":"\xff","version":0}\n',
        b'{"e":"admitted","x":' + b"[" * 100_000 + b"\n",
    ],
)
async def test_lines_that_are_no_facts_are_damage_even_where_the_chain_checks(text):
    with pytest.raises(IntegrityError, match="after fact 1"):
        await read(made(FACT, text))


async def test_a_chain_line_that_counts_wrong_is_damage():
    files = made(FACT)
    wrong = msgspec.json.encode(ChainLine(events=2, chain="0" * 32)) + b"\n"
    packer = compressor().compressobj()
    head = SegmentLine(format=1, run=RUN, writer="trainer-1", n=0, chain="")
    (key,) = files
    packed = packer.compress(msgspec.json.encode(head) + b"\n" + FACT + wrong) + packer.flush(1)
    with pytest.raises(IntegrityError, match="chain line"):
        await read(changed(files, key, packed))


async def test_a_newer_format_and_another_run_are_named():
    for head, error, said in (
        (SegmentLine(format=2, run=RUN, writer="trainer-1", n=0, chain=""), ConfigError, "format 2"),
        (SegmentLine(format=1, run="f" * 32, writer="trainer-1", n=0, chain=""), IntegrityError, "another run"),
    ):
        packer = compressor().compressobj()
        packed = packer.compress(msgspec.json.encode(head) + b"\n" + FACT) + packer.flush(1)
        with pytest.raises(error, match=said):
            await read(Files({segment_key("trainer-1", 0): packed}))


@pytest.mark.parametrize("batch", [b"\n", b"x"], ids=["lines", "one line"])
async def test_a_bomb_ends_before_it_fills_the_memory(batch):
    block = (((128 << 10) << 3) | 2).to_bytes(3, "little") + batch  # 128 KiB of one byte
    blocks = (MAX_SEGMENT_BYTES >> 17) + 2
    with pytest.raises(IntegrityError, match="segment 0"):
        await read(Files({segment_key("trainer-1", 0): FRAME_HEADER + block * blocks}))


@given(data=st.binary(max_size=400), framed=st.booleans())
async def test_garbage_is_refused_or_torn_and_never_a_fact(data, framed):
    files = Files({segment_key("trainer-1", 0): FRAME_HEADER * framed + data})
    try:
        found, _ = await read(files)
    except (IntegrityError, ConfigError):
        return
    assert found == []
