# pyright: basic
"""What clients without manners get from the port, and that the others do not notice."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from etude.gateway.door import Door, Reply
from etude.gateway.refusals import CallRefusedError, unknown_key
from etude.gateway.visitors import Bounds

CLIENTS = []
GOOD = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: good\r\n"


async def echo(head, read):
    """Answer with the body's length; the header `Authorization` is the owner, and `bad` is nobody."""
    owner = head.headers.get("Authorization", "bad")
    try:
        if owner == "bad":
            raise unknown_key()
        body = await read(owner)
    except CallRefusedError as refusal:
        return refuse(head, refusal)
    return Reply(body=json.dumps(len(body)).encode())


def refuse(_, refusal):
    return Reply(status=refusal.status, body=json.dumps(refusal.code).encode())


@asynccontextmanager
async def opened(handler=echo, **bounds):
    door = Door(handler, refuse=refuse, bounds=Bounds(**{"body_bytes": 1000, **bounds}))
    await door.open(0)
    CLIENTS.clear()
    yield door
    for client in CLIENTS:
        client.writer.transport.abort()
        with suppress(ConnectionError):
            await client.writer.wait_closed()
    await door.close()


async def until(holds):
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never holds")


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self):
        """Return status and body; None when the connection ends instead."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(size))

    async def is_cut(self):
        try:
            return await asyncio.wait_for(self.reader.read(), 5) == b""
        except ConnectionError:
            return True


async def connect(door):
    CLIENTS.append(Client(*await asyncio.open_connection("127.0.0.1", door.port)))
    return CLIENTS[-1]


async def test_a_head_that_does_not_end_is_cut_and_a_body_that_does_not_is_refused():
    async with opened(stranger_s=0.1, body_s=0.1) as door:
        slow = await connect(door)
        await slow.send(GOOD)
        assert await slow.is_cut()
        slow = await connect(door)
        await slow.send(GOOD + b"Content-Length: 10\r\n\r\nabc")
        assert await slow.answer() == (400, "invalid_request")
        assert door.visitors.cut == 1


async def test_a_body_beyond_the_limit_is_refused_from_its_head_and_from_its_length():
    async with opened() as door:
        large = await connect(door)
        await large.send(GOOD + b"Content-Length: 1073741824\r\n\r\n")
        assert await large.answer() == (413, "request_too_large")
        large = await connect(door)
        await large.send(GOOD + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert await large.answer() == (413, "request_too_large")


async def test_a_client_that_sends_on_sees_why_it_was_refused():
    async with opened() as door:
        large = await connect(door)
        await large.send(GOOD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        assert await large.answer() == (413, "request_too_large")
        await large.send(GOOD + b"Content-Length: 3\r\n\r\nabc")
        assert await large.answer() == (200, 3)


async def test_nothing_is_read_of_a_request_without_a_key_and_its_connection_ends():
    read = []

    async def handler(head, body):
        read.append(head.path)
        return await echo(head, body)

    async with opened(handler) as door:
        stranger = await connect(door)
        await stranger.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        assert await stranger.answer() == (401, "invalid_api_key")
        assert await stranger.is_cut()
    assert read == ["/1"]


async def test_the_oldest_stranger_goes_when_there_are_too_many_and_who_has_a_key_stays():
    async with opened(strangers=5) as door:
        friend = await connect(door)
        await friend.send(GOOD + b"Content-Length: 0\r\n\r\n")
        assert await friend.answer() == (200, 0)
        flood = [await connect(door) for _ in range(12)]
        late = await connect(door)
        await late.send(GOOD + b"Content-Length: 0\r\n\r\n")
        assert await late.answer() == (200, 0)
        assert await flood[0].is_cut()
        await friend.send(GOOD + b"Content-Length: 0\r\n\r\n")
        assert await friend.answer() == (200, 0)
        assert (len(door.visitors), door.visitors.cut) == (7 - 1, 8)


async def test_one_owner_has_so_many_connections_and_others_have_theirs():
    async with opened(connections=2) as door:
        clients = [await connect(door) for _ in range(3)]
        answers = []
        for client in clients:
            await client.send(GOOD + b"Content-Length: 0\r\n\r\n")
            answers.append((await client.answer())[0])
        assert answers == [200, 200, 429]
        other = await connect(door)
        await other.send(GOOD.replace(b"good", b"other") + b"Content-Length: 0\r\n\r\n")
        assert await other.answer() == (200, 0)
        clients[0].writer.close()
        assert await clients[0].is_cut()
        again = await connect(door)
        await again.send(GOOD + b"Content-Length: 0\r\n\r\n")
        assert await again.answer() == (200, 0)


async def test_bodies_of_one_owner_that_are_being_read_are_bounded_together():
    async with opened(buffered_bytes=1500, body_s=5.0) as door:
        begun = GOOD + b"Content-Length: 1000\r\n\r\n" + b"x" * 800
        first, second = await connect(door), await connect(door)
        await first.send(begun)
        await until(lambda: door.visitors.buffered("good") == 800)
        await second.send(begun)
        assert await second.answer() == (429, "too_many_bytes")
        await first.send(b"x" * 200)
        assert await first.answer() == (200, 1000)
        third = await connect(door)
        await third.send(begun + b"x" * 200)
        assert await third.answer() == (200, 1000)


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"POST / HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        b"POST /" + b"y" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused_in_the_envelope_and_logged_nowhere(head, caplog):
    async with opened() as door:
        client = await connect(door)
        await client.send(head)
        assert await client.answer() in {(400, "invalid_request"), (401, "invalid_api_key")}
        assert await client.is_cut()
    assert not caplog.records


async def test_a_body_that_is_not_what_its_head_says_is_refused_and_a_continuation_is_answered():
    async with opened() as door:
        client = await connect(door)
        await client.send(GOOD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab")
        assert await client.answer() == (400, "invalid_request")
        await client.send(GOOD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"ab")
        assert await client.answer() == (200, 2)


async def test_a_client_that_does_not_read_is_cut():
    async def pour():
        while True:
            yield b"x" * (1 << 20)

    async def handler(_, read):
        await read("owner")
        return Reply(parts=pour())

    async with opened(handler, write_s=0.2) as door:
        client = await connect(door)
        await client.send(GOOD + b"Content-Length: 0\r\n\r\n")
        await until(lambda: not len(door.visitors))


async def test_half_closed_and_cut_connections_leave_nothing_behind_and_no_word_in_the_log(caplog):
    async with opened() as door:
        for data in (b"", GOOD, GOOD + b"Content-Length: 9\r\n\r\nabc"):
            half = await connect(door)
            await half.send(data)
            half.writer.write_eof()
            await half.is_cut()
            gone = await connect(door)
            await gone.send(data)
            gone.writer.transport.abort()
        await until(lambda: not len(door.visitors))
    assert not caplog.records
