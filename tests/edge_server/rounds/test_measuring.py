"""What is measured on the devices before the first round."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from edge_server.journal.records import Measured, RoundOpened
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Update
from tests.edge_server.harness import Puppet, Site, moved, site, virtual

pytestmark = pytest.mark.virtual_time

STEP = StepCost(steps=4, seconds=0.5, cycles=1e9, hertz=2e9, weights=10, flops=100)
PLAN = {"measure": "seconds = 2.0", "rounds": 1, "cohort": "min_devices = 2\nwait_s = 5.0"}


async def told(puppet: Puppet, **answer: object) -> None:
    """Take the measuring task and answer it."""
    task = await puppet.task()
    assert (task.round, task.train, task.evaluate, task.measure_s) == (0, False, False, 2.0)
    said = {"params": None, "start": task.params.digest} | answer
    ack = await puppet.offer(Update(run=task.run, round=0, device=task.device, **said))
    assert ack.verdict == "accepted"


async def train(here: Site, *puppets: Puppet) -> None:
    for puppet in puppets:
        task = await puppet.task()
        assert (task.round, task.train, task.measure_s) == (1, True, 0.0)
        await puppet.answer(task, moved(here.plan, 0.5))


async def test_devices_measure_before_the_first_round_is_decided(tmp_path):
    """One measures, one cannot; both train afterwards, and the journal holds it once, before round 1."""
    async with site(tmp_path, **PLAN) as here:
        one, two = await here.device("one"), await here.device("two")
        await told(one, step=STEP, metrics={"sigma2": 0.25})
        await told(two, failure="no example")
        await train(here, one, two)
        await here.ended()
        records = here.store.records()
        measured = [record for record in records if isinstance(record, Measured)]
        assert measured == [
            Measured(by_device={"one": STEP}, metrics={"one": {"sigma2": 0.25}}, failed={"two": "no example"})
        ]
        kinds = [type(record) for record in records]
        assert kinds.index(Measured) < kinds.index(RoundOpened)


def test_a_server_that_starts_again_does_not_measure_again(tmp_path):
    async def measures() -> None:
        async with site(tmp_path, **PLAN) as here:
            one, two = await here.device("one"), await here.device("two")
            await told(one, step=STEP)
            await told(two, step=STEP)
            await one.task()

    async def goes_on() -> None:
        async with site(tmp_path, **PLAN) as here:
            await train(here, await here.device("one"), await here.device("two"))
            await here.ended()
            assert sum(isinstance(record, Measured) for record in here.store.records()) == 1

    virtual(measures())
    virtual(goes_on())


@pytest.mark.parametrize("figures", [{"seconds": math.nan}, {"seconds": -1.0}, {"weights": -1}])
async def test_a_figure_that_cannot_be_is_refused(tmp_path, figures):
    """It would poison whatever is computed from it."""
    async with site(tmp_path, **PLAN) as here:
        one, _ = await here.device("one"), await here.device("two")
        task = await one.task()
        bad = msgspec.structs.replace(STEP, **figures)
        verdict = await one.offer(
            Update(run=task.run, round=0, device="one", params=None, start=task.params.digest, step=bad)
        )
        assert verdict.verdict == "refused"
        await asyncio.sleep(0)
