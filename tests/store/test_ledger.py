# pyright: basic
from typing import Any

from etude.store.ledger import LedgerWriter
from etude.store.ledger_format import open_run_id
from etude.store.ledger_reader import LedgerReader, read_writer, writers
from etude.store.opening import open_store
from etude.telemetry.events import Admitted, Closed, Opened


async def read(store, writer) -> tuple[list[Any], LedgerReader]:
    reader = read_writer(store, writer)
    return [fact async for batch in reader for fact in batch], reader


async def test_a_writer_reads_back_as_it_was_recorded(tmp_path):
    store = open_store(str(tmp_path))
    ledger = await LedgerWriter.open(store, None, "controller", await open_run_id(store))
    async with ledger:
        for ticket in range(100):
            ledger.record(Admitted(ticket=ticket, task=f"t{ticket}", version=3))
            if ticket % 30 == 0:
                await ledger.flush()
    facts, reader = await read(store, ledger.writer)
    assert isinstance(facts[0], Opened)
    assert [fact.ticket for fact in facts[1:-1]] == list(range(100))
    assert isinstance(facts[-1], Closed)
    assert reader.closed
    assert (reader.events, reader.chain, reader.torn_bytes) == (ledger.events, ledger.chain, 0)
    assert await writers(store) == [ledger.writer]
