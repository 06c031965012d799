"""Bytes that are no message: whatever arrives, decoding gives a message or a WireError with a countable reason."""

from __future__ import annotations

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.measurements import Absent, Reading
from shared.protocol.messages import Ack, Hyper, Message, Report, Status, Task, Want

MANY = settings(max_examples=300, derandomize=True, deadline=None)
REPORT = wire.encode(
    Report(
        device="pi-4",
        at=1.0,
        readings={"cpu": Reading(value=1.8e9, unit="Hz", source="cpufreq", quality="measured", at=0.5)},
        absent={"power": Absent(lack="not_present", cause="no such rail")},
    )
)
WANT = wire.encode(Want(digest=bytes(16), frame_bytes=1024, ranges=[]))


def judged(data: bytes) -> str:
    """Return the reason for which `data` is refused, or that it is a message."""
    try:
        wire.decode(data)
    except WireError as error:
        return error.reason
    return "message"


def refused(data: bytes) -> str:
    """Return the reason for which `data` is refused."""
    with pytest.raises(WireError) as caught:
        wire.decode(data)
    return caught.value.reason


@pytest.mark.parametrize("at", [math.inf, -math.inf, math.nan])
def test_a_report_of_no_time_at_all(at):
    """Reports are ordered by it, and journals in JSON could not hold it."""
    place = REPORT.index(msgspec.msgpack.encode(1.0))
    assert judged(REPORT[:place] + msgspec.msgpack.encode(at) + REPORT[place + 9 :]) == "malformed"


@MANY
@given(st.binary(max_size=300))
def test_random_bytes(data):
    """With and without our prefix, so that the parser itself is reached."""
    assert judged(data) in {"malformed", "version"}
    assert judged(REPORT[:3] + data) in {"malformed", "message"}


@MANY
@given(st.integers(0, len(REPORT) - 1), st.integers(1, 255), st.integers(0, 8))
def test_changed_bytes(place, change, removed):
    """One byte changed and some lost behind it: the typical damage of a bad peer."""
    damaged = bytearray(REPORT)
    damaged[place] ^= change
    del damaged[place + 1 : place + 1 + removed]
    assert judged(bytes(damaged)) in {"malformed", "message"} | ({"version"} if place == 2 else set())


def test_truncated_anywhere():
    """No prefix of a message is a message."""
    assert {refused(REPORT[:length]) for length in range(len(REPORT))} == {"malformed"}


def test_bytes_behind_a_message_are_refused():
    assert refused(REPORT + b"\x00") == "malformed"


def test_of_another_major_version():
    """Refused whatever follows, with the remedy; the test of the prefix comes before any parsing."""
    for major in (0, 2, 255):
        with pytest.raises(WireError, match=f"version {major}.*update the older side") as caught:
            wire.decode(b"FM" + bytes([major]) + b"\xff" * 10)
        assert caught.value.reason == "version"


def test_oversized_is_refused_unread():
    """One byte above the limit is oversized, the limit itself is read: a message of exactly that size is taken."""
    room = wire.MAX_MESSAGE_BYTES - len(
        wire.encode(Ack(run="", round=1, device="d", verdict="late", reason="x" * 70_000))
    )
    largest = wire.encode(Ack(run="", round=1, device="d", verdict="late", reason="x" * (70_000 + room)))
    assert len(largest) == wire.MAX_MESSAGE_BYTES
    assert isinstance(wire.decode(largest), Ack)
    assert refused(largest + b"\x00") == "oversized"


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_deep_nesting(opening):
    """Also in a field we do not know and only skip: no stack overflow, no RecursionError."""
    depth = (wire.MAX_MESSAGE_BYTES - 200) // len(opening)
    deep = opening * depth + b"\xc0"
    assert refused(b"FM\x01" + deep) == "malformed"
    ack = wire.encode(Ack(run="r", round=1, device="d", verdict="late"))
    assert refused(ack[:3] + bytes([ack[3] + 1]) + ack[4:] + b"\xa4news" + deep) == "malformed"


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff"])
def test_a_claimed_length_allocates_nothing(length):
    """A list that says it has four thousand million items ends in an error after some bytes, not gigabytes."""
    place = WANT.index(b"\x90")
    tracemalloc.start()
    try:
        assert refused(WANT[:place] + length + WANT[place + 1 :]) == "malformed"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def fields_of(message: Message) -> dict[str, object]:
    fields = msgspec.msgpack.decode(wire.encode(message)[3:])
    assert isinstance(fields, dict)
    return fields


@pytest.mark.parametrize(
    "change",
    [
        {"session": "three"},
        {"session": 1.5},
        {"session": None},
        {"session": True},
        {"device": b"pi"},
        {"online": 1},
        {"type": "Nobody"},
        {"type": 7},
    ],
    ids=repr,
)
def test_a_field_of_a_wrong_type(change):
    """Nothing is converted: a text is no number, a number no truth."""
    fields = fields_of(Status(device="pi-4", session=1, instance="x", online=True))
    assert refused(WANT[:3] + msgspec.msgpack.encode(fields | change)) == "malformed"


def test_a_missing_field_and_bad_text():
    fields = fields_of(Status(device="pi-4", session=1, instance="x", online=True))
    del fields["instance"]
    assert refused(WANT[:3] + msgspec.msgpack.encode(fields)) == "malformed"
    assert refused(REPORT.replace(b"pi-4", b"p\xff\xfe4")) == "malformed"


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"local_epochs": -1}, {"learning_rate": 0.0}, {"momentum": 1.0}, {"weight_decay": -1.0}]
    + [{name: float("nan")} for name in ("learning_rate", "momentum", "weight_decay")]
    + [{name: float("inf")} for name in ("learning_rate", "momentum", "weight_decay")],
    ids=repr,
)
def test_hyperparameters_no_training_can_use(change):
    """Refused where they are decoded, and where they are built."""
    fields = msgspec.to_builtins(Hyper()) | change
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Hyper)
    with pytest.raises(ValueError, match="must be"):
        Hyper(**fields)


def test_another_kind_than_expected():
    with pytest.raises(WireError, match="expected Task, got Want") as caught:
        wire.decode_as(Task, WANT)
    assert caught.value.reason == "unexpected"
    assert wire.decode_as(Want, WANT).ranges == []
