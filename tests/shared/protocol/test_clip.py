"""Clipping of device messages: entries, text, control characters."""

from __future__ import annotations

import math
from random import Random

import pytest
from msgspec.structs import replace

from shared.protocol import clip as bounds
from shared.protocol.clip import clip, printable
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, StepCost, TaskCost
from shared.protocol.messages import Report, Status, Update, Want
from tests.device_agent.sources import report

EVIL = "boom\n2026-01-01T00:00:00Z ERROR forged \x1b[31m\r\u202e\x00" + "x" * 900_000


def test_an_honest_message_stays_as_it_is():
    said = report(Random(1), 5.0)
    assert clip(said) == said
    want = Want(digest=b"", frame_bytes=1024, ranges=[])
    assert clip(want) is want
    assert printable("no such file: /data/größe.csv") == "no such file: /data/größe.csv"


def test_a_failure_is_one_line_and_not_long():
    failure = clip(Update(run="r", round=1, device="pi", params=None, failure=EVIL)).failure
    assert failure.isprintable()
    assert failure.startswith(r"boom\n2026-01-01T00:00:00Z ERROR forged \x1b[31m\r\u202e\x00xx")
    assert len(failure) < 2 * bounds.FAILURE


def test_a_report_has_so_many_entries_and_so_much_text():
    origin = Provenance(source=EVIL, quality="measured")
    cost = Cost(compute_s=1.0, provenance={f"{n}{EVIL[:500]}": origin for n in range(100)})
    reading = Reading(value=1.0, unit=EVIL, source=EVIL, quality="measured", at=1.0)
    said = Report(
        device="pi",
        at=1.0,
        board=EVIL,
        readings={f"{n}.x_watts": reading for n in range(5000)},
        absent={f"{n}\n": Absent(lack="busy", cause=EVIL) for n in range(5000)},
        facts={f"{n}": EVIL for n in range(5000)},
        spent=TaskCost(run=EVIL, round=1, cost=cost),
        earlier=[TaskCost(run="r", round=n, cost=cost) for n in range(100)],
        instance=EVIL,
    )
    clipped = clip(said)
    assert [len(one) for one in (clipped.readings, clipped.absent, clipped.facts)] == [bounds.MOST_ENTRIES] * 3
    assert [one.round for one in clipped.earlier] == list(range(100 - bounds.MOST_EARLIER, 100))
    assert len(clipped.spent.cost.provenance) == bounds.MOST_PROVENANCE
    texts = [clipped.board, clipped.instance, clipped.spent.run, *clipped.absent, *clipped.facts.values()]
    texts += [one.cause for one in clipped.absent.values()] + [one.source for one in clipped.readings.values()]
    texts += [one.source for one in clipped.spent.cost.provenance.values()]
    assert all(text.isprintable() and len(text) < 2 * bounds.TEXT for text in texts)


@pytest.mark.parametrize("field", ["instance", "state", "version"])
def test_a_status_is_short(field):
    plain = {"device": "pi", "session": 1, "instance": "a", "online": True}
    assert len(getattr(clip(Status(**plain | {field: EVIL})), field)) < 2 * bounds.NAME


def test_the_origins_of_a_step_are_short():
    step = StepCost(
        steps=1, seconds=1.0, weights=1, flops=1, provenance={"compute_s": Provenance(source=EVIL, quality="measured")}
    )
    update = clip(Update(run="r", round=1, device="pi", params=None, step=step))
    assert len(update.step.provenance["compute_s"].source) < 2 * bounds.TEXT


@pytest.mark.parametrize(("name", "value"), [("x_watts", math.nan), ("x_watts", math.inf), ("x_celsius", 1e300)])
def test_an_implausible_reading_becomes_an_absence(name, value):
    """By the table that the device's probes use; no reader divides by it, and that it came is not hidden."""
    good = Reading(value=1.0, unit="W", source="s", quality="measured", at=1.0, uncertainty=math.nan)
    bad = replace(good, value=value)
    clipped = clip(Report(device="pi", at=1.0, readings={"good_watts": good, name: bad}))
    assert clipped.readings == {"good_watts": replace(good, uncertainty=None)}
    assert {name: absence.lack for name, absence in clipped.absent.items()} == {name: "invalid"}
