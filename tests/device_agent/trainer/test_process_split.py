"""Split session through the trainer's pipes: completion, abort, restart, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from device_agent.exchange import outbox as files
from device_agent.exchange.outbox import Outbox
from device_agent.trainer.perform import begin_split_training
from shared.algorithms import ALGORITHMS
from shared.errors import SessionLost, TaskFailed, TrainerDied
from shared.protocol.messages import Spec
from shared.registry import build
from tests.device_agent.agent_side import METER, START_S, Device, Host, is_alive, until
from tests.device_agent.server_side import ALGORITHM, STEPS, Exchanged, below, finish, payload_of, split


class Site(Host):
    """A trainer's host whose tasks are split."""

    folder: Path
    parameters: bytes

    async def session(self, task, exchange) -> None:
        draft = self.outbox.draft(task.run, task.round)
        job = self.make_job(task, draft)
        await self.trainer(msgspec.structs.replace(job, params=below(self.folder, self.parameters)), exchange)
        self.outbox.commit(draft)


@pytest.fixture
def host(shared_trainer, tmp_path: Path, make_job, parameters) -> Site:
    site = Site(*shared_trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)
    site.folder, site.parameters = tmp_path, parameters
    return site


class Waiting(Exchanged):
    """Answers no step from the second on."""

    error: Exception | None = None

    async def __call__(self, step: int, parts):
        if step == 1:
            return await super().__call__(step, parts)
        self.steps.append(step)
        if self.error:
            raise self.error
        await asyncio.sleep(600)
        raise AssertionError


def test_a_session_through_the_pipes_gives_the_bits_of_one_in_process(host, make_task, tmp_path: Path) -> None:
    """Twice, warm; with what its frames took in the cost; and once more with steps that went on without it."""
    task, exchange = split(make_task()), Exchanged()
    host.do(host.session(task, exchange))
    assert exchange.steps == [1, 2, 3, 4]
    came = payload_of(host.outbox, 1)
    cost = host.outbox.entries()[0].update.cost
    assert (cost.features_bytes, cost.gradient_bytes) == exchange.bytes_so_far
    assert 0 < cost.exchange_s < START_S
    draft = host.outbox.draft("trial", 9)
    job = msgspec.structs.replace(host.make_job(task, draft), params=below(tmp_path, host.parameters))
    device = Device(tmp_path, host.make_job, host.outbox)
    assert finish(begin_split_training(job, device.workspace, METER.task, lambda: False)) == STEPS
    assert (draft / files.PAYLOAD).read_bytes() == came
    missing = Exchanged(miss={2: 2})
    host.do(host.session(msgspec.structs.replace(task, round=2), missing))
    assert missing.steps == [1, 2, 4]
    assert payload_of(host.outbox, 2) != came


def test_a_method_that_frees_memory_gives_the_same_bits_and_its_child_goes_on_with_others(host, make_task) -> None:
    """Activations are computed again on the way back; how its process keeps memory is set anew for each task."""
    frees = Spec(name=ALGORITHM.name, options={**ALGORITHM.options, "recompute": True})
    assert build(ALGORITHMS, frees, "algorithm").resources.frees_memory
    for number, spec in enumerate((ALGORITHM, frees, ALGORITHM), 1):
        host.do(host.session(msgspec.structs.replace(split(make_task()), round=number, algorithm=spec), Exchanged()))
    plain, freed, after = (payload_of(host.outbox, number) for number in (1, 2, 3))
    assert plain == freed == after


@pytest.mark.parametrize("lost", [SessionLost("the server has restarted"), Exception("a fault of ours")])
def test_a_session_whose_exchange_fails_is_given_up_and_the_child_stays(host, make_task, lost) -> None:
    """The error is the exchange's own; begun anew, the same task gives the bits of a session without trouble."""
    host.do(host.session(split(make_task(round=3)), Exchanged()))
    pid, breaking = host.pid, Waiting()
    breaking.error = lost
    with pytest.raises(type(lost), match=str(lost)):
        host.do(host.session(split(make_task()), breaking))
    assert breaking.steps == [1, 2]
    host.do(host.session(split(make_task()), Exchanged()))
    assert host.pid == pid
    assert payload_of(host.outbox, 1) == payload_of(host.outbox, 3)


def test_a_session_cancelled_while_it_waits_ends_at_once(host, make_task) -> None:
    """A newer task has come: the child is free for it although no gradient will ever come."""

    async def story() -> None:
        await host.session(split(make_task(round=5)), Exchanged())
        pid, waiting = host.pid, Waiting()
        session = asyncio.create_task(host.session(split(make_task()), waiting))
        await until(lambda: 2 in waiting.steps)
        began = time.monotonic()
        session.cancel()
        await asyncio.wait({session})
        assert session.cancelled()
        await host.session(split(make_task(round=2)), Exchanged())
        assert time.monotonic() - began < 60.0
        assert host.pid == pid
        assert 1 not in host.rounds

    host.do(story())


def test_a_trainer_that_dies_while_it_waits_is_known_to_be_dead_at_once(host, make_task) -> None:
    """Long before the gradient comes; the same session can be begun anew in another child."""

    async def story() -> None:
        waiting = Waiting()
        session = asyncio.create_task(host.session(split(make_task()), waiting))
        await until(lambda: 2 in waiting.steps, START_S)
        os.kill(host.pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="signal 9"):
            await asyncio.wait_for(session, START_S)
        await host.session(split(make_task()), Exchanged())

    host.do(story(), 2 * START_S)


def test_steps_that_nobody_can_exchange_fail_the_task(host, make_task) -> None:
    with pytest.raises(TaskFailed, match="server"):
        host.do(host.session(split(make_task()), None))


AGENT = """
import asyncio, sys
from pathlib import Path
import msgspec
from device_agent.trainer.interface import Job
from device_agent.trainer.process import TrainerOptions, TrainerProcess

class Never:
    bytes_so_far = 0, 0
    async def __call__(self, step, parts):
        print("waits", flush=True)
        await asyncio.sleep(600)

async def main(lock, job):
    trainer = TrainerProcess(Path(lock), 600.0, TrainerOptions(threads=1))
    await trainer.ready()
    print(trainer._process.pid, flush=True)
    await trainer(job, Never())

asyncio.run(main(sys.argv[1], msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)))
"""


async def test_a_trainer_that_waits_for_a_killed_agent_ends(tmp_path: Path, make_job, make_task, parameters) -> None:
    """Nobody is left to exchange its step with: it ends, its lock is free, no update is left of the session."""
    box = Outbox(tmp_path / "outbox", tmp_path / "state")
    draft = box.draft("trial", 1)
    job = msgspec.structs.replace(make_job(split(make_task()), draft), params=below(tmp_path, parameters))
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AGENT, str(tmp_path / "lock")), stdin=PIPE, stdout=PIPE
    )
    agent.stdin.write(msgspec.msgpack.encode(job))
    agent.stdin.close()
    pid = int(await agent.stdout.readline())
    assert await agent.stdout.readline() == b"waits\n"
    agent.kill()
    await agent.wait()
    await until(lambda: not is_alive(pid))
    assert box.entries() == []
