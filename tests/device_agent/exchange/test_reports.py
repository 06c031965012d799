"""Reports: from time to time, at once when an update is settled, and again until somebody hears."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from device_agent.exchange.reports import Reporter
from device_agent.exchange.upload_meter import CompletedUpload
from device_agent.measurement.power_log import PowerLog
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.messages import Report
from shared.runtime.executor import background, inline
from tests.device_agent.sources import Given

pytestmark = pytest.mark.virtual_time

SENT = CompletedUpload(
    run="trial", round=3, started=1.0, ended=3.5, bytes_up=700, cost=Cost(compute_s=9.0, bytes_up=500)
)


@dataclass
class Ear:
    """A transport that notes reports; deaf for a while when told to."""

    heard: list[tuple[float, Report]] = field(default_factory=list)
    deaf_until: float = 0.0

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        now = asyncio.get_running_loop().time()
        assert (topic, retain) == ("fieldfleet/v1/lab/board/report", True)
        if now < self.deaf_until:
            raise Unreachable("away")
        self.heard.append((now, wire.decode_as(Report, payload)))

    @property
    def moments(self) -> list[float]:
        return [pytest.approx(at, abs=0.01) for at, _ in self.heard]


@dataclass
class Senses:
    looks: int = 0

    def __call__(self) -> Report:
        self.looks += 1
        return Report(device="board", at=0.0, facts={"look": str(self.looks)})


def reporter(ear: Ear, senses: Senses, **options: object) -> Reporter:
    clock = asyncio.get_running_loop().time
    return Reporter(*(ear, "lab", "board", clock, inline), sense=senses, report_s=30.0, **options)


async def test_the_board_is_looked_at_from_time_to_time():
    """In 100 s of 30 s periods there are four looks and four reports, each with the moment it was sent."""
    ear, senses = Ear(), Senses()
    async with background(reporter(ear, senses).run()):
        await asyncio.sleep(100)
    assert ear.moments == [0.0, 30.0, 60.0, 90.0]
    assert senses.looks == 4
    assert ear.heard[-1][1].at == pytest.approx(90.0, abs=0.01)


async def test_a_settled_update_is_told_at_once_without_another_look():
    """Its cost comes within the same moment, with the upload's seconds, bytes and provenance; the rest is as it was."""
    ear, senses = Ear(), Senses()
    told = reporter(ear, senses)
    async with background(told.run()):
        await asyncio.sleep(10)
        told.note_upload(SENT)
        await asyncio.sleep(40)
    assert ear.moments == [0.0, 10.0, 30.0]
    assert senses.looks == 2
    first, second, third = (report for _, report in ear.heard)
    assert first.spent is None
    assert (second.spent.run, second.spent.round) == ("trial", 3)
    cost = second.spent.cost
    assert (cost.compute_s, cost.upload_s, cost.bytes_up, cost.upload_joules) == (9.0, 2.5, 700, None)
    assert third.spent == second.spent


async def test_fast_rounds_do_not_make_a_report_each():
    """A hundred updates settled within ten seconds make at most one report a second; the last one's cost is told."""
    ear = Ear()
    told = reporter(ear, Senses())
    async with background(told.run()):
        for number in range(100):
            await asyncio.sleep(0.1)
            told.note_upload(CompletedUpload(run="trial", round=number, started=0.0, ended=1.0, bytes_up=1))
        await asyncio.sleep(5)
    assert len(ear.heard) <= 12
    assert ear.heard[-1][1].spent.round == 99


async def test_a_report_that_nobody_hears_is_said_again():
    """The broker is away for 5 s: a second after it is back, it has heard."""
    ear = Ear(deaf_until=5.0)
    async with background(reporter(ear, Senses()).run()):
        await asyncio.sleep(20)
    assert len(ear.heard) == 1
    assert ear.heard[0][0] <= 6.01


async def test_an_upload_is_charged_its_joules():
    """At 4 W, 2.5 s of upload are 10 J; the log samples at full rate while frames are asked for."""
    ear = Ear()
    clock = asyncio.get_running_loop().time
    power = PowerLog(Given(clock=clock, period_s=0.2), clock)
    for _ in range(50):
        power.mark()
        await asyncio.sleep(0.1)
    told = reporter(ear, Senses(), power=power)
    async with background(told.run()):
        await asyncio.sleep(10)
        told.note_upload_start()
        assert power.is_busy()
        told.note_upload(SENT)
        await asyncio.sleep(1)
        assert power.is_busy()
        await asyncio.sleep(10)
        assert not power.is_busy()
    cost = ear.heard[1][1].spent.cost
    assert cost.upload_joules == pytest.approx(10.0)
    assert cost.provenance["upload_joules"].source == "given"


async def test_no_cost_goes_untold_where_rounds_are_faster_than_reports():
    """Five tasks settle within a second: the next report tells all of them in order, the one after it only the last."""
    ear = Ear()
    told = reporter(ear, Senses())
    async with background(told.run()):
        await asyncio.sleep(10)
        for number in range(1, 6):
            told.note_upload(replace(SENT, round=number))
            await asyncio.sleep(0.1)
        await asyncio.sleep(30)
    rounds = [[one.round for one in (*report.earlier, report.spent)] for _, report in ear.heard if report.spent]
    assert rounds[:2] == [[1], [2, 3, 4, 5]]
    assert rounds[-1] == [5]


async def test_costs_wait_until_somebody_hears_them():
    """While the broker is away they are kept, up to the last 32 and the newest."""
    ear = Ear(deaf_until=60.0)
    told = reporter(ear, Senses())
    async with background(told.run()):
        for number in range(1, 41):
            await asyncio.sleep(1)
            told.note_upload(replace(SENT, round=number))
        await asyncio.sleep(60)
    first = next(report for _, report in ear.heard if report.spent)
    assert [one.round for one in (*first.earlier, first.spent)] == list(range(8, 41))
