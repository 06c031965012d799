"""A trainer that dies of a task is no failed task yet: in virtual time, with a stub trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from device_agent.agent.lifecycle import MAX_ATTEMPTS
from device_agent.exchange import outbox as files
from device_agent.trainer.interface import Job
from shared.errors import TaskFailed, TrainerDied
from shared.protocol.messages import Ack
from tests.device_agent.agent_side import DEVICE, StubTrainer
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time


@dataclass
class Mortal(StubTrainer):
    """Dies of its first jobs: before it wrote anything, in the middle of it, or right after its commit."""

    deaths: int = 0
    after: str = "nothing"

    async def __call__(self, job: Job) -> None:
        if len(self.jobs) >= self.deaths:
            await super().__call__(job)
            return
        if self.after == "nothing":
            self.jobs.append(job)
        else:
            await super().__call__(job)
        draft = Path(job.draft)
        if self.after == "half":
            (draft / files.UPDATE).unlink()
        elif self.after == "commit":
            files.commit(draft)
        raise TrainerDied(f"death {len(self.jobs)} (signal 9)")


@pytest.mark.parametrize("after", ["nothing", "half"])
@pytest.mark.parametrize("deaths", range(1, MAX_ATTEMPTS))
async def test_a_task_whose_trainer_died_is_trained_again(site, make_task, caplog, deaths, after) -> None:
    """Into an empty draft each time; the server sees one update and no failure, the log each cause."""
    site.trainer = Mortal(deaths=deaths, after=after)
    async with site.living():
        await site.tell("task", make_task(), 1.5 + deaths)
        assert {(offer.round, offer.failure) for offer in site.offers} == {(1, None)}
        assert site.trainer.rounds == [1] * (deaths + 1)
        assert site.agent.phase == "idle"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == deaths
    for number, line in enumerate(warnings, 1):
        assert names_all(line, "round 1", f"death {number} (signal 9)", number + 1, MAX_ATTEMPTS)


async def test_a_task_that_kills_every_trainer_fails_with_the_cause_of_the_last_death(site, make_task) -> None:
    """After the last attempt, not before; the next task begins to count anew."""
    site.trainer = Mortal(deaths=MAX_ATTEMPTS)
    async with site.living():
        await site.tell("task", make_task(), 1.0)
        assert [offer.failure for offer in site.offers] == [f"death {MAX_ATTEMPTS} (signal 9)"]
        assert site.trainer.rounds == [1] * MAX_ATTEMPTS
        site.trainer.deaths += 1
        await site.tell("task", make_task(round=2), 1.5)
        assert site.trainer.rounds == [1] * MAX_ATTEMPTS + [2, 2]
        assert site.offers[-1].failure is None


async def test_a_trainer_that_died_after_its_commit_has_done_the_task(site, make_task) -> None:
    """Between the rename in the outbox and its word to the agent: nothing is trained twice."""
    site.trainer = Mortal(deaths=1, after="commit")
    async with site.living():
        await site.tell("task", make_task(), 2.5)
        assert site.trainer.rounds == [1]
        assert [offer.failure for offer in site.offers] == [None]


async def test_a_task_that_failed_is_not_tried_again(site, make_task) -> None:
    """Bad data, too little memory: the next attempt would end alike."""
    site.trainer.failure = TaskFailed("out of memory")
    async with site.living():
        await site.tell("task", make_task(), 3.5)
        assert site.trainer.rounds == [1]
        assert site.offers[0].failure == "out of memory"


async def test_a_newer_task_ends_the_attempts(site, make_task) -> None:
    """It comes while the second attempt trains: that is given up, and the older round is never offered."""
    site.trainer = Mortal(deaths=1, seconds=5.0)
    async with site.living():
        await site.tell("task", make_task(), 1.0)
        assert site.agent.phase == "training"
        await site.tell("task", make_task(round=2), 6.0)
        assert site.trainer.rounds == [1, 1, 2]
        assert site.trainer.given_up == [1]
        assert site.offered[0] == 2


@pytest.mark.parametrize("settled", ["while an earlier trainer ends", "right after the task"])
async def test_an_update_that_is_settled_while_its_task_comes_again_is_not_trained_again(
    site, make_task, settled
) -> None:
    """The agent was killed with the update in its outbox: the server, which had no word of it, repeats the task.

    Found by chaos: the update was accepted, and gone, before the old trainer had ended and the outbox was looked at.
    """
    async with site.living():
        task = make_task()
        await site.tell("task", task, 1.5)
        assert site.offered == [1]
        site.trainer.wait_s = 5.0
        await site.tell("task", task, 1.0 if settled == "while an earlier trainer ends" else 0.0)
        ack = Ack(run=task.run, round=1, device=DEVICE, start=task.params.digest, verdict="accepted")
        await site.tell("ack", ack, 10.0)
        assert site.agent.outbox.entries() == []
        assert site.trainer.rounds == [1]
        assert site.agent.phase == "idle"
