"""Messages over the wire: what is written is what is read, byte for byte what PROTOCOL.md promises, across versions."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol import messages, payload, peers, wire
from shared.protocol import messages as steps
from shared.protocol.inference import collaborative, rollout
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, TaskCost
from shared.protocol.messages import BLOCK_BYTES, Assignment, Blob, Hyper, Payload, Spec, Transfer
from shared.protocol.wire import AnyMessage
from shared.transfer import frames
from tests.naming import naming

BYTE = "\udcfc"
"""What Python makes of a byte of a file's name that is not UTF-8."""
KINDS = get_args(AnyMessage)
STRUCTS = {"Status": 1, "Report": 5, "Task": 7, "Update": 4, "Want": 1, "Leave": 1, "Ack": 1}
STRUCTS |= {"Features": 3, "Gradient": 3, "Skip": 1}
STRUCTS |= {"Offer": 1, "Ahead": 1, "Lacks": 1, "Bundle": 2, "Withdraw": 1, "Releases": 2}
STRUCTS |= {"TopRequest": 2, "TopAnswer": 3}
STRUCTS |= {"Hello": 1, "AtRound": 1, "ModelOffer": 2, "EdgeWord": 1, "Telemetry": 1, "Ruling": 1}
GOLDEN = Path(__file__).with_name("golden_wire.txt")
TRANSFER = Transfer(digest=bytes(range(16)), size=100_000, frame_bytes=65_536)
ASSIGNMENT = Assignment(seed=7, hyper=Hyper(), values={"rho": 0.25, "active": [1, 2, 5], "cut": 3})
STEP = {"run": "run-1", "round": 2, "device": "pi-4", "start": bytes(16), "step": 3, "params": TRANSFER}
SITE = {"site": "roof", "run": "run-1", "round": 5}
EXAMPLES = {
    "Status": messages.Status(device="pi-4", session=3, instance="f00d", online=True, state="ready", version="0.1.0"),
    "Report": messages.Report(
        device="pi-4",
        at=12.5,
        board="raspberry-pi-4b",
        readings={"cpu": Reading(value=1.8e9, unit="Hz", source="cpufreq", quality="measured", at=12.0)},
        absent={"power": Absent(lack="denied", cause="no such group")},
        facts={"governor": "ondemand"},
        spent=TaskCost(run="run-1", round=1, cost=Cost(upload_s=2.0, upload_joules=4.5)),
    ),
    "Task": messages.Task(
        run="run-1",
        round=2,
        device="pi-4",
        algorithm=Spec(name="fedprox", options={"mu": 0.01}),
        model=Spec(name="mlp"),
        codec=Spec(name="dense"),
        assignment=ASSIGNMENT,
        params=TRANSFER,
        shared=True,
        deadline_s=30.0,
    ),
    "Update": messages.Update(
        run="run-1",
        round=2,
        device="pi-4",
        params=TRANSFER,
        start=bytes(16),
        weight=64.0,
        num_examples=64,
        loss=0.5,
        metrics={"accuracy": 0.75},
        cost=Cost(
            compute_s=1.5,
            bytes_down=100_000,
            compute_joules=6.0,
            provenance={"compute_joules": Provenance(source="ina3221 VDD_IN", quality="measured", uncertainty=0.03)},
        ),
    ),
    "Want": messages.Want(digest=TRANSFER.digest, frame_bytes=65_536, ranges=[(0, 64)]),
    "Features": steps.Features(**STEP, pushed=64, room=steps.Room(blocks=32, frame_bytes=16_384)),
    "Gradient": steps.Gradient(**STEP, answers=bytes(16), pushed=32, room=steps.Room(blocks=64, frame_bytes=65_536)),
    "Skip": steps.Skip(run="run-1", round=2, device="pi-4", start=bytes(16), step=5, offered=3),
    "TopRequest": collaborative.TopRequest(
        device="pi-4",
        instance="f00d",
        number=7,
        name="digits",
        version=2,
        parameters=bytes(32),
        params=TRANSFER,
        pushed=64,
        deadline_s=2.0,
    ),
    "TopAnswer": collaborative.TopAnswer(
        device="pi-4",
        instance="f00d",
        number=7,
        answers=bytes(16),
        outputs=b"FP",
        timing=collaborative.TopTiming(waited_s=0.25, compute_s=0.5),
        room=steps.Room(blocks=32, frame_bytes=16_384),
    ),
    "Leave": messages.Leave(digest=TRANSFER.digest),
    "Ack": messages.Ack(run="run-1", round=2, device="pi-4", start=bytes(16), verdict="refused", reason="shape"),
    "Offer": rollout.Offer(deployment="0001-net-2-f00d", name="net", version=2, manifest=b"{}", soak_s=600.0),
    "Ahead": rollout.Ahead(deployment="0001-net-2-f00d", name="net", version=2, manifest=b"{}"),
    "Lacks": rollout.Lacks(device="pi-4", deployment="0001-net-2-f00d", tensors=(bytes(range(32)),), header=True),
    "Bundle": rollout.Bundle(deployment="0001-net-2-f00d", params=TRANSFER, shared=True),
    "Withdraw": rollout.Withdraw(deployment="0001-net-2-f00d", name="net", version=2, back=True),
    "Releases": rollout.Releases(
        device="pi-4",
        instance="f00d",
        models=(
            rollout.ModelStatus(
                name="net",
                committed=1,
                candidate=2,
                state="refused",
                deployment="0001-net-2-f00d",
                attempt=1,
                reason="finite: NaN",
            ),
        ),
    ),
    "Hello": peers.Hello(
        site="roof", session=2, instance="f00d", online=True, run="run-1", digest=bytes(range(16)), plan=b'{"rounds":5}'
    ),
    "AtRound": peers.AtRound(**SITE),
    "ModelOffer": peers.ModelOffer(**SITE, params=TRANSFER),
    "EdgeWord": peers.EdgeWord(**SITE, digest=TRANSFER.digest, has=True, on=False, reason="deadline"),
    "Telemetry": peers.Telemetry(**SITE, term=3, case=b"\x80", pledge=2.5, asks=((4, 3, 1.5),)),
    "Ruling": peers.Ruling(**SITE, term=3, decision=b"\x80", grants=((5, 3, 2.25),), reason="late"),
}


def golden() -> dict[str, bytes]:
    """Read the file: a name, then indented bytes literals that belong together."""
    found: dict[str, bytes] = {}
    name = ""
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("    "):
            found[name] += ast.literal_eval(line.strip())
        elif line and not line.startswith("#"):
            name = line.removesuffix(":")
            found[name] = b""
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_comes_back_as_it_was(kind, any_of, same):
    """Round trip of any value of any message, and decode_as of its own kind is decode."""

    @settings(max_examples=40, derandomize=True, deadline=None)
    @given(any_of(kind))
    def check(message):
        data = wire.encode(message)
        assert wire.is_message(data)
        assert not frames.is_frame(data)
        assert same(wire.decode(data), message)
        assert same(wire.decode_as(kind, data), message)

    check()


def test_the_golden_file_names_every_message():
    """A message without golden bytes is a change of the protocol that nobody would notice."""
    assert {kind.__name__ for kind in KINDS} == set(EXAMPLES)
    assert set(EXAMPLES) | {"payload", "frame"} == set(golden())


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes(name):
    """Both directions: we write exactly these bytes, and read from them exactly this message."""
    assert wire.encode(EXAMPLES[name]) == golden()[name]
    assert wire.decode(golden()[name]) == EXAMPLES[name]


def test_golden_payload_and_frame():
    """A payload of two tensors, the second at a multiple of 64, and the frame that carries its start."""
    blobs = {
        "w": Blob("f32", (1, 2), memoryview(b"\0\0\x80?\0\0\0@")),
        "n": Blob("i64", (), memoryview(b"\x05" + bytes(7))),
    }
    parts = payload.pack(Payload(codec="dense", blobs=blobs))
    assert b"".join(parts) == golden()["payload"]
    transfer = Transfer(digest=payload.digest(parts), size=sum(part.nbytes for part in parts), frame_bytes=1024)
    assert frames.encode(transfer, 0, payload.Scattered(parts).read(0, 1024)) == golden()["frame"]
    assert frames.decode(golden()["frame"]).digest == transfer.digest


def _with_news(value: object) -> object:
    """Add a field that this version does not know to every struct in a message, except where the keys are names."""
    if isinstance(value, list):
        return [_with_news(item) for item in value]
    if not isinstance(value, dict):
        return value
    free, named = {"options", "values", "metrics", "facts"}, {"readings", "absent", "provenance"}
    known = {key: item if key in free else _with_news(item) for key, item in value.items() if key not in named}
    for key in named & value.keys():
        known[key] = {name: _with_news(item) for name, item in value[key].items()}
    return {**known, "news": {"of": ["a", {"later": "version"}]}}


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_a_later_version_are_ignored(name):
    """In the message and in every struct inside it."""
    data = wire.encode(EXAMPLES[name])
    newer = data[:3] + msgspec.msgpack.encode(_with_news(msgspec.msgpack.decode(data[3:])))
    assert newer.count(b"news") == STRUCTS[name]
    assert wire.decode(newer) == EXAMPLES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_has_its_default_does_not_travel(name):
    """So that a message is as an earlier version sends it, which knows no such field: absent reads as the default."""
    message = EXAMPLES[name]
    sent = msgspec.msgpack.decode(wire.encode(message)[3:])
    usual = {
        field.encode_name
        for field in msgspec.structs.fields(message)
        if not field.required and getattr(message, field.name) in (field.default, {})
    }
    assert usual & sent.keys() == set()
    assert wire.decode(wire.encode(message)) == message


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 40))
def test_count_of_blocks(size):
    """The fewest blocks that hold the payload; an empty payload still takes one."""
    count = Transfer(digest=b"", size=size, frame_bytes=1024).blocks
    assert count >= 1
    assert count * BLOCK_BYTES >= size
    assert count == 1 or (count - 1) * BLOCK_BYTES < size


def test_num_bytes_counts_tensors_only():
    blobs = {"a": Blob("f32", (2,), memoryview(bytes(8))), "b": Blob("u8", (0,), memoryview(b""))}
    assert Payload(codec="dense", blobs=blobs).num_bytes == 8


def test_of_another_major_version():
    """Refused with the remedy; why else a message is refused stands in the table of damaged inputs."""
    with pytest.raises(WireError, match=naming("version 2")):
        wire.decode(b"FM\x02")


def test_a_message_of_exactly_the_limit_is_read_and_a_longer_one_is_not():
    def padded(length: int) -> bytes:
        return wire.encode(messages.Ack(run="", round=1, device="d", verdict="late", reason="x" * length))

    largest = padded(70_000 + wire.MAX_MESSAGE_BYTES - len(padded(70_000)))
    assert len(largest) == wire.MAX_MESSAGE_BYTES
    assert isinstance(wire.decode(largest), messages.Ack)
    with pytest.raises(WireError) as caught:
        wire.decode(largest + b"\0")
    assert caught.value.reason == "oversized"


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
    with pytest.raises(ValueError, match=naming(*change, *change.values())):
        Hyper(**fields)


def test_another_kind_than_expected():
    want = messages.Want(digest=bytes(16), frame_bytes=1024, ranges=[])
    with pytest.raises(WireError, match=naming("Task", "Want")) as caught:
        wire.decode_as(messages.Task, wire.encode(want))
    assert caught.value.reason == "unexpected"
    assert wire.decode_as(messages.Want, wire.encode(want)) == want


def test_text_that_is_not_utf8_is_sent_escaped():
    """Names of files and folders may hold any bytes; none of them ends a process that sends a message."""
    report = msgspec.structs.replace(
        EXAMPLES["Report"],
        facts={f"disk{BYTE}": f"/srv/{BYTE}"},
        absent={BYTE: Absent(lack="denied", cause=BYTE)},
    )
    sent = wire.decode_as(messages.Report, wire.encode(report))
    assert sent.facts == {"disk\\udcfc": "/srv/\\udcfc"}
    assert sent.absent == {"\\udcfc": Absent(lack="denied", cause="\\udcfc")}
    assert sent.readings == report.readings
    task = msgspec.structs.replace(EXAMPLES["Task"], run=BYTE)
    assert wire.decode(wire.encode(task)) == msgspec.structs.replace(task, run="\\udcfc")
