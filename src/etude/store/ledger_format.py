"""What the bytes of a run ledger look like; docs/design/0009-ledger.md says why.

    ledger/run.json                   format and random id of the run
    ledger/<writer>/<n>.jsonl.zst     one zstd frame, flushed block by block:
        {"e":"segment","format":1,"run":...,"writer":...,"n":0,"chain":""}
        {"e":"admitted",...}          facts of `telemetry.events`
        {"e":"chain","events":1,"chain":"5f0c..."}
        ...

A batch is what lies between two chain lines. A chain value is blake2b-128, in hexadecimal, over the text of the chain
value before it (in a new segment: the one in its first line, which is empty at the start) and all bytes since.
"""

import hashlib
import secrets

import msgspec
import zstandard

from etude.errors import ConfigError, IntegrityError, ObjectExistsError, ObjectMissingError
from etude.interfaces import ErasableStore, ObjectStore
from etude.store.opening import probe_conditional_writes

FORMAT = 1
RUN_KEY = "ledger/run.json"
SEAL_KEY = "ledger/seal.json"

BATCH_BYTES = 32 << 10
"""Text of a batch; a longer line is a batch of its own. So several lines are one zstd block: all there or none."""
MAX_LINE_BYTES = 32 << 20
"""A seal names every file of a run's tasks."""
SEGMENT_BYTES = 4 << 20
"""Text after which a segment is ended."""
MAX_SEGMENT_BYTES = SEGMENT_BYTES + MAX_LINE_BYTES + (1 << 20)
"""No segment has more text, and none is larger when it is compressed."""

_WINDOW_LOG = 20
FRAME_HEADER = b"\x28\xb5\x2f\xfd\x04" + bytes([(_WINDOW_LOG - 10) << 3])
"""How every segment begins: magic number, a checksum at the end, the window, no size."""
CHECKSUM_BYTES = 4
_LEVEL = 3
_MAX_RUN_FILE_BYTES = 4096


class SegmentLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="e", tag="segment"):
    """The first line of a segment."""

    format: int
    run: str
    writer: str
    n: int
    chain: str
    """Chain value at the end of the segment before."""


class ChainLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="e", tag="chain"):
    """The last line of a batch."""

    events: int
    """Facts of the writer so far, over all its segments."""
    chain: str


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """ledger/run.json."""

    format: int
    run: str


CHAIN_PREFIX = b'{"e":"chain",'


def segment_key(writer: str, number: int) -> str:
    """Return where a segment lies."""
    return f"ledger/{writer}/{number:06d}.jsonl.zst"


def chain_line(chain: str, events: int, text: bytes | bytearray) -> tuple[str, bytes]:
    """Return the next chain value, over the one before and the text since, and its line."""
    state = hashlib.blake2b(chain.encode(), digest_size=16)
    state.update(text)
    value = state.hexdigest()
    return value, msgspec.json.encode(ChainLine(events=events, chain=value)) + b"\n"


def compressor() -> zstandard.ZstdCompressor:
    """Return what compresses segments, each by a `compressobj`."""
    parameters = zstandard.ZstdCompressionParameters.from_level(  # pyright: ignore[reportUnknownMemberType]
        _LEVEL, window_log=_WINDOW_LOG, write_checksum=1, write_content_size=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def decompressor() -> zstandard.ZstdDecompressor:
    """Return what decompresses segments, each by a `decompressobj` whose memory the window bounds."""
    return zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


class SealFile(msgspec.Struct, frozen=True, kw_only=True):
    """ledger/seal.json: where the run's newest seal lies. Written after it, so that no cut before it passes."""

    writer: str
    events: int
    """Facts of that ledger, the seal included."""
    chain: str
    """Its chain value after them."""


async def read_seal(store: ObjectStore) -> SealFile | None:
    """Return the newest seal, None for a run that was never sealed; raise `IntegrityError` when the file is damaged."""
    try:
        data = await store.get(SEAL_KEY, max_bytes=_MAX_RUN_FILE_BYTES)
    except ObjectMissingError:
        return None
    try:
        return msgspec.json.decode(data, type=SealFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{SEAL_KEY} is damaged ({error}): restore it"
        raise IntegrityError(msg) from error


async def read_run_id(store: ObjectStore) -> str:
    """Return the run's random id.

    Raises:
        ObjectMissingError: The directory has no ledger.
        ConfigError: A newer etude wrote it.
        IntegrityError: The file is damaged.
    """
    data = await store.get(RUN_KEY, max_bytes=_MAX_RUN_FILE_BYTES)
    try:
        run = msgspec.json.decode(data, type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{RUN_KEY} is damaged ({error}): restore it, or choose another run.url"
        raise IntegrityError(msg) from error
    check_format(run.format, RUN_KEY)
    return run.run


async def open_run_id(store: ErasableStore) -> str:
    """Return the run's random id, made by whoever asks first; errors as in `read_run_id`.

    Raise `StoreError` for a store in which no run may begin, as several writers would overwrite each other.
    """
    try:
        return await read_run_id(store)
    except ObjectMissingError:
        await probe_conditional_writes(store)
    try:
        made = RunFile(format=FORMAT, run=secrets.token_hex(16))
        await store.put(RUN_KEY, msgspec.json.encode(made), create_only=True)
    except ObjectExistsError:
        return await read_run_id(store)
    return made.run


def check_format(number: int, place: str) -> None:
    """Raise `ConfigError` for a ledger that this etude does not know how to read."""
    if number != FORMAT:
        msg = f"{place} has ledger format {number}, this etude reads format {FORMAT}: use the etude that wrote it"
        raise ConfigError(msg)
