"""What an agent does with failures, nonsense, absences and its own end: in virtual time, with a stub trainer."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from device_agent.exchange import outbox as files
from device_agent.trainer.interface import Job
from shared.errors import TaskFailed, Unreachable
from shared.protocol.messages import Transfer, Update
from shared.transport.memory import MemoryTransport
from tests.device_agent.agent_side import DEVICE, StubTrainer
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time


async def test_a_failed_training_is_reported_with_its_cause_and_the_next_task_works(site, make_task) -> None:
    async with site.living():
        site.trainer.failure = TaskFailed("the trainer was killed (signal 9)" + "!" * 1000)
        await site.tell("task", make_task(round=1), 1.5)
        site.trainer.failure = None
        await site.tell("task", make_task(round=2), 1.5)
        failed, done = site.offers[0], site.offers[-1]
        assert failed.failure.startswith("the trainer was killed (signal 9)!")
        assert len(failed.failure) == 500
        assert (failed.round, failed.params, failed.weight) == (1, None, 0.0)
        assert (done.round, done.failure) == (2, None)
        assert site.agent.phase == "idle"


async def test_parameters_too_large_for_this_device_are_a_failed_task(site, make_task) -> None:
    """Refused before a byte is asked for; the server hears why."""
    async with site.living():
        huge = Transfer(digest=bytes(16), size=(1 << 20) + 1, frame_bytes=1024)
        await site.tell("task", make_task(params=huge), 0.5)
        (offer,) = site.offers
        assert names_all(offer.failure, 1048577, 1048576, "link.max_payload_mb")
        assert not (site.folder / "params").exists()
        await site.tell("task", make_task(round=2), 1.5)
        assert site.trainer.rounds == [2]


@pytest.mark.parametrize("folder", ["", "outbox", "state"])
async def test_a_state_folder_that_is_deleted_is_made_anew(site, make_task, caplog, folder) -> None:
    """While a task is under way, and while none is; the log says once what is lost."""
    async with site.living():
        await site.tell("task", make_task(round=1), 1.5)
        shutil.rmtree(site.folder / folder)
        await site.tell("task", make_task(round=2), 5.0)
        await site.tell("task", make_task(round=3), 0.5)
        shutil.rmtree(site.folder / folder)
        await site.tell("task", make_task(round=4), 5.0)
        assert site.offers[-1].failure is None
        assert {2, 4} <= set(site.offered)
        assert site.agent.phase == "idle"
        assert (site.folder / "outbox").stat().st_mode & 0o777 == 0o700
    deleted = [record for record in caplog.records if record.name == files.__name__]
    assert len(deleted) == (0 if folder == "state" else 2)


async def test_a_disk_that_refuses_is_a_failed_task(site, make_task) -> None:
    """The parameters cannot be written: a folder lies where their file belongs."""
    async with site.living():
        (site.folder / "params").mkdir()
        await site.tell("task", make_task(), 0.5)
        assert "params" in site.offers[0].failure
        assert site.agent.phase == "idle"


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"FM", b"FM\x02\x80", b"FM\x01\x80", b"FM\x01" + b"\xff" * 100, bytes(2 << 20)],
    ids=["empty", "text", "cut", "version", "no-type", "garbage", "huge"],
)
async def test_bytes_that_are_no_task_are_dropped(site, make_task, data) -> None:
    async with site.living():
        await site.tell("task", data, 0.1)
        await site.tell("task", make_task(), 1.5)
        assert site.offered == [1]


@pytest.mark.parametrize("run", ["../../escape", "..", "", "/etc", "a/b", ".hidden", "x" * 65, "a@000001\x00"])
async def test_a_run_whose_name_would_leave_its_folder_is_dropped(site, make_task, run: str) -> None:
    """No file of any name is made for it, not even a failure."""
    before = set(site.folder.parent.rglob("*"))
    async with site.living():
        await site.tell("task", make_task(run=run), 3.0)
        assert site.trainer.jobs == []
        assert site.offers == []
    assert {path.name for path in set(site.folder.parent.rglob("*")) - before} == {"outbox", "state"}


async def test_a_task_for_another_device_is_dropped(site, make_task) -> None:
    async with site.living():
        await site.tell("task", make_task(device="other"), 3.0)
        assert site.trainer.jobs == []


async def test_a_broker_that_is_away_is_tried_again_soon(site) -> None:
    """Not only after the long pause between reports."""

    class Shaky(MemoryTransport):
        refusals = 2

        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if topic.endswith("/report") and self.refusals:
                self.refusals -= 1
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    site.transport = Shaky()
    async with site.living():
        await asyncio.sleep(20)
        assert [report.at for report in site.reports] == pytest.approx([2.0])


def test_a_fault_of_ours_ends_the_agent(site, virtually, make_task) -> None:
    """An error nobody foresaw is not swallowed: the process ends and whoever supervises it starts it anew."""

    async def routine() -> None:
        site.trainer.failure = KeyError("a fault")
        async with site.living():
            await site.tell("task", make_task(), 30.0)

    with pytest.raises(KeyError, match="a fault"):
        virtually(routine())


async def test_cancelling_it_gives_the_job_up_and_leaves_no_task_behind(site, make_task) -> None:
    """What SIGTERM does."""
    async with site.living():
        await site.tell("task", make_task(), 0.5)
    assert site.trainer.given_up == [1]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_committed_entry_of_a_superseded_task_keeps_its_state(site, make_task, tmp_path) -> None:
    """The trainer finished just as the newer task came: its state is the one the newer task starts from."""

    @dataclass
    class Late(StubTrainer):
        states: list[bytes] = field(default_factory=list)

        async def __call__(self, job: Job) -> None:
            self.states.append(read(Path(job.state)))
            try:
                await super().__call__(job)
            except asyncio.CancelledError:
                draft = Path(job.draft)
                (draft / files.STATE).write_bytes(b"after round 1")
                files.write(draft, Update(run="trial", round=1, device=DEVICE, params=None, weight=1.0))
                files.commit(draft)
                raise

    site.trainer = Late()
    async with site.living():
        site.agent.trainer = site.trainer
        await site.tell("task", make_task(round=1), 0.5)
        await site.tell("task", make_task(round=2), 1.5)
        assert site.trainer.states == [b"", b"after round 1"]
        assert site.offered[-2:] == [1, 2]


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
