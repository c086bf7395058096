"""The last fact of a command that ended in order: what the run directory holds that no other fact speaks of."""

import hashlib

import msgspec

from etude.errors import ObjectMissingError
from etude.interfaces import ObjectStore
from etude.runtime.checkpoints import POINTER_KEY
from etude.runtime.directory import CONFIG_KEY, METRICS_KEY, SUMMARY_KEY
from etude.runtime.journal import Journal
from etude.runtime.services import ledger_end
from etude.store.ledger_format import RUN_KEY, SEAL_KEY, SealFile
from etude.store.ledger_reader import writers
from etude.telemetry.events import Sealed
from etude.weights.chain import HEAD_KEY

_FILES = (CONFIG_KEY, SUMMARY_KEY, METRICS_KEY, "report.html", RUN_KEY, HEAD_KEY, POINTER_KEY)
_FOLDERS = ("config", "policy", "tasks", "evals")


async def seal(store: ObjectStore, journal: Journal) -> None:
    """Record how every other ledger ended, and the digests of files; nobody else may write to the run any more.

    Raises:
        IntegrityError: A ledger is damaged.
        StoreError: The store failed.
    """
    keys = [*_FILES, *[key for folder in _FOLDERS for key in await store.list(folder)]]
    others = [name for name in await writers(store) if name != journal.writer]
    ends = {name: await ledger_end(store, name) for name in others}
    journal.record(Sealed(files=await sizes_and_digests(store, keys), writers=ends))
    await journal.flush()
    events, chain = await ledger_end(store, journal.writer)
    await store.put(SEAL_KEY, msgspec.json.encode(SealFile(writer=journal.writer, events=events, chain=chain)))


async def sizes_and_digests(store: ObjectStore, keys: list[str]) -> dict[str, tuple[int, str]]:
    """Return bytes and sha256 of those objects that exist, by key."""
    found: dict[str, tuple[int, str]] = {}
    for key in keys:
        try:
            data = await store.get(key)
        except ObjectMissingError:
            continue
        found[key] = (len(data), hashlib.sha256(data).hexdigest())
    return found
