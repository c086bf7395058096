"""The ledgers of a run into the database, one after the other."""

import msgspec

from etude.errors import IntegrityError, ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.runtime.audit.facts import Facts
from etude.store.ledger_format import read_run_id, read_seal
from etude.store.ledger_reader import read_writer, writers
from etude.telemetry.events import Event, GroupTaken, Published, RolloutStarted

_FIRST = ("controller-", "trainer-")
"""While the run goes on, who depends is read before who is depended on: controllers speak of what trainer and samplers
have flushed before. `load_late` is for the dependencies that go the other way."""


async def load_ledger(store: ObjectStore, facts: Facts) -> None:
    """Read every ledger as far as it checks; what does not is kept as the writer's damage.

    Raises:
        StoreError: There is no ledger, or it cannot be read.
        ConfigError: A newer etude wrote it.
        IntegrityError: ledger/run.json or ledger/seal.json is damaged.
    """
    try:
        run_id = await read_run_id(store)
    except ObjectMissingError as error:
        msg = "there is no run with a ledger here: ledger/run.json is missing; give the value of run.url"
        raise StoreError(msg) from error
    # Before the ledgers: a run that goes on may be sealed while they are read.
    sealed = await read_seal(store)
    if sealed is not None:
        facts.sql.execute("INSERT INTO seal VALUES(?, ?, ?)", msgspec.structs.astuple(sealed))
    names = await writers(store)
    for name in sorted(names, key=lambda name: (_rank(name), name)):
        await _load_writer(store, facts, name, run_id)
    if sealed is None and (sealed := await read_seal(store)) is not None:
        query = "INSERT INTO seal SELECT ?1, ?2, ?3 WHERE ?2 <= (SELECT events FROM writer WHERE name = ?1)"
        facts.sql.execute(query, msgspec.structs.astuple(sealed))
    facts.flush()
    facts.index()


def _rank(name: str) -> int:
    return next((rank for rank, prefix in enumerate(_FIRST) if name.startswith(prefix)), len(_FIRST))


async def load_late(store: ObjectStore, facts: Facts) -> None:
    """Read on in the ledgers of controller and trainers that go on, which were read before those of the samplers.

    What they have by now explains what samplers and trainers say of things that began in between; nothing else of it is
    judged.
    """
    facts.sql.execute("CREATE TABLE late(kind TEXT, what TEXT, PRIMARY KEY(kind, what))")
    query = "SELECT name, events FROM writer WHERE NOT closed AND service IN ('controller', 'trainer')"
    for name, known in list(facts.rows(query)):
        n = 0
        try:
            async for batch in read_writer(store, name):
                for event in batch:
                    if n >= known and (late := _late(event)):
                        facts.sql.execute("INSERT OR IGNORE INTO late VALUES(?, ?)", late)
                    n += 1
        except IntegrityError:
            continue  # told when it was read the first time, or will be the next time


def _late(event: Event) -> tuple[str, str] | None:
    match event:
        case RolloutStarted():
            return "session", event.session
        case Published():
            return "published", f"{event.lineage}/{event.version}/{event.digest}"
        case GroupTaken():
            return "taken", f"{event.version + 1}/{event.ticket}"
        case _:
            return None


async def _load_writer(store: ObjectStore, facts: Facts, name: str, run_id: str) -> None:
    reader = read_writer(store, name, run_id=run_id)
    w = facts.writer(name)
    n = 0
    damage = ""
    try:
        async for batch in reader:
            for event in batch:
                facts.add(w, n, event)
                n += 1
            facts.mark(w, reader.events, reader.chain)
    except IntegrityError as error:
        damage = str(error)
    facts.end_writer(
        w, events=n, torn=reader.torn_bytes, damage=damage, closed=reader.closed, cut=reader.closed and not reader.ended
    )
