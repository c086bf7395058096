# pyright: basic
"""Whoever starts a run is told what it is still waiting for."""

import asyncio

from etude.runtime.watch import telling_waits
from etude.telemetry.waits import waiting


async def test_what_is_waited_for_is_told_while_it_lasts_and_no_longer():
    notes, told = [], asyncio.Event()

    def note(text):
        notes.append(text)
        told.set()

    start = waiting("its start", owner="etude run", on="the trainer", deadline_s=60)
    async with telling_waits(note, after_s=0.05), start, asyncio.timeout(30):
        await told.wait()
    assert notes[0] == "still waiting for its start on the trainer: 0 s, for 60 s more at most"
    assert len(notes) <= 2
