"""HTTP connections over a real socket: limits, order, misbehaving peers."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from device_agent.inference.http import server as http
from device_agent.inference.http.connection import IDLE_S, LINGER_S, Connection
from device_agent.inference.http.message import Response
from device_agent.inference.http.parser import MAX_HEAD_BYTES
from device_agent.inference.http.server import HttpServer

MOST, PATIENCE_S = 1000, 10.0
PAUSE_S = 0.001
CHUNKED = b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class Site:
    """A server whose answers a test holds back or not, and its clock."""

    def __init__(self) -> None:
        self.now, self.seen, self.hold = 0.0, [], None
        self.server = HttpServer(self.answer, MOST, PATIENCE_S, lambda: self.now)

    def answer(self, request):
        self.seen.append(request)
        response = Response(200, request.path.encode())
        return self.held(response) if self.hold else response

    async def held(self, response):
        await self.hold.wait()
        return response

    async def later(self, seconds):
        """Let so much time pass on the server's clock."""
        self.now += seconds
        self.server.expire()


@asynccontextmanager
async def serving(folder):
    """Serve a site; yield it and a function that connects to it."""
    site, path, writers = Site(), str(folder / "s"), []
    await site.server.listen(0, path)

    async def connect():
        reader, writer = await asyncio.open_unix_connection(path)
        writers.append(writer)
        return reader, writer

    try:
        yield site, connect
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*(one.wait_closed() for one in writers), return_exceptions=True)
        site.server.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - it comes to pass in callbacks of the loop
        await asyncio.sleep(PAUSE_S)


async def answer_of(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), (await reader.readexactly(length)).decode(), head


@asynccontextmanager
async def refused(site, connect, data, status):
    """Send what is refused; the peer is told why, and what else it sends is dropped until it reads that and closes."""
    reader, writer = await connect()
    writer.write(data)
    found, text, head = await answer_of(reader)
    assert (found, "Connection: close" in head) == (status, True)
    writer.write(b"x" * 100_000)
    yield text
    assert await reader.read() == b""
    assert site.server.reserved_bytes == 0


async def test_requests_of_one_connection_are_answered_in_their_order(tmp_path):
    async with serving(tmp_path) as (site, connect):
        reader, writer = await connect()
        site.hold = asyncio.Event()
        writer.write(
            b"GET /1?q HTTP/1.1\r\n\r\nPOST /2 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /3 HTTP/1.1\r\n\r\n"
        )
        await until(lambda: site.seen)
        site.hold.set()
        assert [(await answer_of(reader))[:2] for _ in range(3)] == [(200, "/1"), (200, "/2"), (200, "/3")]
        assert [one.body for one in site.seen] == [b"", b"abc", b""]
        site.hold = None
        writer.write(b"POST /4 HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        writer.write(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
        assert (await answer_of(reader))[:2] == (200, "/4")
        assert (site.seen[-1].body, await reader.read()) == (b"abc", b"")
        assert site.server.reserved_bytes == 0


async def test_a_head_alone_is_answered_by_a_head_alone(tmp_path):
    """Else the body would be read as the begin of the next answer."""
    async with serving(tmp_path) as (_, connect):
        reader, writer = await connect()
        writer.write(b"HEAD /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
        assert b"Content-Length: 2\r\n" in await reader.readuntil(b"\r\n\r\n")
        status, text, head = await answer_of(reader)
        assert (status, text, head[:5]) == (200, "/2", "HTTP/")


async def test_trailers_are_no_headers(tmp_path):
    async with serving(tmp_path) as (site, connect):
        reader, writer = await connect()
        writer.write(CHUNKED + b"2\r\nab\r\n0\r\nContent-Encoding: gzip\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        assert list(site.seen[0].headers) == ["transfer-encoding"]


async def test_a_head_that_comes_with_the_end_of_a_large_request_is_not_measured_by_it(tmp_path):
    async with serving(tmp_path) as (site, connect):
        reader, writer = await connect()
        most = site.server.max_body_bytes = 2 * MAX_HEAD_BYTES
        writer.write(f"POST /1 HTTP/1.1\r\nContent-Length: {most}\r\n\r\n".encode() + b"x" * most + b"GET /2 HT")
        assert (await answer_of(reader))[:2] == (200, "/1")
        writer.write(b"TP/1.1\r\n\r\n")
        assert (await answer_of(reader))[:2] == (200, "/2")


async def test_what_says_that_it_is_too_large_is_refused_before_it_comes(tmp_path):
    """Nothing of the body is kept; in chunks, nothing beyond the limit."""
    async with serving(tmp_path) as (site, connect):
        for size in (MOST + 1, 10**15):
            told = f"POST /1 HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode()
            async with refused(site, connect, told, 413) as text:
                assert str(MOST) in text
        chunked = b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n"
        async with refused(site, connect, chunked + b"200\r\n" + b"x" * 512, 413):
            pass
        assert site.seen == []


async def test_many_large_bodies_at_once_are_one_too_many(tmp_path):
    async with serving(tmp_path) as (site, connect):
        told = f"POST /1 HTTP/1.1\r\nContent-Length: {MOST}\r\n\r\nx".encode()
        kept = [await connect() for _ in range(http.BODIES_AT_ONCE)]
        for _, writer in kept:
            writer.write(told)
        await until(lambda: not (site.server.reserved_bytes < http.BODIES_AT_ONCE * MOST))
        reader, writer = await connect()
        writer.write(told)
        assert (await answer_of(reader))[0] == 503
        for reader, writer in kept:
            writer.write(b"x" * (MOST - 1))
            assert (await answer_of(reader))[0] == 200
        assert site.server.reserved_bytes == 0


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /1 HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 400),
        (b"POST /1 HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /1 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /1 HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /1 HTTP/1.1\r\nA: " + b"x" * MAX_HEAD_BYTES, 431),
        (b"GET /" + b"x" * MAX_HEAD_BYTES, 431),
        (CHUNKED + b"1\r\na\r\n0\r\n" + b"A: b\r\n" * 4 * MAX_HEAD_BYTES, 431),
        (CHUNKED + b"1;" + b"x" * 2 * MAX_HEAD_BYTES, 431),
    ],
)
async def test_what_is_no_request_is_refused(data, status, tmp_path):
    async with serving(tmp_path) as (site, connect):
        async with refused(site, connect, data, status):
            pass
        assert site.seen == []


@pytest.mark.parametrize(
    "begun", [b"G", b"GET /1 HTTP/1.1\r\nHost:", b"POST /1 HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"]
)
async def test_a_request_that_comes_slowly_has_so_much_time_and_no_more(begun, tmp_path):
    """However often a byte of it comes; who is served meanwhile is not disturbed."""
    async with serving(tmp_path) as (site, connect):
        reader, writer = await connect()
        good_reader, good_writer = await connect()
        writer.write(begun)
        good_writer.write(b"GET /2 HTTP/1.1\r\n\r\n")
        assert (await answer_of(good_reader))[0] == 200
        await site.later(PATIENCE_S)
        assert not reader.at_eof()
        writer.write(b"c")
        await site.later(PATIENCE_S / 2)
        assert (await answer_of(reader))[0] == 408
        assert (await reader.read(), site.server.reserved_bytes) == (b"", 0)
        good_writer.write(b"GET /3 HTTP/1.1\r\n\r\n")
        assert (await answer_of(good_reader))[1] == "/3"


async def test_idle_connections_and_refused_ones_that_do_not_close_are_closed(tmp_path):
    async with serving(tmp_path) as (site, connect):
        idle, _ = await connect()
        stubborn, writer = await connect()
        writer.write(b"nonsense\r\n")
        assert (await answer_of(stubborn))[0] == 400
        await site.later(LINGER_S + 1)
        await until(lambda: not (len(site.server.connections) > 1))
        await site.later(IDLE_S)
        assert await idle.read() == b""
        await until(lambda: not (site.server.connections))


async def test_a_peer_that_does_not_read_its_answers_is_parted_with(tmp_path):
    """What waits for it is bounded: nothing more is read from it meanwhile."""
    async with serving(tmp_path) as (site, connect):
        _, writer = await connect()
        large = Response(200, b"x" * (1 << 20))
        site.server.answer = lambda _: large
        writer.transport.pause_reading()
        writer.write(b"GET /1 HTTP/1.1\r\n\r\n" * 4)
        await until(lambda: site.server.connections)
        [connection] = site.server.connections
        await until(lambda: connection.is_blocked)
        await site.later(PATIENCE_S + 1)
        await until(lambda: not (site.server.connections))


async def test_one_connection_too_many_is_told_so_and_the_next_finds_room(tmp_path):
    async with serving(tmp_path) as (site, connect):
        kept = [await connect() for _ in range(http.MAX_CONNECTIONS)]
        for _, writer in kept:
            writer.write(b"POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
        await until(lambda: not any(one.is_idle for one in site.server.connections))
        reader, _ = await connect()
        assert (await answer_of(reader))[0] == 503
        kept[0][1].close()
        while len(site.server.connections) > http.MAX_CONNECTIONS - 1:
            await site.later(LINGER_S + 1)
            await asyncio.sleep(PAUSE_S)
        reader, writer = await connect()
        writer.write(b"GET /1 HTTP/1.1\r\n\r\n")
        assert (await answer_of(reader))[0] == 200


async def test_connections_that_ask_nothing_keep_nobody_out(tmp_path):
    """64 of them made it answer 503 to everybody; the one that is idle longest is closed, and none within a request."""
    async with serving(tmp_path) as (site, connect):
        first, asking = await connect()
        asking.write(b"POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
        await until(lambda: any(not one.is_idle for one in site.server.connections))
        idle = [await connect() for _ in range(60)]
        for used, writer in idle:
            writer.write(b"GET /3 HTTP/1.1\r\n\r\n")
            assert (await answer_of(used))[0] == 200
        idle += [await connect() for _ in range(140)]
        reader, writer = await connect()
        writer.write(b"GET /2 HTTP/1.1\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        asking.write(b"abc")
        assert (await answer_of(first))[0] == 200
        assert len(site.server.connections) <= http.MAX_CONNECTIONS


async def test_a_fault_of_ours_is_one_answer_and_no_end(tmp_path, caplog):
    """At once or on a thread; also where memory was too short."""
    async with serving(tmp_path) as (site, connect):
        reader, writer = await connect()

        async def failing():
            raise KeyError("later")

        def without_memory(_):
            raise MemoryError

        for answer, status in ((lambda _: failing(), 500), (lambda _: {}["x"], 500), (without_memory, 503)):
            site.server.answer = answer
            writer.write(b"POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
            assert (await answer_of(reader))[0] == status
        site.server.answer = site.answer
        writer.write(b"GET /2 HTTP/1.1\r\n\r\n")
        assert ((await answer_of(reader))[1], site.server.reserved_bytes) == ("/2", 0)
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, KeyError]


async def test_who_goes_before_the_answer_leaves_nothing_behind(tmp_path):
    async with serving(tmp_path) as (site, connect):
        site.hold = asyncio.Event()
        _, writer = await connect()
        writer.write(b"POST /1 HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789GET /2 HTTP/1.1\r\n\r\n")
        await until(lambda: site.seen)
        writer.close()
        site.hold.set()
        await until(lambda: not (site.server.connections or site.server.reserved_bytes))


class Heard(asyncio.Transport):
    """What a connection writes, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def pause_reading(self):
        raise AssertionError("each request is answered at once")

    def resume_reading(self):
        pass

    def can_write_eof(self):
        return False


def heard(pieces):
    """Return the requests that a site sees, and all it answers, where its connection is given so many pieces."""
    site, transport = Site(), Heard()
    connection = Connection(site.server)
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
    assert site.server.reserved_bytes == 0
    return site.seen, transport.written


def drawn_request(draw):
    """Return one of few requests, so that one often follows another that is nearly the same."""
    body = draw.choice(("", "a", "b", "\r\n\r\n", "ab", "GET /1 HTTP/1.1\r\n\r\n"))
    path, more = draw.choice(("/1", "/2")), draw.choice(("", "", "", "A: b\r\n", "Expect: 100-continue\r\n"))
    if draw.random() < 0.2:
        return (
            f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{draw.choice(('abc', 'xyz'))}\r\n0\r\n\r\n"
        )
    if draw.random() < 0.2:
        return f"{draw.choice(('GET', 'HEAD'))} {path} HTTP/1.1\r\n{more}\r\n"
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}"


@pytest.mark.parametrize("seed", range(20))
def test_however_requests_are_cut_into_pieces_they_are_the_same(seed):
    """A head that came before is not read again where a request is one piece; byte by byte, each is read."""
    draw = random.Random(seed)
    requests = [drawn_request(draw).encode() for _ in range(60)]
    whole = b"".join(requests)
    seen, written = heard([whole[at : at + 1] for at in range(len(whole))])
    assert len(seen) == len(requests)
    assert heard(requests) == (seen, written)
    cuts = sorted({0, len(whole), *(draw.randrange(len(whole)) for _ in range(40))})
    assert heard([whole[one:two] for one, two in pairwise(cuts)]) == (seen, written)


def test_a_request_with_a_known_head_finds_no_room_where_there_is_none():
    site, transport = Site(), Heard()
    connection = Connection(site.server)
    connection.connection_made(transport)
    request = b"POST /1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    connection.data_received(request)
    taken = http.BODIES_AT_ONCE * MOST - 1
    assert site.server.reserve(taken)
    connection.data_received(request)
    assert b"HTTP/1.1 503 " in transport.written
    assert (len(site.seen), site.server.reserved_bytes) == (1, taken)
