"""A sampler in another process."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from etude.errors import (
    ContextOverflowError,
    SamplerBusyError,
    SampleRequestError,
    SamplerError,
    VersionUnavailableError,
)
from etude.types import Completion, SampleRequest, SamplerStatus, Scored, ScoreRequest

_ANSWER_BYTES_MAX = 256 << 20
_ERRORS: dict[str, type[SamplerError]] = {
    kind.__name__: kind
    for kind in (ContextOverflowError, SampleRequestError, SamplerBusyError, VersionUnavailableError)
}

_Record = TypeVar("_Record")


class SamplerClient:
    """Asks the sampler behind a URL; every call ends by its deadline. Use as an async context manager, or `close`.

    All methods raise `SamplerError` when the sampler is gone, mute or answers nonsense, and what the sampler raised
    when it refused.
    """

    def __init__(self, url: str, *, timeout_s: float = 120.0, status_timeout_s: float = 5.0) -> None:
        """Name the sampler.

        Args:
            url: Base URL, such as http://127.0.0.1:8300.
            timeout_s: Deadline of one completion, waiting in the sampler's queue included.
            status_timeout_s: Deadline of everything that needs no decoding.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._status_timeout_s = status_timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> "SamplerClient":
        """Return the client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls under way and later ones fail."""
        self._closed = True
        if self._http is not None:
            await self._http.close()

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the completion; see `EngineSampler.sample` for what it raises."""
        body = msgspec.msgpack.encode(request)
        return _decoded(await self._call("POST", "/sample", self._timeout_s, body), Completion, json=False)

    async def status(self) -> Sequence[SamplerStatus]:
        """Return the sampler's state."""
        return [_decoded(await self._call("GET", "/health", self._status_timeout_s), SamplerStatus, json=True)]

    async def score(self, request: ScoreRequest) -> Scored:
        """Return what the sampler's weights think of given tokens; see `EngineSampler.score` for what it raises."""
        body = msgspec.msgpack.encode(request)
        return _decoded(await self._call("POST", "/score", self._timeout_s, body), Scored, json=False)

    async def cancel(self, request_id: str) -> None:
        """Finish a request now, with what it has drawn."""
        await self._call("DELETE", f"/sample/{quote(request_id, safe='')}", self._status_timeout_s)

    async def leave(self) -> None:
        """Tell the sampler to ask for no new sessions, whoever routes to it."""
        await self._call("POST", "/drain", self._status_timeout_s)

    async def _call(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
        if self._closed:
            # Whoever still asks holds on to a sampler that is gone.
            raise SamplerError(f"sampler {self.url}: {path} was asked for after its connections were closed")
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(timeout_s), self._http.request(method, self.url + path, data=body) as answer:
                content = await _read(answer)
        except TimeoutError as error:
            raise SamplerError(f"sampler {self.url}: no answer to {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SamplerError(f"sampler {self.url}: {path} failed: {type(error).__name__}: {error}") from error
        if answer.status >= 400:  # noqa: PLR2004 - HTTP's first error
            raise _refusal(self.url, answer.status, content)
        return content


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > _ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {_ANSWER_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _decoded(content: bytes, kind: type[_Record], *, json: bool) -> _Record:
    try:
        return msgspec.json.decode(content, type=kind) if json else msgspec.msgpack.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise SamplerError(f"a sampler answered something that is no {kind.__name__}: {error}") from error


def _refusal(url: str, status: int, content: bytes) -> SamplerError:
    try:
        body = msgspec.json.decode(content, type=dict[str, str])
    except msgspec.MsgspecError:
        return SamplerError(f"sampler {url}: HTTP {status} without a reason")
    kind = _ERRORS.get(body.get("error", ""), SamplerError)
    return kind(f"sampler {url}: {body.get('message', '')}")
