"""From a URL to a store."""

import asyncio
import os
import secrets
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, S3Store, from_url

from etude.errors import ConfigError, ObjectExistsError, StoreError
from etude.interfaces import Bucket, ErasableStore
from etude.store.explaining import explain
from etude.store.faulty import Faults, FaultyStore
from etude.store.local import FileStore
from etude.store.remote import RemoteStore
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import SystemClock

if TYPE_CHECKING:
    from obstore.store import RetryConfig

CLOUD_SCHEMES = ("s3", "gs", "az")
_RETRIES: "RetryConfig" = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
_PROBES = 10
"""Times that a store may refuse all swaps without a reason."""
_RIVALS = 4


def open_store(url: str) -> Bucket:
    """Return the store that holds everything under `url`.

    A plain path or `file://` is a directory, created if need be; `s3://`, `gs://` and `az://` are a bucket and a
    prefix, with credentials and endpoint from the environment as their own tools read them (`AWS_...`, `GOOGLE_...`,
    `AZURE_...`). Raise `ConfigError` for another scheme.

    For tests, `memory://` is a store of its own per call, and `faulty+file:///path?fail=0.1&list_delay_s=2` a directory
    behind a client that retries, with the faults of `Faults` that its query names: the shares `fail`, `lost_reply` and
    `lost_swap`, and `list_delay_s` and `max_delay_s` for late listings and calls that overtake each other.
    """
    if "://" not in url:
        return FileStore(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "faulty+file" and not parts.netloc:
        return _faulty(url, FileStore(Path(unquote(parts.path))), parts.query)
    if parts.scheme == "memory":
        return RemoteStore(MemoryStore(), name="memory://")
    if parts.scheme not in CLOUD_SCHEMES:
        msg = f"run.url {url!r}: use a path, or file:///path, s3://, gs:// or az:// with bucket and prefix"
        raise ConfigError(msg)
    if parts.query or parts.fragment:
        msg = f"run.url {url!r}: nothing may follow the prefix; endpoint and region are AWS_ENDPOINT_URL and AWS_REGION"
        raise ConfigError(msg)
    try:
        # No client options here: any would hide those of the environment, such as AWS_ALLOW_HTTP and AWS_TIMEOUT.
        if parts.scheme == "s3":
            # Not every store deletes several objects at once, and only one is ever asked for.
            backend = S3Store.from_url(url, config={"disable_bulk_delete": True}, retry_config=_RETRIES)
        else:
            backend = from_url(url, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        msg = f"run.url {url!r} cannot be opened: {explain(error)}"
        raise ConfigError(msg) from error
    return RemoteStore(backend, name=url)


def _faulty(url: str, inner: FileStore, query: str) -> Bucket:
    """Return a store that fails as the query says, with a client that retries."""
    try:
        numbers = {name: float(values[-1]) for name, values in parse_qs(query, strict_parsing=bool(query)).items()}
    except ValueError as error:
        msg = f"run.url {url!r}: its query must be numbers such as fail=0.1 ({error})"
        raise ConfigError(msg) from error
    shares = {"fail", "lost_reply", "lost_swap"}
    seconds = {"max_delay_s", "list_delay_s"}
    sound = all(number >= 0.0 and (name in seconds or number < 1.0) for name, number in numbers.items())
    if not (shares | seconds).issuperset(numbers) or not sound:
        msg = (
            f"run.url {url!r}: its query may have {', '.join(sorted(shares))}, each at least 0 and below 1, "
            f"and {', '.join(sorted(seconds))}"
        )
        raise ConfigError(msg)
    clock = SystemClock()
    faults = msgspec.convert(numbers, Faults)
    return RetryingStore(FaultyStore(inner, clock=clock, faults=faults, seed=os.getpid()), clock=clock)


async def probe_conditional_writes(store: ErasableStore) -> None:
    """Raise `StoreError` if the store ignores conditions, as several S3 clones do: two trainers could then both win."""
    key = f"probes/{secrets.token_hex(8)}"
    await store.put(key, b"probe")
    try:
        refuses_create = await _refuses_create(store, key)
        winners = await _winners(store, key)
    finally:
        with suppress(StoreError):  # of who may write, but not delete: some bytes stay
            await store.delete(key)
    if not refuses_create or winners > 1:
        msg = f"the store ignores conditions of writes (tried on {key!r}), so two trainers could both win; use another"
        raise StoreError(msg)
    if not winners:
        msg = (
            f"the store refuses every conditional write (tried on {key!r}), so nothing could be published; see whether "
            f"a proxy changes its ETags, or use another store"
        )
        raise StoreError(msg)


async def _refuses_create(store: ErasableStore, key: str) -> bool:
    try:
        await store.put(key, b"wrong", create_only=True)
    except ObjectExistsError:
        return True
    return False


async def _winners(store: ErasableStore, key: str) -> int:
    """Return how many of several writers at the same time replace the same bytes; of a store that works, one does."""
    for _ in range(_PROBES):
        swaps = (store.compare_and_swap(key, f"rival {n}".encode(), expected=b"probe") for n in range(_RIVALS))
        if winners := sum(await asyncio.gather(*swaps)):
            return winners
    return 0
