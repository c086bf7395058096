"""From a URL to a store."""

import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from etude.errors import ConfigError, ObjectExistsError, StoreError
from etude.interfaces import Bucket, ObjectStore
from etude.store.faulty import Faults, FaultyStore
from etude.store.local import FileStore
from etude.store.remote import RemoteStore, explain
from etude.store.retrying import RetryingStore
from etude.telemetry.clock import SystemClock

CLOUD_SCHEMES = ("s3", "gs", "az")
_PROBE_KEY = "probes/conditional"


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
    try:
        # No client options here: any would hide those of the environment, such as AWS_ALLOW_HTTP and AWS_TIMEOUT.
        backend = from_url(url, retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=60)})
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


async def probe_conditional_writes(store: ObjectStore) -> None:
    """Raise `StoreError` if the store ignores conditions, as several S3 clones do: two trainers could then both win."""
    await store.put(_PROBE_KEY, b"probe")
    refuses_swap = not await store.compare_and_swap(_PROBE_KEY, b"wrong", expected=b"not what is there")
    try:
        await store.put(_PROBE_KEY, b"wrong", create_only=True)
        refuses_create = False
    except ObjectExistsError:
        refuses_create = True
    swaps = await store.compare_and_swap(_PROBE_KEY, b"swapped", expected=b"probe")
    if not (refuses_swap and refuses_create and swaps):
        msg = f"the store does not honour conditional writes (tried on {_PROBE_KEY!r}); use one that does"
        raise StoreError(msg)
