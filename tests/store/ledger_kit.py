# pyright: basic
"""Ledgers as bytes, for the tests that change them."""

from typing import Any

from etude.errors import ObjectMissingError
from etude.store.ledger_reader import LedgerReader
from etude.store.ledger_segments import SegmentWriter

RUN = "0" * 32


class Files(dict[str, bytes]):
    """An object store of bytes in memory, as far as readers need one."""

    async def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        del max_bytes
        if key not in self:
            raise ObjectMissingError(key)
        return self[key]

    async def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self if key.startswith(f"{prefix}/"))


def written(
    root, batches, *, writer="trainer-1", segment_bytes=1 << 20, end=False
) -> tuple[Files, list[tuple[int, int]]]:
    """Return a writer's segments, and after each batch how many there were and how large the last one was."""
    segments = SegmentWriter(root, writer=writer, run_id=RUN, segment_bytes=segment_bytes)
    places = []
    for batch in batches:
        segments.append(batch)
        segments.write()
        places.append((len(segments.sizes), segments.sizes[max(segments.sizes)]))
    if end:
        segments.end()
    segments.release()
    paths = [segments.path(number) for number in segments.sizes]
    return Files({str(path.relative_to(root)): path.read_bytes() for path in paths}), places


async def read(store: Any, writer: str = "trainer-1") -> tuple[list[Any], LedgerReader]:
    reader = LedgerReader(store, writer, run_id=RUN)
    return [fact async for batch in reader for fact in batch], reader
