"""Whole rounds, the same suite over memory, mosquitto and the embedded broker; FedAvg bit for bit by the textbook."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest
from torch import Tensor

from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, UpdateAccepted, closed_rounds
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Update
from shared.protocol.topics import topic
from shared.transport.base import Transport
from shared.transport.presence import Session
from tests.edge_server.fleets import RUN, Site, until
from tests.edge_server.harness import write_examples
from tests.edge_server.textbook import NAMES, ROUNDS, make_plan, require_equal, textbook

numbers = itertools.count()


@pytest.fixture
def here(network, tmp_path) -> Site:
    """Return a site of its own on the network, so that tests do not hear one another."""
    return Site(network, make_plan(tmp_path), tmp_path, name=f"site{next(numbers)}")


def test_fedavg_over_the_wire_is_the_textbook_bit_for_bit(here):
    """Frames, outboxes, files and arrival order leave no trace in the result."""

    state, records = here.play()
    expected = textbook(here.plan)
    require_equal(state.tree, expected)
    rounds = closed_rounds(records)
    assert [(closed.outcome, closed.arrived) for closed in rounds] == ROUNDS * [("aggregated", NAMES)]
    assert not any(closed.refused for closed in rounds)
    assert rounds[-1].accuracy > 0.5
    size = sum(leaf.nbytes for leaf in expected.values())
    for closed in rounds:
        for sizes in (closed.bytes_up, closed.bytes_down):
            assert set(sizes) == set(NAMES)
            assert all(size < one < 1.2 * size + 600 for one in sizes.values())


def test_a_device_that_cannot_train_is_counted_and_the_others_go_on(here):
    """Its cause is in the record, in every round anew."""

    async def play() -> list[RoundClosed]:
        async with here.devices("a", "b"):
            await here.start("c", broken="no memory left")
            return closed_rounds((await here.serve())[1])

    for closed in here.network.run(play()):
        assert (closed.outcome, closed.arrived) == ("aggregated", ("a", "b"))
        assert closed.failed == {"c": "no memory left"}


def test_devices_come_and_go_while_a_run_goes_on(network, tmp_path):
    """Who comes is of the next cohort; who goes is waited for until the deadline, and then not asked any more."""
    deadline_s = 5.0 if network.broker else 1.5  # real seconds are enough on a busy machine too
    plan = make_plan(tmp_path, cohort="min_devices = 2", round=f"deadline_s = {deadline_s}")
    here = Site(network, plan, tmp_path, name=f"site{next(numbers)}")

    async def play() -> list[RoundClosed]:
        here.held = {("a", 1): asyncio.Event(), ("a", 2): asyncio.Event()}
        async with here.devices("a", "b"):
            serving = asyncio.create_task(here.serve())
            await until(lambda: ("a", 1) in here.trained)
            comes = await here.start("c")
            if network.broker:
                await comes.connected.wait()  # what it says at its birth is at the broker
            here.held["a", 1].set()
            await until(lambda: ("a", 2) in here.trained)
            await here.stop("a")
            return closed_rounds((await serving)[1])

    rounds = network.run(play())
    assert [closed.arrived for closed in rounds] == [("a", "b"), ("b", "c"), ("b", "c")]
    assert not any(closed.failed or closed.refused for closed in rounds)


async def published(transport: Transport, name: str, data: bytes) -> None:
    """Publish as soon as the broker is there: on a busy machine it may hang up on who has just come."""
    while True:
        with suppress(Unreachable):
            return await transport.publish(name, data)
        await asyncio.sleep(0.02)


def test_nonsense_on_the_topics_is_refused_and_changes_nothing(here):
    """Counted in the round's record; the result is the textbook's still."""
    forged = wire.encode(Update(run=RUN, round=1, device="a", params=None, failure="forged"))
    session = Session(here.folder / "evil", "zoe", "elsewhere", "x")

    async def play() -> tuple[dict[str, Tensor], list[AnyRecord]]:
        here.held["c", 1] = asyncio.Event()
        async with here.devices("a", "b"):
            await here.start("c")
            serving = asyncio.create_task(here.serve())
            await until(lambda: ("c", 1) in here.trained)
            async with here.network.connected(f"{here.name}.evil", session.presence) as transport:
                for data in (b"noise", b"FM\x02later", b"FC\x01short", forged):
                    await published(transport, topic(here.name, "zoe", "update"), data)
            here.held["c", 1].set()
            state, records = await serving
            return state.tree, records

    tree, records = here.network.run(play())
    require_equal(tree, textbook(here.plan))
    rounds = closed_rounds(records)
    assert rounds[0].refused == {"malformed": 1, "version": 1, "truncated": 1, "unknown-device": 1}
    assert [(closed.arrived, closed.failed) for closed in rounds] == ROUNDS * [(NAMES, {})]


@pytest.mark.parametrize("kind", ["update", "checkpoint"])
def test_a_server_that_restarts_ends_at_the_same_bits(here, kind):
    """Devices stay, hear that it is back, and train nothing twice that was stored."""

    def cut(written: object) -> bool:
        return written == 2 if kind == "checkpoint" else isinstance(written, UpdateAccepted) and written.round == 2

    state, records = here.play(lambda: here.serve_twice(cut))
    require_equal(state.tree, textbook(here.plan))
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]
    accepted = [(one.device, one.round) for one in records if isinstance(one, UpdateAccepted)]
    assert len(accepted) == len(set(accepted)) == ROUNDS * len(NAMES)
    assert len(set(here.trained)) == len(accepted)


def test_a_silent_device_costs_the_deadline(network, tmp_path):
    """It trains for longer than the round lasts; its update comes late and is settled, the others' count."""
    rounds, deadline_s = (1, 5.0) if network.broker else (2, 1.0)  # real seconds are enough on a busy machine too
    plan = make_plan(tmp_path, rounds=rounds, round=f"deadline_s = {deadline_s}")
    here = Site(network, plan, tmp_path, name=f"site{next(numbers)}")

    async def play() -> list[RoundClosed]:
        async with here.devices("a", "b"):
            await here.start("c", compute_s=600.0)
            return closed_rounds((await here.serve())[1])

    closings = network.run(play())
    assert [closed.arrived for closed in closings] == rounds * [("a", "b")]
    assert all(0.9 * deadline_s < closed.seconds < deadline_s + 60.0 for closed in closings)


def test_devices_try_the_final_model_on_what_they_held_back(network, tmp_path):
    """Their figures are in the record, and every round has those of the model before it."""
    data = f"{write_examples(tmp_path, 90)}\nholdout = 0.2"
    plan = make_plan(tmp_path, data=data, evaluation="every = 2\non_device = true")
    here = Site(network, plan, tmp_path, name=f"site{next(numbers)}")

    _, records = here.play()
    [evaluated] = [record for record in records if isinstance(record, Evaluated)]
    assert set(evaluated.by_device) == set(NAMES)
    assert 0 < evaluated.accuracy <= 1
    assert [closed.accuracy is not None for closed in closed_rounds(records)] == [False, True, True]
    assert all(closed.device_accuracy is not None for closed in closed_rounds(records))
