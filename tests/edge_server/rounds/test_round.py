"""The parts of a round: who shares a transmission, and what of it reaches whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from device_agent.exchange.download import Download
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.broadcast import group_audiences
from edge_server.rounds.check_plan import load
from edge_server.rounds.round import Rounds
from edge_server.rounds.round_figures import list_accuracies, weighted_mean
from shared.algorithms.fedavg import fedavg
from shared.codecs.dense import dense
from shared.models.build import build_blank
from shared.protocol import payload, wire
from shared.protocol.messages import Status, Task, Update
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.tensors.tree import State, Tree
from shared.transfer import to_file
from shared.transfer.receiver import Policy
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import SITE, beginning, moved, packed, site, virtual, write_plan

pytestmark = pytest.mark.virtual_time


def test_devices_with_the_very_same_leaves_share_one_transmission():
    """Sameness is of the tensors, not of their values: no tree is compared number by number."""
    w, b = torch.ones(3), torch.zeros(2)
    trees: dict[str, Tree] = {
        "d": {"w": w, "b": b},
        "a": {"b": b, "w": w},
        "part": {"w": w},
        "copy": {"w": w.clone(), "b": b},
        "c": {"w": w, "b": b},
    }
    groups = [devices for _, devices in group_audiences(trees)]
    assert groups == [["a", "c", "d"], ["copy"], ["part"]]
    assert all(tree.keys() == trees[devices[0]].keys() for tree, devices in group_audiences(trees))
    assert group_audiences({}) == []


async def test_equal_payloads_that_do_not_share_leaves_reach_everybody(tmp_path):
    """Two devices are sent copies of the same values: the same digest, two transmissions, and both are served."""
    copying = replace(
        fedavg(), broadcast=lambda state, _device, _told: {key: leaf.clone() for key, leaf in state.tree.items()}
    )
    plan = load(write_plan(tmp_path, cohort="min_devices = 2"), tmp_path)
    devices = ("one", "two")

    async def play() -> tuple[str, ...]:
        broker, clock = MemoryTransport(), asyncio.get_running_loop().time
        store = SqliteStore(tmp_path / "run", durable=False)
        server = Server(SITE, broker, clock, inline)
        link = LinkConfig(frame_bytes=1024)
        rounds = Rounds(ActiveRun("run", plan, server, store, copying, link, build_blank(plan.model)))
        for name in devices:
            birth = Status(device=name, session=1, instance=name, online=True)
            await broker.publish(topic(SITE, name, "status"), wire.encode(birth), retain=True)
        try:
            async with server.listening(), asyncio.TaskGroup() as group:
                for name in devices:
                    group.create_task(fetch_and_answer(broker, name))
                _, closed = await rounds.run_round(1, State(beginning(plan)), None, {})
        finally:
            store.close()
        return closed.arrived

    async def fetch_and_answer(broker: MemoryTransport, name: str) -> None:
        place = tmp_path / name
        place.mkdir()
        clock = asyncio.get_running_loop().time
        download = Download(broker, SITE, name, place, inline, clock, policy=Policy(4, 1.0, 1 << 20))
        async with broker.subscribe(topic(SITE, name, "task")) as tasks:
            task = wire.decode_as(Task, (await anext(tasks))[1])
        path, _ = await download.fetch(task)
        received = dense().decode(payload.unpack(to_file.view(path))).tree
        for key, leaf in beginning(plan).items():
            assert torch.equal(received[key], leaf)
        failure = Update(run=task.run, round=task.round, device=name, params=None, failure="only looking")
        await broker.publish(topic(SITE, name, "update"), wire.encode(failure))

    async with asyncio.timeout(25):  # virtual seconds, below the deadline of the round
        assert await play() == ()


def test_what_devices_get_in_the_next_round_is_the_aggregate(tmp_path):
    """Not the model they began with: the digest of what they are told to fetch changes."""

    async def play() -> list[bytes]:
        async with site(tmp_path) as here:
            one, two = await here.device("one"), await here.device("two")
            digests = []
            for _ in range(2):
                task = await one.task()
                digests.append(task.params.digest)
                assert task.shared
                await one.answer(task, moved(here.plan, 0.5))
                await two.answer(await two.task(), moved(here.plan, 0.5))
            await here.ended()
            first = packed(dict(sorted(beginning(here.plan).items())))
            assert digests[0] == payload.digest([memoryview(first)])
            return digests

    first, second = virtual(play())
    assert first != second


def test_weighted_means():
    """Nothing measured is None, not zero."""
    assert weighted_mean([]) is None
    assert weighted_mean([(5.0, 0.0)]) is None
    assert weighted_mean([(1.0, 1.0), (4.0, 2.0)]) == pytest.approx(3.0)


def test_accuracies_are_of_devices_that_measured():
    """Without a number of examples a device counts as one."""
    update = Update(run="r", round=1, device="a", params=None)
    found = list_accuracies(
        {
            "a": update,
            "b": Update(run="r", round=1, device="b", params=None, metrics={"eval_accuracy": 0.5}),
            "c": Update(
                run="r", round=1, device="c", params=None, metrics={"eval_accuracy": 0.25, "eval_examples": 7.0}
            ),
        }
    )
    assert found == [(0.5, 1.0), (0.25, 7.0)]
