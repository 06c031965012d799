"""The device's life in virtual time: a real outbox, download and delivery, a stub trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.data.spec import Data
from shared.protocol import wire
from shared.protocol.messages import Ack, Report
from shared.protocol.topics import topic
from shared.transfer import frames
from tests.device_agent.agent_side import DEVICE, RESULT, SITE

pytestmark = pytest.mark.virtual_time


async def test_a_task_is_fetched_trained_and_offered(site, make_task, parameters) -> None:
    """The trainer is given files, not tensors, and what the task cost so far; the phases follow."""
    site.frame_s = 0.25
    async with site.living():
        phases = [site.agent.phase]
        await site.tell("task", make_task(), 0.1)
        phases.append(site.agent.phase)
        await asyncio.sleep(0.5)
        phases.append(site.agent.phase)
        await asyncio.sleep(1.0)
        phases.append(site.agent.phase)
        assert phases == ["idle", "fetching", "training", "idle"]
        (job,) = site.trainer.jobs
        assert job.params == str(site.folder / "params")
        assert (job.task, job.data, job.frame_bytes) == (make_task(), Data(source="digits"), 4096)
        assert Path(job.state) == site.folder / "state" / "trial"
        assert job.cost.download_s == pytest.approx(0.25)
        assert job.cost.bytes_down == len(parameters) + frames.HEADER_BYTES
        (offer,) = site.offers
        assert (offer.round, offer.failure, offer.params.size) == (1, None, len(RESULT))
    assert (site.folder / "params").read_bytes() == parameters


async def test_round_after_round_each_once(site, make_task) -> None:
    async with site.living():
        for number in (1, 2, 3):
            await site.tell("task", make_task(round=number), 1.5)
            start = site.offers[-1].start
            settled = Ack(run="trial", round=number, device=DEVICE, start=start, verdict="accepted")
            await site.tell("ack", settled, 0.1)
        assert site.trainer.rounds == site.offered == [1, 2, 3]
        assert site.agent.outbox.entries() == []


async def test_a_newer_task_supersedes_one_in_training(site, make_task) -> None:
    """The older one is given up at once and never offered; the phase is that of the newer one."""
    async with site.living():
        await site.tell("task", make_task(round=1), 0.5)
        assert site.agent.phase == "training"
        await site.tell("task", make_task(round=2), 0.1)
        assert site.trainer.given_up == [1]
        assert site.agent.phase == "training"
        await asyncio.sleep(1.0)
        assert site.trainer.rounds == [1, 2]
        assert site.offered == [2]


async def test_a_newer_task_supersedes_one_in_download(site, make_task, describe) -> None:
    """Its parameters never come; the newer one's do."""
    async with site.living():
        await site.tell("task", make_task(round=1, params=describe(b"never sent")), 5.0)
        assert site.agent.phase == "fetching"
        await site.tell("task", make_task(round=2), 1.5)
        assert site.trainer.rounds == site.offered == [2]


async def test_a_newer_task_supersedes_one_that_waits_for_the_trainer(site, make_task) -> None:
    """An orphan of an earlier agent still trains: waiting for it is given up as everything else is."""
    async with site.living():
        site.trainer.wait_s = 1000.0
        await site.tell("task", make_task(round=1), 5.0)
        site.trainer.wait_s = 0.0
        await site.tell("task", make_task(round=2), 1.5)
        assert site.offered == [2]


async def test_of_many_tasks_at_once_only_the_newest_is_done(site, make_task) -> None:
    """What piled up at the broker while the device was away."""
    async with site.living():
        for number in (1, 2, 3, 4):
            await site.tell("task", make_task(round=number))
        await asyncio.sleep(5.0)
        assert set(site.offered) == {4}
        assert site.trainer.rounds == [4]


async def test_a_task_of_another_run_supersedes_whatever_its_round(site, make_task) -> None:
    async with site.living():
        await site.tell("task", make_task(round=7), 0.5)
        await site.tell("task", make_task(run="next", round=1), 1.5)
        assert [(update.run, update.round) for update in site.offers] == [("next", 1)]


async def test_the_task_that_came_last_is_done_whatever_its_round(site, make_task) -> None:
    """A server that lost its checkpoint repeats rounds: while a later one trains, and after it."""
    async with site.living():
        await site.tell("task", make_task(round=5), 0.5)
        await site.tell("task", make_task(round=4), 3.0)
        assert site.trainer.given_up == [5]
        assert site.trainer.rounds[-1] == 4
        await site.tell("task", make_task(round=3), 3.0)
        assert site.trainer.rounds[-1] == 3


async def test_the_same_task_again_while_it_trains_changes_nothing(site, make_task) -> None:
    """A broker may deliver twice, a server that restarts asks again."""
    async with site.living():
        await site.tell("task", make_task(), 0.5)
        await site.tell("task", make_task(), 1.0)
        assert site.trainer.rounds == [1]
        assert site.trainer.given_up == []
        assert set(site.offered) == {1}


async def test_the_same_task_again_after_a_long_silence_has_its_parameters_fetched_at_once(site, make_task) -> None:
    """The device is back at its broker, or the server is: what it waits for a minute to ask again comes now."""
    async with site.living():
        there, site.parameters = site.parameters, b"nothing of the kind"
        await site.tell("task", make_task(), 95.0)
        site.parameters = there
        await site.tell("task", make_task(), 2.0)
        assert site.trainer.rounds == [1]


async def test_a_task_whose_update_waits_is_offered_again_not_trained_again(site, make_task) -> None:
    """The server restarted and asks anew: at once it is offered what lies in the outbox."""
    async with site.living():
        await site.tell("task", make_task(), 1.5)
        assert site.offered == [1]
        await site.tell("task", make_task(), 0.1)
        assert site.offered == [1, 1]
        assert site.trainer.rounds == [1]
        assert site.agent.phase == "idle"


async def test_after_a_restart_the_outbox_is_offered_and_the_task_not_trained_again(site, make_task) -> None:
    async with site.living():
        await site.tell("task", make_task(), 1.5)
    site.offers.clear()
    async with site.living():
        assert site.offered == [1]
        await site.tell("task", make_task(), 0.5)
    assert site.offered == [1, 1]
    assert site.trainer.rounds == [1]


async def test_it_reports_at_once_and_then_from_time_to_time(site) -> None:
    """Retained, so that a server that comes later knows it too."""
    async with site.living():
        await asyncio.sleep(95)
        assert [report.at for report in site.reports] == pytest.approx([0.0, 30.0, 60.0, 90.0])
        async with site.transport.subscribe(topic(SITE, DEVICE, "report")) as inbox:
            assert wire.decode_as(Report, (await anext(inbox))[1]).at == pytest.approx(90.0)
