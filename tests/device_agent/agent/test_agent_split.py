"""Agent and split tasks in virtual time, with a stub trainer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from device_agent.exchange import outbox as files
from device_agent.exchange.split_session import Exchange
from device_agent.trainer.interface import Job
from shared.errors import SessionLost
from shared.protocol.messages import Ack, Assignment, Hyper
from tests.device_agent.agent_side import DEVICE, StubTrainer

pytestmark = pytest.mark.virtual_time

SPLIT = Assignment(seed=3, hyper=Hyper(), steps=4)


@dataclass
class Learning(StubTrainer):
    """Its state after a task names the task, behind the state that it began with.

    Attributes:
        losses: How many sessions the server loses.
    """

    losses: int = 0
    began: list[bytes] = field(default_factory=list)
    exchanges: list[Exchange | None] = field(default_factory=list)

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        before = _read(job.state)
        self.began.append(before)
        self.exchanges.append(exchange)
        assert {*_names(job.draft)} <= {"payload", "update"}, "more than what is overwritten"
        await super().__call__(job)
        if len(self.jobs) <= self.losses:
            raise SessionLost("the server has restarted")
        (Path(job.draft) / files.STATE).write_bytes(before + b"%d " % job.task.round)


def _read(path: str) -> bytes:
    return Path(path).read_bytes() if Path(path).exists() else b""


def _names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def learning(site) -> Learning:
    site.trainer = Learning()
    return site.trainer


def ack(task, verdict: str) -> Ack:
    return Ack(run=task.run, round=task.round, device=DEVICE, start=task.params.digest, verdict=verdict)


async def test_only_a_split_task_is_given_a_way_to_exchange_steps(site, make_task, learning) -> None:
    async with site.living():
        await site.tell("task", make_task(round=1, assignment=SPLIT), 1.5)
        await site.tell("task", make_task(round=2), 1.5)
        assert [exchange is None for exchange in learning.exchanges] == [False, True]
        assert set(site.offered) == {1, 2}


async def test_a_session_that_the_server_lost_is_begun_anew_as_often_as_it_takes(site, make_task, learning) -> None:
    """Each time from an empty draft and an exchange of its own; it is no death of the trainer, and no failure."""
    learning.losses = 5
    async with site.living():
        await site.tell("task", make_task(assignment=SPLIT), 8.0)
        assert [(offer.round, offer.failure) for offer in site.offers][:1] == [(1, None)]
        assert len(learning.jobs) == 6
        assert len({id(exchange) for exchange in learning.exchanges}) == 6
        assert learning.began == [b""] * 6


@pytest.mark.parametrize("order", [("task", "void"), ("void", "task"), ("void",), ("task", "void", "task")])
async def test_a_void_update_is_dropped_and_its_task_done_anew_once(site, make_task, learning, order) -> None:
    """Whatever comes first, the word or the task again; from the state of before the round, and for the same update."""
    task = make_task(round=2, assignment=SPLIT)
    async with site.living():
        await site.tell("task", make_task(round=1), 1.5)
        await site.tell("ack", ack(make_task(round=1), "accepted"), 0.5)
        await site.tell("task", task, 1.5)
        assert learning.began == [b"", b"1 "]
        for word in order:
            await site.tell("task" if word == "task" else "ack", task if word == "task" else ack(task, "void"))
        await asyncio.sleep(0.5)
        assert site.agent.outbox.entries() == []
        site.offers.clear()
        await asyncio.sleep(6.0)
        assert learning.began == [b"", b"1 ", b"1 "]
        assert set(site.offered) == {2}
        await site.tell("ack", ack(task, "accepted"), 0.5)
        assert (site.folder / "state" / "trial").read_bytes() == b"1 2 "


async def test_a_void_update_of_an_older_task_does_not_stop_the_newer_one(site, make_task, learning) -> None:
    older, newer = make_task(round=1, assignment=SPLIT), make_task(round=2, assignment=SPLIT)
    async with site.living():
        await site.tell("task", older, 1.5)
        await site.tell("task", newer, 0.2)
        await site.tell("ack", ack(older, "void"), 3.0)
        assert learning.rounds == [1, 2]


async def test_what_a_void_update_cost_is_not_told_as_a_round_s(site, make_task, learning) -> None:
    """Its time and joules are not those of the update that will count."""
    task = make_task(assignment=SPLIT)
    async with site.living():
        await site.tell("task", task, 1.5)
        await site.tell("ack", ack(task, "void"), 40.0)
        assert len(site.reports) > 1
        assert all(report.spent is None for report in site.reports)


async def test_a_round_that_is_repeated_begins_with_the_state_of_before_it(site, make_task, learning) -> None:
    """Also where its update was accepted: the server may lose the round after that. The next round goes on from it."""
    async with site.living():
        for number in (1, 2, 2, 3, 3, 4):
            task = make_task(round=number, assignment=SPLIT)
            await site.tell("task", task, 1.5)
            await site.tell("ack", ack(task, "accepted"), 0.5)
        assert learning.began == [b"", b"1 ", b"1 ", b"1 2 ", b"1 2 ", b"1 2 3 "]
        assert _names(site.folder / "state") == ["trial", "trial@000004"]


async def test_a_newer_task_ends_a_session(site, make_task, learning) -> None:
    learning.seconds = 100.0
    async with site.living():
        await site.tell("task", make_task(round=1, assignment=SPLIT), 1.0)
        learning.seconds = 1.0
        await site.tell("task", make_task(round=2, assignment=SPLIT), 2.0)
        assert learning.given_up == [1]
        assert set(site.offered) == {2}
