"""Costs that the agent adds to a task: download, and the idle board's energy."""

from __future__ import annotations

import asyncio

import pytest

from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.power_log import PowerLog
from shared.protocol.measurements import Cost
from shared.protocol.messages import Task
from tests.device_agent.agent_side import Site
from tests.device_agent.sources import Given

pytestmark = pytest.mark.virtual_time

WATTS = {"idle": 2.0, "fetching": 6.0, "training": 9.0}


async def sampling(power: PowerLog) -> None:
    """Sample in virtual time, where the log's own thread cannot."""
    while True:
        power.mark()
        await asyncio.sleep(0.2)


def costs(site: Site, virtually, task: Task, power: PowerLog | None) -> Cost:
    """Return what the trainer was told of a task that takes a while to fetch, after a minute of rest."""

    async def routine() -> None:
        async with site.living() as agent:
            agent.reporter.power, agent.settings.measuring = power, MeasurementSettings()
            await asyncio.sleep(60)
            await site.tell("task", task, pause_s=60)

    virtually(routine())
    (job,) = site.trainer.jobs
    assert job.measuring == MeasurementSettings()
    return job.cost


def test_where_nothing_tells_the_power_joules_are_absent_and_never_zero(site, virtually, make_task):
    """Seconds and bytes are told all the same."""
    site.frame_s = 0.5
    cost = costs(site, virtually, make_task(), None)
    assert cost.download_s > 0
    assert cost.bytes_down > 0
    assert (cost.download_joules, cost.compute_joules, cost.upload_joules, cost.idle_w) == (None,) * 4
    assert cost.provenance == {}


async def test_fetching_is_charged_its_joules_and_rest_is_known(site, make_task):
    """2 W at rest, 6 W while frames come: the joules are 6 W times the seconds, but for the edges' sampling.

    Ten minutes of training in between do not count as rest.
    """
    site.frame_s, site.trainer.seconds = 2.0, 600.0
    clock = asyncio.get_running_loop().time
    power = PowerLog(Given(lambda _: watts(), clock, period_s=0.2), clock)

    def watts() -> float:
        """Return what this phase takes; the log is at its full rate in one of them."""
        assert power.is_busy() == (site.agent.phase == "fetching")
        return WATTS[site.agent.phase]

    async with site.living() as agent:
        agent.reporter.power = power
        sampler = asyncio.create_task(sampling(power))
        await asyncio.sleep(60)
        await site.tell("task", make_task(), pause_s=603)
        assert power.idle_w() == WATTS["idle"]
        sampler.cancel()
    cost = site.trainer.jobs[0].cost
    assert cost.idle_w == WATTS["idle"]
    assert cost.download_joules == pytest.approx(WATTS["fetching"] * cost.download_s, rel=0.05)
    assert cost.provenance["download_joules"].source == "given"


async def test_a_trainer_that_outlived_its_agent_is_no_rest(site, make_task):
    """The next agent waits for it with the task in its hand; meanwhile the board draws 9 W."""
    site.trainer.wait_s = 600.0
    power = PowerLog(Given(lambda _: WATTS["training"], asyncio.get_running_loop().time, period_s=0.2))
    async with site.living() as agent:
        agent.reporter.power = power
        await site.tell("task", make_task(), pause_s=0.1)
        sampler = asyncio.create_task(sampling(power))
        await asyncio.sleep(60)
        assert power.idle_w() is None
        sampler.cancel()


@pytest.mark.parametrize(("measure_s", "idle_w"), [(1.0, WATTS["idle"]), (0.0, None)])
async def test_an_agent_that_is_to_measure_rests_first(site, make_task, measure_s, idle_w):
    """A task that comes at once finds nothing known of rest; one that times steps waits for it, any other does not."""
    clock = asyncio.get_running_loop().time
    power = PowerLog(Given(lambda _: WATTS["idle"], clock, period_s=0.2), clock)
    async with site.living() as agent:
        agent.reporter.power = power
        sampler = asyncio.create_task(sampling(power))
        await site.tell("task", make_task(train=False, measure_s=measure_s), pause_s=30)
        sampler.cancel()
    assert site.trainer.jobs[0].cost.idle_w == idle_w


async def test_an_agent_that_cannot_learn_what_rest_takes_measures_all_the_same(site, make_task):
    """Its meter is silent: after ten seconds it begins."""
    async with site.living() as agent:
        agent.reporter.power = PowerLog(Given(fails=True), asyncio.get_running_loop().time)
        await site.tell("task", make_task(train=False, measure_s=1.0), pause_s=30)
    assert [job.cost.idle_w for job in site.trainer.jobs] == [None]
