"""What the kernel says of a connection: parsed from bytes of any kernel's age, and read from real sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

import pytest

from shared.transport.tcp_info import Traffic, parse_tcp_info

LINUX_4_9, LINUX_4_10 = 168, 192
"""Bytes of the kernel's answer: up to the delivery rate, and with the busy time and its two shares."""


def info(length: int) -> bytes:
    """Answer as a kernel: 3 s quiet, round trip 200 ms, 20 ms at best, 5 MB acknowledged, 7 MB received, 4 s busy."""
    answer = bytearray(280)
    for offset, value in ((44, 3000), (68, 200_000), (148, 20_000)):
        struct.pack_into("=I", answer, offset, value)
    for offset, count in ((120, 5_000_000), (128, 7_000_000), (168, 4_000_000)):
        struct.pack_into("=Q", answer, offset, count)
    return bytes(answer[:length])


def test_every_figure_stands_where_the_kernel_puts_it() -> None:
    counts = parse_tcp_info(info(280), 1, "192.0.2.1", 50.0)
    assert counts
    assert (counts.acked_bytes, counts.received_bytes, counts.busy_s) == (5_000_000, 7_000_000, 4.0)
    assert (counts.rtt_s, counts.min_rtt_s, counts.at, counts.address) == (0.2, 0.02, 50.0, "192.0.2.1")
    assert counts.quiet_s == pytest.approx(2.8)
    assert counts.is_idle


@pytest.mark.parametrize("offset", [24, 144])
def test_what_is_sent_or_waits_to_be_is_under_way(offset: int) -> None:
    answer = bytearray(info(280))
    answer[offset] = 1
    counts = parse_tcp_info(bytes(answer), 1, "", 0.0)
    assert counts
    assert not counts.is_idle


def test_an_old_kernel_leaves_out_what_it_does_not_know() -> None:
    """4.9 (JetPack 4) counts no busy time; before 4.6 there is no least round trip, and nothing is told at all."""
    old, new = parse_tcp_info(info(LINUX_4_9), 1, "", 0.0), parse_tcp_info(info(LINUX_4_10), 1, "", 0.0)
    assert old
    assert old.busy_s is None
    assert old.acked_bytes == 5_000_000
    assert new
    assert new.busy_s == 4.0
    for length in (0, 1, 104, 151):
        assert parse_tcp_info(info(length), 1, "", 0.0) is None


@dataclass
class Pair:
    """A connection over loopback, watched at one end, at moments that the test sets."""

    near: socket.socket
    far: socket.socket
    now: float = 0.0
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = Traffic(clock=lambda: self.now, watched=True)
        self.traffic.track(self.near)

    def arrive(self, size: int, at: float) -> None:
        """Let bytes arrive, and the client wake up for them."""
        self.now = at
        self.far.sendall(bytes(size))
        self.traffic.begins()
        while size:
            size -= len(self.near.recv(size))

    def end(self, size: int, at: float) -> None:
        """Let the last bytes of a message arrive."""
        self.arrive(size, at)
        self.traffic.end_message()

    @property
    def timed(self) -> tuple[int, float]:
        """Return bytes, and seconds to the quarter: the kernel's own clock goes on while the test's stands."""
        return self.traffic.arrived_bytes, round(4 * self.traffic.arriving_s) / 4


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield Pair(near, far)


def test_what_the_other_end_has_is_counted(pair) -> None:
    before = pair.traffic.counts()
    pair.near.sendall(bytes(10_000))
    while pair.far.recv(10_000, socket.MSG_PEEK) != bytes(10_000):
        pass
    pair.far.sendall(bytes(500))
    assert pair.near.recv(500)  # it carries the acknowledgement
    after = pair.traffic.counts()
    assert after.acked_bytes - before.acked_bytes == 10_000
    assert after.received_bytes - before.received_bytes == 500
    assert after.is_idle
    assert after.address == "127.0.0.1"
    assert 0 < after.min_rtt_s < 1


TIMELINES = {
    "only within messages, not between them": (
        [(kind, 1000, start + after) for start in (10, 20, 50) for kind, after in (("+", 0), ("+", 0.5), (".", 1))],
        (3 * 2000, 3.0),
    ),
    "a message that comes at once": ([(".", 300, 1), (".", 300, 2), (".", 300, 3)], (0, 0.0)),
    "4 bytes of an acknowledgement begin no message": (
        [(".", 300, 1), ("+", 4, 2), ("+", 1000, 60), (".", 2000, 61)],
        (2000, 1.0),
    ),
    "500 bytes of the next message come with the last": (
        [("+", 1000, 1), (".", 1500, 2), ("+", 1000, 3), (".", 1000, 4)],
        (1500 + 1000, 2.0),
    ),
    "a connection that ends within a message": (
        [("+", 1000, 1), ("new", 0, 1), ("+", 1000, 100), (".", 1000, 101)],
        (1000, 1.0),
    ),
}
"""Bytes at moments: `+` arrives, `.` ends a message, `new` is another connection; the bytes and seconds they make."""


@pytest.mark.parametrize("timeline", TIMELINES)
def test_time_passes_within_messages(pair, timeline) -> None:
    steps, timed = TIMELINES[timeline]
    for kind, size, at in steps:
        if kind == "new":
            pair.traffic.track(pair.near)
        else:
            (pair.end if kind == "." else pair.arrive)(size, float(at))
    assert pair.timed == timed


def test_who_looks_late_counts_no_time_in_which_nothing_came(pair) -> None:
    """A busy processor lets us look 0.5 s after the last byte; the link had nothing to do with that."""
    pair.arrive(1000, 1.0)
    pair.arrive(1000, 2.0)
    Event().wait(0.5)
    pair.now = 2.5
    pair.traffic.end_message()
    assert pair.timed == (1000, 1.0)


def test_what_nobody_watches_is_not_timed(pair) -> None:
    pair.traffic.watched = False
    pair.arrive(1000, 1.0)
    pair.end(1000, 2.0)
    assert pair.timed == (0, 0.0)


def test_without_a_connection_nothing_is_known(pair) -> None:
    assert Traffic().counts() is None
    pair.near.close()
    assert pair.traffic.counts() is None
    pair.traffic.begins()
    pair.traffic.end_message()
    assert pair.timed == (0, 0.0)
