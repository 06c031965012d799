"""Optimizer decisions: recorded, sent to devices, kept over a restart."""

from __future__ import annotations

import math

import msgspec
import pytest

from edge_server.journal.decision import Decision, Figure
from edge_server.journal.records import RoundClosed, RoundOpened
from shared.protocol import wire
from shared.protocol.measurements import Cost, Reading
from shared.protocol.messages import Report
from shared.protocol.topics import topic
from tests.edge_server.harness import SITE, Site, moved, packed, site, update_for, virtual

pytestmark = pytest.mark.virtual_time

CLUSTERS = 'name = "clusters"\noptions = { keep = "0.5,1" }'
BANDWIDTH = 'name = "bandwidth"\noptions = { deadline_s = 20.0, step_s = 0.01, up_bits_per_s = 1000.0 }'


def openings(here: Site) -> list[RoundOpened]:
    return [record for record in here.store.records() if isinstance(record, RoundOpened)]


async def test_devices_are_told_the_ratio_of_their_cluster(tmp_path):
    async with site(tmp_path, optimizer=CLUSTERS) as here:
        puppets = [await here.device(name) for name in ("one", "two")]
        for _ in (1, 2):
            told = {}
            for puppet in puppets:
                task = await puppet.task()
                told[puppet.name] = task.assignment.values
                await puppet.answer(task, moved(here.plan, 0.5))
            assert told == {"one": {"keep": 0.5}, "two": {"keep": 1.0}}
        await here.ended()
        for record in openings(here):
            assert record.decision
            assert record.decision.allocation == told


async def test_without_a_table_nothing_is_decided(tmp_path):
    async with site(tmp_path, rounds=1) as here:
        for puppet in [await here.device(name) for name in ("one", "two")]:
            task = await puppet.task()
            assert task.assignment.values == {}
            await puppet.answer(task, moved(here.plan, 0.5))
        await here.ended()
        assert [record.decision for record in openings(here)] == [None]


def test_a_server_that_starts_again_keeps_to_what_it_decided(tmp_path):
    """Whatever the devices report by then; the next round goes on from the last good figures."""
    kept: list[Decision | None] = []

    async def decides() -> None:
        async with site(tmp_path, optimizer=BANDWIDTH) as here:
            one = await here.device("one")
            await here.broker.publish(topic(SITE, "one", "report"), wire.encode(report("one", 5000.0)), retain=True)
            await here.device("two")
            await one.task()
            kept.extend(record.decision for record in openings(here))

    async def goes_on() -> None:
        async with site(tmp_path, optimizer=BANDWIDTH) as here:
            puppets = [await here.device(name) for name in ("one", "two")]
            await here.broker.publish(topic(SITE, "one", "report"), wire.encode(report("one", math.nan)), retain=True)
            for number in (1, 2):
                for puppet in puppets:
                    task = await puppet.task()
                    assert task.round == number
                    decision = openings(here)[-1].decision
                    assert decision
                    assert task.assignment.values == decision.devices[puppet.name].values
                    data = packed(moved(here.plan, 0.5))
                    await puppet.offer(update_for(task, data, cost=Cost(compute_s=0.5)), data)
            _, rounds = await here.ended()
            assert next(record.decision for record in openings(here)) == kept[0]
            later = openings(here)[1].decision
            assert later
            assert later.devices["one"].figures["up_bits_per_s"] == Figure(5000.0, "last_good")
            assert later.devices["two"].figures["up_bits_per_s"] == Figure(1000.0, "default")
            assert all(isinstance(one, RoundClosed) for one in rounds)

    virtual(decides())
    assert len(kept) == 1
    assert kept[0]
    assert kept[0].devices["one"].figures["up_bits_per_s"] == Figure(5000.0, "measured")
    virtual(goes_on())


def test_an_old_journal_stays_readable():
    """A round that was opened before there were decisions."""
    old = msgspec.json.decode(b'{"type":"RoundOpened","round":3,"assignments":{}}', type=RoundOpened)
    assert old.decision is None


def report(device: str, rate: float) -> Report:
    reading = Reading(value=rate, unit="bits_per_s", source="tcp", quality="measured", at=1.0)
    return Report(device=device, at=1.0, readings={"link.up_bits_per_s": reading})
