"""Nobody keeps boards out of a gateway, whatever connections and downloads they open: in virtual time, and by TLS."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
import statistics
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from random import Random

import pytest

from edge_server.gateway.enrolment.fair_slots import FairSlots, StalledSources, protect_slot
from edge_server.gateway.enrolment.service import EnrolmentService
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.download import DownloadSlots, PackageCatalogue
from edge_server.gateway.packages.store import PACKAGES, add_packages
from edge_server.gateway.site_folder import SiteFolder
from tests.edge_server.gateway.enrolments import Gateway, authorities, server_context
from tests.edge_server.gateway.sites import put_deb

GUARD_S = 300.0
BIG = 96 << 20
STRANGER, BOARD, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def taken_by(places, *sources):
    """Take a place for each, the oldest first; returns who had to leave, in the order in which they did."""
    gone = []
    for source in sources:
        place = places.acquire(source, lambda source=source: gone.append(source))
        assert place is not None, source
    return gone


def test_who_has_at_least_two_more_loses_its_oldest():
    places = FairSlots(4, 4, 30.0, Hand())
    gone = taken_by(places, "a", "a", "a", "b", "c")
    assert gone == ["a"]
    assert places.by_source == Counter(a=2, b=1, c=1)
    assert taken_by(places, "d") == []  # the callback of the one before was called
    assert places.by_source == Counter(a=1, b=1, c=1, d=1)
    assert places.acquire("e", lambda: None) is None
    assert places.acquire("a", lambda: None) is None


def test_where_all_have_as_few_a_turn_is_kept_and_no_longer():
    clock = Hand()
    places = FairSlots(2, 4, 30.0, clock)
    gone = taken_by(places, "a")
    clock.now = 10.0
    taken_by(places, "b")
    clock.now = 29.9
    assert places.acquire("c", lambda: None) is None
    clock.now = 30.0
    assert places.acquire("b", lambda: None) is None  # not for who has one already
    assert places.acquire("c", lambda: None)
    assert gone == ["a"]
    assert places.acquire("d", lambda: None) is None
    clock.now = 40.0
    assert places.acquire("d", lambda: None)
    assert places.by_source == Counter(c=1, d=1)


def test_one_address_has_no_more_than_its_share_and_a_busy_place_is_kept():
    clock = Hand()
    places = FairSlots(3, 3, 30.0, clock)
    taken_by(places, "a", "a", "a")
    assert places.acquire("a", lambda: None) is None
    clock.now = 99.0
    with protect_slot(places.slots[0]), protect_slot(places.slots[1]), protect_slot(places.slots[2]):
        assert places.acquire("b", lambda: None) is None
    kept = places.slots[0]
    with protect_slot(kept):
        assert places.acquire("b", lambda: None)
    assert kept in places.slots


def test_a_place_that_was_taken_away_is_not_given_back_twice():
    places = FairSlots(2, 2, 30.0, Hand())
    mine = places.acquire("a", lambda: None)
    taken_by(places, "a", "b")
    assert mine not in places.slots
    places.release(mine)
    assert places.by_source == Counter(a=1, b=1)


@pytest.mark.parametrize("addresses", [1, 12, 60])
def test_eighty_boards_finish_beside_a_stranger_who_takes_whatever_there_is(addresses):
    """A stranger of many addresses asks three times as often as all boards, and never lets go.

    Each board has 30 s to load, goes on where it was, and asks again a second after it was refused or cut off.
    """
    random, clock = Random(1), Hand()
    places = FairSlots(48, 4, 30.0, clock)
    left = dict.fromkeys((f"board-{number}" for number in range(80)), 30)
    held = {}
    while left:
        clock.now += 1.0
        assert clock.now < 3600.0, f"{len(left)} boards are kept out by {places.by_source}"
        for board in [one for one in held if held[one] in places.slots]:
            left[board] -= 1
            if not left[board]:
                places.release(held.pop(board))
                del left[board]
        asking = [one for one in left if held.get(one) not in places.slots]
        strangers = [f"stranger-{random.randrange(addresses)}" for _ in range(3 * len(asking))]
        for source in random.sample([*asking, *strangers], len(asking) + len(strangers)):
            place = places.acquire(source, lambda: None)
            if place and source in left:
                held[source] = place
        assert len(places.slots) <= 48
        assert max(places.by_source.values()) <= 4


@asynccontextmanager
async def running(tmp_path, places, **more):
    context = server_context(tmp_path / "tls")
    service = EnrolmentService(Gateway().registrar, lambda: context, GUARD_S, handshake_slots=places, **more)
    async with asyncio.timeout(GUARD_S), AsyncExitStack() as stack, service.running("127.0.0.1", 0) as port:
        yield service, port, stack


async def connected(stack, port, source, *, speaks=True, buffer=0):
    """Connect from an address of loopback; returns reader and writer."""
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setblocking(False)
    sock.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    trusted = ssl.create_default_context(cadata=authorities()[1].decode())
    more = {"ssl": trusted, "server_hostname": "127.0.0.1"} if speaks else {}
    reader, writer = await asyncio.open_connection(sock=sock, limit=8 << 10, **more)

    async def hang_up():
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()

    stack.push_async_callback(hang_up)
    return reader, writer


async def ask(stack, port, source, path="/ca.pem"):
    """Return the first line of the answer; nothing where there is none."""
    try:
        reader, writer = await connected(stack, port, source)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n")[0]
    except OSError:
        return b""


async def until(holds):
    while not holds():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


async def test_who_holds_all_connections_makes_room_for_a_board(tmp_path):
    """As many as there are, open and silent, of one address: a board of another is answered at once."""
    async with running(tmp_path, FairSlots(4, 4, 3.0, Hand())) as (service, port, stack):
        silent = [await connected(stack, port, STRANGER, speaks=False) for _ in range(4)]
        await until(lambda: service.handshake_slots.by_source[STRANGER] == 4)
        answer = await ask(stack, port, BOARD)
        with suppress(OSError):
            assert await silent[0][0].read() == b""  # the oldest was hung up on
        assert (answer, service.handshake_slots.by_source[STRANGER]) == (b"HTTP/1.1 200 OK", 3)


async def test_where_each_has_one_connection_a_board_is_let_in_after_a_turn(tmp_path):
    clock = Hand()
    async with running(tmp_path, FairSlots(2, 4, 3.0, clock)) as (service, port, stack):
        for source in (STRANGER, OTHER):
            await connected(stack, port, source, speaks=False)
            await until(lambda source=source: service.handshake_slots.by_source[source] == 1)
        early = await ask(stack, port, BOARD)
        clock.now = 3.0
        assert (early, await ask(stack, port, BOARD)) == (b"", b"HTTP/1.1 200 OK")


async def test_connections_that_come_all_at_once_are_ended_before_they_have_begun_too(tmp_path):
    """Those that are accepted in one go make room for each other before any was served."""
    async with running(tmp_path, FairSlots(8, 8, 0.0, Hand())) as (service, port, stack):
        sources = [f"127.0.1.{number}" for number in range(1, 60)]
        await asyncio.gather(*(connected(stack, port, source, speaks=False) for source in sources))
        answer = await ask(stack, port, BOARD)
        count = len(service.handshake_slots.slots)
    assert answer == b"HTTP/1.1 200 OK"
    assert count <= 8


ADDRESSES = [f"127.0.{net}.{host}" for net in (2, 3) for host in range(1, 211)]


async def flood(port, stop):
    """Begin 500 handshakes a second that go no further, and hold 400 of them."""
    loop, held = asyncio.get_running_loop(), []
    for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((ADDRESSES[number % len(ADDRESSES)], 0))
        with suppress(OSError):
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, b"\x16\x03\x01")
        held.append(sock)
        if len(held) > 400:
            held.pop(0).close()
        await asyncio.sleep(0.002)
    for sock in held:
        sock.close()


async def patient(stack, port, source):
    """Ask until there is an answer; return the seconds."""
    begun = asyncio.get_running_loop().time()
    while await ask(stack, port, source) != b"HTTP/1.1 200 OK":  # noqa: ASYNC110 - as a board that tries again
        await asyncio.sleep(0.2)
    return asyncio.get_running_loop().time() - begun


async def test_handshakes_that_never_end_from_hundreds_of_addresses_keep_no_board_out(tmp_path):
    """420 addresses connect again and again and say nothing: every board was locked out of the service."""
    context = server_context(tmp_path / "tls")
    service = EnrolmentService(Gateway().registrar, lambda: context)
    async with asyncio.timeout(GUARD_S), AsyncExitStack() as stack, service.running("127.0.0.1", 0) as port:
        stop = asyncio.Event()
        flooding = asyncio.create_task(flood(port, stop))
        await asyncio.sleep(5)  # by then each has held a place in vain
        took = [await patient(stack, port, f"127.0.9.{number}") for number in range(1, 21)]
        stop.set()
        await flooding
    assert statistics.median(took) < 1
    assert max(took) < 5


async def dawdle(port, source, stop):
    """Have a handshake, then send a request so slowly that it never ends; begin anew when hung up on."""
    while not stop.is_set():
        with suppress(OSError, ssl.SSLError):
            async with AsyncExitStack() as stack:
                _, writer = await connected(stack, port, source)
                for byte in itertools.cycle(b"POST /join HTTP/1.1 "):
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.5)
                    if stop.is_set():
                        break
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("addresses", [200, 1])
async def test_two_hundred_slow_requests_keep_no_board_out(tmp_path, addresses):
    """Of as many addresses, or all of one."""
    context = server_context(tmp_path / "tls")
    service = EnrolmentService(Gateway().registrar, lambda: context)
    async with asyncio.timeout(GUARD_S), AsyncExitStack() as stack, service.running("127.0.0.1", 0) as port:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(dawdle(port, ADDRESSES[number % addresses], stop))
            await asyncio.sleep(2)
            took = [await patient(stack, port, f"127.0.9.{number}") for number in range(1, 11)]
            stop.set()
    assert statistics.median(took) < 1
    assert max(took) < 5


def test_networks_of_ipv6_have_places_as_one_source_and_dawdlers_give_way_at_once():
    clock = Hand()
    places = FairSlots(4, 2, 3.0, clock, stalled=StalledSources(clock))
    gone = list[str]()

    def take(source):
        return places.acquire(source, lambda: gone.append(source))

    assert take("2001:db8:0:1::1") is not None
    assert take("2001:db8:0:1::2") is not None
    assert take("2001:db8:0:1:ffff::3") is None  # of the same /64, which has as many as one source may have
    assert take("::ffff:10.0.0.1") is not None
    assert take("10.0.0.2") is not None
    assert take("10.0.0.3") is not None  # in the place of the network, which has two more
    assert gone == ["2001:db8:0:1::1"]
    assert take("10.0.0.4") is None  # nobody has had its turn
    places.stalled.add("10.0.0.2")
    assert take("10.0.0.4") is not None
    assert gone[1:] == ["10.0.0.2"]
    assert take("10.0.0.2") is None  # it has no such right itself
    clock.now = 61.0
    assert take("10.0.0.2") is not None


async def test_who_holds_all_downloads_makes_room_for_a_board(tmp_path):
    """Readers that read nothing, of one address; a board of another gets its package whole."""
    folder = SiteFolder(tmp_path / "site")
    initialise(folder, SiteSettings("roof", ("gateway.local",)), datetime(2026, 11, 23, tzinfo=UTC))
    [manifest] = add_packages(folder, [put_deb(tmp_path)])
    name = manifest.builds[0].file
    os.truncate(folder.path / PACKAGES / name, BIG)  # its size counts here alone
    streams = DownloadSlots(most=2, most_each=2, clock=Hand())
    shelf = PackageCatalogue(folder.path)
    places = FairSlots(99, 99, 3.0, Hand())
    async with running(tmp_path, places, packages=shelf, downloads=streams) as (service, port, stack):
        stuck = []
        for _ in range(2):
            reader, writer = await connected(stack, port, STRANGER, buffer=8 << 10)
            writer.write(f"GET /packages/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            stuck.append((await reader.readuntil(b"\r\n\r\n"), reader))
        refused = await ask(stack, port, STRANGER, f"/packages/{name}")
        reader, writer = await connected(stack, port, BOARD)
        writer.write(f"GET /packages/{name} HTTP/1.1\r\nHost: a\r\nRange: bytes=-9\r\n\r\n".encode())
        came = await reader.read()
        await until(lambda: len(service.downloads.slots.slots) == 1)
    assert refused == b"HTTP/1.1 503 Service Unavailable"
    assert came.startswith(b"HTTP/1.1 206 ")
    assert came.endswith(bytes(9))
