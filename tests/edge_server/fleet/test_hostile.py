"""Whatever a device sends, the round goes on with the others and the model holds only what was accepted."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from edge_server.journal.records import RoundClosed
from edge_server.rounds import check_plan
from shared.errors import Diverged, is_cause
from shared.protocol import wire
from shared.protocol.messages import Ack, Blob, Payload, Report, Status, Task, Transfer
from shared.protocol.payload import pack
from shared.tensors.tree import Tree
from shared.transfer import frames
from tests.edge_server.harness import (
    RUN,
    Puppet,
    Site,
    beginning,
    frame,
    moved,
    packed,
    site,
    update_for,
    virtual,
)

pytestmark = pytest.mark.virtual_time

Evil = Callable[[Task, bytes], bytes]
"""What is sent on the update topic, from the task and an honest payload."""

TRANSFER = Transfer(digest=bytes(16), size=10, frame_bytes=1024)


def offered(**changes: Any) -> Evil:
    """Send an offer with something changed."""
    return lambda task, data: wire.encode(update_for(task, data, **changes))


DROPPED: dict[str, tuple[str, Evil]] = {
    "noise": ("malformed", lambda task, data: b"\x00 noise"),
    "cut message": ("malformed", lambda task, data: wire.encode(update_for(task, data))[:-3]),
    "unknown kind": ("malformed", lambda task, data: b"FM\x01" + msgspec.msgpack.encode({"type": "Virus"})),
    "wrong type of field": (
        "malformed",
        lambda task, data: b"FM\x01" + msgspec.msgpack.encode({"type": "Update", "run": 7, "round": "one"}),
    ),
    "message of another version": ("version", lambda task, data: b"FM\x02" + wire.encode(update_for(task, data))[3:]),
    "huge message": ("oversized", lambda task, data: b"FM\x01" + bytes(2 << 20)),
    "not for the server": ("unexpected", lambda task, data: wire.encode(task)),
    "forged identity": ("identity", offered(device="good")),
    "unknown run": ("unknown-run", offered(run="stranger")),
    "a run that is no file name": ("unknown-run", offered(run="../" + "x" * 300)),
    "damaged frame": ("checksum", lambda task, data: frame(TRANSFER, 0, data)[:-1] + b"!"),
    "cut frame": ("truncated", lambda task, data: frame(TRANSFER, 0, data)[:20]),
    "frame of another version": ("version", lambda task, data: b"FC\x02" + frame(TRANSFER, 0, data)[3:]),
    "huge frame": ("oversized", lambda task, data: b"FC\x01" + bytes(frames.MAX_FRAME_BYTES + 100)),
}


@pytest.mark.parametrize("name", DROPPED)
async def test_a_bad_message_is_dropped_and_its_sender_may_still_take_part(tmp_path, caplog, name):
    """Counted as often as it comes, logged once, and everything goes on as if it had not come."""
    reason, evil = DROPPED[name]
    async with site(tmp_path, rounds=1) as here:
        good, bad = await here.device("good"), await here.device("bad")
        task = await bad.task()
        data = packed(moved(here.plan, 0.5))
        for _ in range(3):
            await bad.say(evil(task, data))
        await asyncio.sleep(1)
        assert all(wire.decode_as(Ack, said).verdict == "refused" for _, said in bad.acks.drain())
        assert (await bad.offer(update_for(task, data), data)).verdict == "accepted"
        await good.answer(await good.task(), moved(here.plan, 0.5))
        state, rounds = await here.ended()
        _require_moved(state.tree, here, 0.5)
        [closed] = rounds
    assert closed.arrived == ("bad", "good")
    assert closed.refused == {reason: 3}
    warnings = [
        record for record in caplog.records if record.levelno >= logging.WARNING and record.name != check_plan.__name__
    ]
    assert len(warnings) == 1
    assert reason in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        ("status", Status(device="good", session=9, instance="x", online=False)),
        ("report", Report(device="good", at=0.0)),
    ],
)
async def test_no_device_speaks_of_another(tmp_path, channel, message):
    """A forged death does not end a device, a forged report does not replace its own."""
    async with site(tmp_path, rounds=1) as here:
        good, bad = await here.device("good"), await here.device("bad")
        task = await bad.task()
        await bad.say(message, channel)
        await asyncio.sleep(1)
        assert here.server.fleet.online == ("bad", "good")
        assert not here.server.fleet.reports
        await bad.answer(task, moved(here.plan, 0.5))
        await good.answer(await good.task(), moved(here.plan, 0.5))
        assert (await here.ended())[1][0].refused == {"identity": 1}


def leaf(plan_tree: Tree, **changes: torch.Tensor) -> bytes:
    """Return a payload of the tree with leaves changed or added."""
    return packed(plan_tree | {name.replace("_", ".", 1): value for name, value in changes.items()})


def with_header(name: str, dtype: str, shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """Return a payload of one tensor that says of itself whatever is given."""
    return b"".join(pack(Payload(codec="dense", blobs={name: Blob(dtype, shape, memoryview(data))})))


CONTENTS: dict[str, tuple[str, Callable[[Tree], bytes]]] = {
    "noise": ("malformed", lambda tree: bytes(64)),
    "cut payload": ("truncated", lambda tree: packed(tree)[:-4]),
    "payload with more than its tensors": ("truncated", lambda tree: packed(tree) + bytes(4)),
    "payload of another version": ("version", lambda tree: b"FP\x02" + packed(tree)[3:]),
    "undecodable header": ("malformed", lambda tree: packed(tree)[:8] + b"\xc1" + packed(tree)[9:]),
    "unknown tensor": ("unknown-tensor", lambda tree: leaf(tree, extra=torch.zeros(1))),
    "wrong shape": ("shape", lambda tree: leaf(tree, **{"3_bias": torch.zeros(11)})),
    "shape that nothing can hold": ("shape", lambda tree: with_header("3.bias", "f32", (0, 1 << 63))),
    "shape whose strides overflow": ("shape", lambda tree: with_header("3.bias", "f32", (1 << 62, 1 << 62, 0))),
    "negative extent": ("shape", lambda tree: with_header("3.bias", "f32", (-10,), bytes(40))),
    "wrong dtype": ("dtype", lambda tree: leaf(tree, **{"3_bias": torch.zeros(10, dtype=torch.float64)})),
    "payload of another codec": ("codec", lambda tree: packed(tree).replace(b"dense", b"topkk", 1)),
    "unknown dtype": ("dtype", lambda tree: with_header("3.bias", "c64", (10,), bytes(80))),
    "NaN": ("not-finite", lambda tree: leaf(tree, **{"3_bias": torch.tensor([math.nan] + 9 * [0.0])})),
    "infinity": ("not-finite", lambda tree: leaf(tree, **{"3_bias": torch.tensor(9 * [0.0] + [-math.inf])})),
}
OFFERS: dict[str, tuple[str, dict[str, Any]]] = {
    "no parameters": ("params", {"params": None}),
    "too large": ("oversized", {"params": Transfer(digest=bytes(16), size=1 << 40, frame_bytes=1 << 18)}),
    "empty": ("oversized", {"params": Transfer(digest=bytes(16), size=0, frame_bytes=1024)}),
    "negative size": ("oversized", {"params": Transfer(digest=bytes(16), size=-1, frame_bytes=1024)}),
    "frames of one byte": ("oversized", {"params": Transfer(digest=bytes(16), size=1024, frame_bytes=1)}),
    "frames of no byte": ("oversized", {"params": Transfer(digest=bytes(16), size=1024, frame_bytes=0)}),
    "frames too large": ("oversized", {"params": Transfer(digest=bytes(16), size=1024, frame_bytes=1 << 30)}),
    "short digest": ("malformed", {"params": Transfer(digest=b"short", size=1024, frame_bytes=1024)}),
    "zero weight": ("weight", {"weight": 0.0}),
    "negative weight": ("weight", {"weight": -1.0}),
    "NaN weight": ("not-finite", {"weight": math.nan}),
    "infinite weight": ("not-finite", {"weight": math.inf}),
    "NaN loss": ("not-finite", {"loss": math.nan}),
    "NaN metric": ("not-finite", {"metrics": {"eval_accuracy": math.nan}}),
    "fewer than no examples": ("not-finite", {"num_examples": -1}),
    "an accuracy beyond all": ("metrics", {"metrics": {"eval_accuracy": 1e308}}),
    "an accuracy below zero": ("metrics", {"metrics": {"eval_accuracy": -1000.0}}),
    "more weight in a mean than all": ("metrics", {"metrics": {"eval_accuracy": 1.0, "eval_examples": 1e308}}),
    "less weight than none": ("metrics", {"metrics": {"eval_accuracy": 1.0, "eval_examples": -5.0}}),
    "60,000 metrics": ("metrics", {"metrics": {f"{number}": 1.0 for number in range(60_000)}}),
    "a metric of a long name": ("metrics", {"metrics": {"x" * 1000: 1.0}}),
}


async def _evil_round(here: Site, evil: Callable[[Puppet, Task], Any]) -> Ack:
    """Play a round in which `bad` is evil, and one in which it is not."""
    good, bad = await here.device("good"), await here.device("bad")
    verdict = await evil(bad, await bad.task())
    await good.answer(await good.task(), moved(here.plan, 0.5))
    for puppet in (good, bad):
        assert (await puppet.answer(await puppet.task(), moved(here.plan, 0.25))).verdict == "accepted"
    return verdict


def _require_refused(ack: Ack, rounds: list[RoundClosed], reason: str) -> None:
    assert ack.verdict == "refused"
    assert ack.reason
    assert rounds[0].arrived == ("good",)
    assert rounds[0].outcome == "aggregated"
    assert rounds[0].refused == {reason: 1}
    [(device, cause)] = rounds[0].failed.items()
    assert device == "bad"
    assert ack.reason in cause
    assert is_cause(cause, Diverged) == (reason == "not-finite")
    assert rounds[1].arrived == ("bad", "good")
    assert not rounds[1].refused


def _require_moved(tree: Tree, here: Site, by: float) -> None:
    for key, first in beginning(here.plan).items():
        torch.testing.assert_close(tree[key], first + by, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*CONTENTS, *OFFERS])
def test_a_bad_update_is_refused_and_not_kept(tmp_path, name):
    """A payload is taken whole, looked at, thrown away; for an offer nothing is written. The model moves without it."""
    reason, make = CONTENTS.get(name) or (OFFERS[name][0], packed)
    changes = {} if name in CONTENTS else OFFERS[name][1]

    async def play() -> tuple[Ack, list[RoundClosed]]:
        async with site(tmp_path) as here:
            data = make(moved(here.plan, 9.0))

            async def evil(bad: Puppet, task: Task) -> Ack:
                offer = update_for(task, data, **changes)
                if name in CONTENTS:
                    ack = await bad.offer(offer, data)
                else:
                    await bad.say(offer)
                    ack = await bad.heard()  # and no wish
                assert isinstance(ack, Ack)
                assert not (tmp_path / RUN / "updates" / "bad").exists()
                return ack

            ack = await _evil_round(here, evil)
            state, rounds = await here.ended()
            _require_moved(state.tree, here, 0.5 + 0.25)
            return ack, rounds

    _require_refused(*virtual(play()), reason)


async def test_a_failure_can_forge_no_line_of_the_log_and_fills_no_journal(tmp_path, caplog):
    """Its beginning is recorded and logged, with line ends and escape codes written out."""
    said = "boom\n2026-01-01T00:00:00Z ERROR forged\x1b[31m" + "x" * 900_000
    async with site(tmp_path, rounds=1) as here:
        good, bad = await here.device("good"), await here.device("bad")
        task = await bad.task()
        failed = update_for(task, b"", params=None, failure=said, start=task.params.digest)
        assert (await bad.offer(failed, b"")).verdict == "accepted"
        await good.answer(await good.task(), moved(here.plan, 0.5))
        cause = (await here.ended())[1][0].failed["bad"]
    assert cause.startswith(r"boom\n2026-01-01T00:00:00Z ERROR forged\x1b[31mxxx")
    assert len(cause) < 1000
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 2000 for record in caplog.records)
