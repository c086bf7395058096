"""From a URL to a store."""

from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from etude.errors import ConfigError, ObjectExistsError, StoreError
from etude.interfaces import ObjectStore
from etude.store.local import FileStore
from etude.store.remote import RemoteStore, explain

CLOUD_SCHEMES = ("s3", "gs", "az")
_PROBE_KEY = "probes/conditional"


def open_store(url: str) -> ObjectStore:
    """Return the store that holds everything under `url`.

    A plain path or `file://` is a directory, created if need be; `s3://`, `gs://` and `az://` are a bucket and a
    prefix, with credentials and endpoint from the environment as their own tools read them (`AWS_...`, `GOOGLE_...`,
    `AZURE_...`); `memory://` is a store of its own per call, for tests. Raise `ConfigError` for another scheme.
    """
    if "://" not in url:
        return FileStore(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FileStore(Path(unquote(parts.path)))
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
