"""Carries connections from inside a sandbox to one loopback port of the host."""

import asyncio
import contextlib
import socket

_CHUNK = 1 << 16
_MAX_CONNECTIONS = 64


class Relay:
    """Accepts on a socket that lives in a sandbox's network namespace."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._listener = listener
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.failure = ""
        """Why a connection could not be carried on, which the sandbox cannot tell from the model's hanging up."""

    async def start(self) -> None:
        """Begin to accept; at most 64 connections at once, further ones are closed."""
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

    async def close(self) -> None:
        """Cut every connection."""
        if self._server:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._carry(reader, writer)
        self._connections.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            self.failure = f"port {self._port} of this host: {error}"
            writer.close()
            raise
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pump(reader, far_writer), name="to the model")
                ways.create_task(_pump(far_reader, writer), name="from the model")
        except* OSError:
            pass
        finally:
            writer.close()
            far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of one direction, and pass that end on."""
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
