"""Agent on a full or read-only disk: it reports, keeps updates and recovers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.trainer.interface import Job
from shared.errors import Unwritable
from shared.protocol.messages import Ack
from tests.device_agent.agent_side import DEVICE, Device, Site, StubTrainer, update_of
from tests.naming import names_all, naming

pytestmark = pytest.mark.virtual_time


class Committing(StubTrainer):
    """Leaves a state with each update, and commits as the real trainer does."""

    async def __call__(self, job: Job) -> None:
        (Path(job.draft) / outbox.STATE).write_bytes(b"after")
        await super().__call__(job)
        outbox.commit(Path(job.draft))


@pytest.fixture
def site(disk, parameters, cut) -> Site:
    """Return an agent whose folder is a disk of its own."""
    return Site(disk.path, parameters, cut)


@pytest.mark.parametrize(("refuse", "cause"), [("fill", errno.ENOSPC), ("lock", errno.EROFS)])
async def test_a_task_fails_with_the_cause_and_the_next_one_works(site, disk, make_task, refuse, cause) -> None:
    """The report of round 2 comes although it can be written nowhere; the update of round 1 waits through it all."""
    async with site.living():
        await site.tell("task", make_task(round=1), 1.5)
        if refuse == "fill":
            (disk.path / "params").unlink()  # else the next parameters would lie in its place
            disk.fill()
        else:
            disk.read_only(yes=True)
        await site.tell("task", make_task(round=2), 1.5)
        [failure] = [offer.failure for offer in site.offers if offer.round == 2]
        assert names_all(failure, disk.path, os.strerror(cause), "MiB")
        assert "\n" not in failure
        assert site.agent.phase == "idle"
        disk.read_only(yes=False)
        disk.make_room()
        await site.tell("task", make_task(round=3), 1.5)
        assert [(offer.round, offer.failure) for offer in site.offers][-2:] == [(1, None), (3, None)]
        for number in (1, 3):
            start = site.offers[-1].start
            await site.tell("ack", Ack(run="trial", round=number, device=DEVICE, start=start, verdict="accepted"), 0.1)
        assert site.agent.outbox.entries() == []


async def test_a_state_that_cannot_be_taken_over_is_no_failed_task(site, disk, make_task) -> None:
    """The update is whole and committed: it is offered, and no report takes its place."""
    site.trainer = Committing()
    async with site.living():
        (disk.path / "state" / "trial").mkdir()  # no file can be put here
        await site.tell("task", make_task(round=1), 1.5)
        assert [(offer.round, offer.failure) for offer in site.offers] == [(1, None)]
        (disk.path / "state" / "trial").rmdir()
        await site.tell("task", make_task(round=2), 1.5)
        assert site.offers[-1].failure is None
        assert (disk.path / "state" / "trial").read_bytes() == b"after"


async def test_a_task_that_might_not_fit_beside_what_waits_fails_before_a_byte_comes(site, make_task) -> None:
    """Room is reserved for an update as large as the parameters; the waiting one stays."""
    async with site.living():
        site.agent.outbox.limit = 400
        await site.tell("task", make_task(round=1), 1.5)
        assert site.offers[0].failure is None
        await site.tell("task", make_task(round=2), 0.5)
        assert "outbox_mb" in site.offers[-1].failure
        assert site.trainer.rounds == [1]
        assert [entry.update.round for entry in site.agent.outbox.entries()] == [1, 2]


async def test_an_update_that_rotted_while_the_agent_was_away_is_not_offered_for_ever(site, disk, make_task) -> None:
    """It is set aside before the first offer, and its task is done again."""
    async with site.living():
        await site.tell("task", make_task(round=1), 1.5)
    payload = disk.path / "outbox" / "trial@000001" / outbox.PAYLOAD
    payload.write_bytes(payload.read_bytes()[:-1] + b"!")
    site.offers.clear()
    async with site.living():
        assert site.offers == []
        await site.tell("task", make_task(round=1), 1.5)
        assert site.trainer.rounds == [1, 1]
        assert site.offered == [1]


def test_training_on_a_full_disk_is_a_clear_error(disk, make_job, make_task) -> None:
    """Of the payload as of the state; nothing half is an entry, and with room the same task gives the same update."""
    device = Device(disk.path, make_job, Outbox(disk.path / "outbox", disk.path / "state"))
    reference = device.perform(make_task())
    whole = (reference / outbox.PAYLOAD).read_bytes()
    device.outbox.draft("trial", 9)
    disk.fill(leave_bytes=4096)
    with pytest.raises(Unwritable, match=naming(os.strerror(errno.ENOSPC), "MiB")):
        device.perform(make_task())
    assert device.outbox.entries() == []
    disk.make_room()
    again = device.perform(make_task())
    assert (again / outbox.PAYLOAD).read_bytes() == whole
    assert update_of(again).failure is None
