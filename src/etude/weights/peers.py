"""Replicas of one cluster divide a download and pass on their parts, so that it is paid for once.

Of the readers that are there each object has one owner. Its owner takes it from the store, the others ask the owner:
`GET /objects/{lineage}/{sha256}?size=N`. Nobody is trusted: an object counts only with its sha256, and whoever is slow,
gone or lies costs one attempt, after which the store is asked.
"""

import asyncio
import hashlib
import ipaddress
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from etude.errors import HostError, IntegrityError, StoreError
from etude.weights.chain import ChainKeys, check_lineage, is_sha256
from etude.weights.downloads import Objects, Wanted, check

_SIZE = re.compile(r"[0-9]{1,18}")
_MAX_PEERS = 256


def owner_of(name: str, readers: Sequence[str]) -> str:
    """Return the reader whose part of the download an object is; when one comes or goes few objects change hands."""
    return max(readers, key=lambda reader: hashlib.sha256(f"{reader} {name}".encode()).digest())


class RecentObjects:
    """Keeps what was fetched last in memory, and lets those who want the same object at once share one fetch."""

    def __init__(self, source: Objects, *, max_bytes: int = 1 << 30) -> None:
        """Keep at most `max_bytes`; what is larger is passed on and forgotten."""
        self._source = source
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._under_way: dict[str, asyncio.Task[bytes]] = {}

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return the object."""
        held = self._held.get(wanted.name)
        if held is not None:
            self._held.move_to_end(wanted.name)
            return held
        task = self._under_way.get(wanted.name)
        if task is None:
            task = asyncio.create_task(self._source.fetch(wanted), name=f"fetch {wanted.name[:16]}")
            self._under_way[wanted.name] = task
            task.add_done_callback(lambda done: self._keep(wanted.name, done))
        # Whoever gives up waiting does not take the object from the others.
        return await asyncio.shield(task)

    def _keep(self, name: str, task: "asyncio.Task[bytes]") -> None:
        del self._under_way[name]
        if task.cancelled() or task.exception() is not None:
            return
        data = task.result()
        if len(data) > self._max_bytes:
            return
        self._held[name] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._held.popitem(last=False)
            self._num_bytes -= len(oldest)


class PeerObjects:
    """Asks the owner of an object first, and the store when that does not help."""

    def __init__(
        self,
        own: Objects,
        *,
        reader: str,
        peers: Callable[[], Awaitable[Mapping[str, str]]],
        session: ClientSession,
        bytes_per_s: float = 4 << 20,
        patience_s: float = 2.0,
    ) -> None:
        """Own objects come from `own`; `peers` names the readers of the cluster, and where each serves objects.

        A peer gets `patience_s` and the time that `bytes_per_s` takes.
        """
        self.from_peers = 0
        """Bytes that peers gave."""
        self.refused = 0
        """Answers of peers that were not the object, or did not come."""
        self._own = own
        self._reader = reader
        self._peers = peers
        self._session = session
        self._bytes_per_s = bytes_per_s
        self._patience_s = patience_s

    async def fetch(self, wanted: Wanted) -> bytes:
        """Return the object."""
        others = {reader: address for reader, address in (await self._peers()).items() if reader != self._reader}
        owner = owner_of(wanted.name, [self._reader, *others])
        if owner != self._reader:
            try:
                data = await self._ask(others[owner], wanted)
            except (ClientError, TimeoutError, IntegrityError):
                self.refused += 1
            else:
                self.from_peers += len(data)
                return data
        return await self._own.fetch(wanted)

    async def _ask(self, address: str, wanted: Wanted) -> bytes:
        lineage = wanted.key.split("/")[-3]
        timeout = ClientTimeout(total=self._patience_s + wanted.size / self._bytes_per_s)
        url = f"{check_address(address)}/objects/{lineage}/{wanted.name}?size={wanted.size}"
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
            answer.raise_for_status()
            data = bytearray()
            async for part in answer.content.iter_chunked(1 << 20):
                data += part
                if len(data) > wanted.size:
                    break
        return await asyncio.to_thread(check, wanted, bytes(data))


def check_address(address: str) -> str:
    """Return the address, or raise `IntegrityError`: leases lie in the bucket, and must not name any URL they like."""
    try:
        parts = urlsplit(address)
        ipaddress.ip_address(parts.hostname or "")
        plain = bool(parts.port) and address == f"http://{parts.netloc}" and "@" not in parts.netloc
    except ValueError:
        plain = False
    if not plain:
        msg = f"{address[:80]!r} is no http://IP:PORT; delete the lease that names it"
        raise IntegrityError(msg)
    return address


@asynccontextmanager
async def serving_objects(
    objects: Objects, *, keys: ChainKeys, max_bytes: int, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[str]:
    """Serve objects to the peers, fetched when first asked for, and yield the base URL; port 0 takes a free one.

    Raise `HostError` when the port is taken or not ours to take. Without credentials, and only objects of this chain:
    whoever reaches the port can read what is published, so bind it to the cluster's own network.
    """

    async def answer(request: web.Request) -> web.Response:
        lineage, name = request.match_info["lineage"], request.match_info["name"]
        size = _SIZE.fullmatch(request.query.get("size", ""))
        if not is_sha256(name) or size is None or int(size[0]) > max_bytes:
            raise web.HTTPBadRequest(text=f"ask for /objects/LINEAGE/SHA256?size=N, N at most {max_bytes}")
        try:
            key = keys.object(check_lineage(lineage), name)
            data = await objects.fetch(Wanted(key=key, name=name, size=int(size[0])))
        except StoreError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=data, content_type="application/octet-stream")

    application = web.Application()
    application.add_routes([web.get("/objects/{lineage}/{name}", answer)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            msg = f"cannot serve weights on {host}:{port} ({error.strerror}); choose another port, or 0"
            raise HostError(msg) from error
        address: tuple[str, int] = runner.addresses[0]
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()
