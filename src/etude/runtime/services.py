"""What a run directory says about the processes that work on it: leases, and the state of its controller."""

import asyncio
import os
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from etude.errors import ObjectMissingError, StoreError
from etude.interfaces import ObjectStore
from etude.store.ledger import upload_spool
from etude.store.ledger_reader import read_writer
from etude.telemetry.waits import Wait

SERVICES_PREFIX = "services/"
CONTROLLER_KEY = f"{SERVICES_PREFIX}controller.json"
_MAX_BYTES = 1 << 20

Record = TypeVar("Record")


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """services/<name>.json: a process of the run, as its supervisor saw it last."""

    name: str
    kind: str
    """`trainer` or `sampler`."""
    pid: int
    host: str
    url: str
    """Empty while it comes up."""
    writer: str
    """Folder of its ledger."""
    started: float
    """Wall-clock seconds."""
    expires: float
    """Beyond it nobody vouches for the process: its supervisor is gone, or cannot write."""
    ended: float = 0.0
    """0 while it runs."""
    reason: str = ""
    """Why it ended; empty for a clean end."""
    restarts: int = 0
    """Lives before this one, under the same supervisor."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """services/controller.json: what the process of `etude run` is at."""

    pid: int
    host: str
    started: float
    beat: float
    """When its event loop last turned."""
    written: float
    """When this was written, by a thread that a blocked event loop does not stop."""
    lag_s: float = 0.0
    """How late the event loop was, at most, in the last seconds."""
    blocked_in: str = ""
    """Innermost frames of what keeps the event loop from turning; empty when it turns."""
    waits: tuple[Wait, ...] = ()
    stage: str = ""
    ended: float = 0.0
    """0 while it runs."""
    error: str = ""
    """What ended it; empty for a clean end."""


def lease_key(name: str) -> str:
    """Return where the lease of a process is kept."""
    return f"{SERVICES_PREFIX}{name}.json"


def this_host() -> str:
    """Return the name by which leases know this machine."""
    return socket.gethostname()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that is dead and not yet reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


async def read_controller(store: ObjectStore) -> ControllerState | None:
    """Return the newest state of the controller, None when the run never had one. Raise `StoreError` for damage."""
    try:
        data = await store.get(CONTROLLER_KEY, max_bytes=_MAX_BYTES)
    except ObjectMissingError:
        return None
    return _decoded(CONTROLLER_KEY, data, ControllerState)


async def read_leases(store: ObjectStore) -> list[Lease]:
    """Return the leases of all processes that the run ever had, by name. Raise `StoreError` for damage."""
    keys = [key for key in await store.list(SERVICES_PREFIX) if key != CONTROLLER_KEY]
    contents: list[Awaitable[bytes]] = [store.get(key, max_bytes=_MAX_BYTES) for key in keys]
    return [_decoded(key, data, Lease) for key, data in zip(keys, await asyncio.gather(*contents), strict=True)]


async def ledger_end(store: ObjectStore, writer: str, *, local: Path | None = None) -> tuple[int, str]:
    """Return how many facts a process left in its ledger, and the chain value after them.

    `local` is this machine's directory of the run, when the process lived here: it may have left facts there alone.

    Read in a thread: checking a long ledger takes its time. Raise `IntegrityError` where it is damaged.
    """

    async def read() -> tuple[int, str]:
        reader = read_writer(store, writer)
        async for _ in reader:
            pass
        return reader.events, reader.chain

    if local is not None:
        await upload_spool(store, local, [writer])
    return await asyncio.to_thread(asyncio.run, read())


def _decoded(key: str, data: bytes, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{key} is damaged ({error}): delete it; a run that goes on writes it anew") from error
