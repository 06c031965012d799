"""Split rounds over memory and brokers equal one process, bit for bit."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from torch import Tensor

from edge_server.journal.records import AnyRecord, Rewound, UpdateAccepted, closed_rounds, drop_void
from tests.edge_server.fleets import RUN, Site, Stopping, until
from tests.edge_server.textbook import NAMES, ROUNDS, alone, make_plan, require_equal

pytestmark = pytest.mark.usefixtures("plain_split")

numbers = itertools.count()
STEPS, MANY = 4, 40
SPLIT = {
    "algorithm": f'name = "plain-split"\noptions = {{ steps = {STEPS} }}',
    "hyper": "batch_size = 8\nlearning_rate = 0.2",
}

OF_MANY = f'name = "plain-split"\noptions = {{ steps = {MANY} }}'


@pytest.fixture
def here(network, tmp_path) -> Site:
    """Return a site of its own on the network."""
    return Site(network, make_plan(tmp_path, **SPLIT), tmp_path, name=f"site{next(numbers)}")


def test_a_split_run_is_what_one_process_computes_alone_bit_for_bit(here):
    """Frames, outboxes, processes' turns and arrival order leave no trace in the result."""

    async def play() -> tuple[dict[str, Tensor], list[AnyRecord]]:
        async with here.devices(*NAMES):
            state, records = await here.serve()
            return state.tree, records

    tree, records = here.network.run(play())
    require_equal(tree, alone(here.plan))
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.steps, one.missed) for one in rounds] == ROUNDS * [
        ("aggregated", NAMES, STEPS, {})
    ]
    assert not any(one.refused or one.failed for one in rounds)
    assert rounds[-1].accuracy > 0.5


@pytest.mark.slow
def test_a_device_that_drops_out_is_waited_for_no_longer_than_a_step_and_takes_part_again(network, tmp_path):
    """It misses the steps in between, and the record says how many; no later step waits for it."""
    rule = "step_deadline_s = 5.0\ndeadline_s = 90.0"
    plan = make_plan(tmp_path, rounds=2, round=rule, **(SPLIT | {"algorithm": OF_MANY}))
    here = Site(network, plan, tmp_path, name=f"site{next(numbers)}")

    async def play() -> list[AnyRecord]:
        async with here.devices(*NAMES, compute_s=0.05):
            serving = asyncio.create_task(here.serve())
            await until(lambda: ("c", 1, 5) in here.stepped)
            await here.stop("c")
            await until(lambda: ("a", 1, 8) in here.stepped)
            await here.start("c", compute_s=0.05)
            return (await serving)[1]

    records = network.run(play())
    first, second = closed_rounds(records)
    assert first.steps == second.steps == MANY
    assert set(first.missed) == {"c"}
    assert 2 <= first.missed["c"] < MANY - 5, "it never caught up with the others"
    assert (second.missed, second.arrived) == ({}, NAMES)
    assert first.arrived == NAMES
    said = {one.device: one.update.metrics for one in records if isinstance(one, UpdateAccepted) and one.round == 1}
    assert {device: metrics["missed_steps"] for device, metrics in said.items()} == {
        "a": 0,
        "b": 0,
        "c": first.missed["c"],
    }
    assert first.seconds < 60.0, "every step waited for it"


@pytest.mark.parametrize("step", [1, STEPS])
def test_a_device_that_restarts_while_its_round_waits_for_it_ends_at_the_same_bits(here, step):
    """Its process knows nothing of its session: it does it anew, and the server answers as before."""

    async def play() -> tuple[dict[str, Tensor], list[AnyRecord]]:
        async with here.devices(*NAMES, compute_s=0.02):
            serving = asyncio.create_task(here.serve())
            await until(lambda: ("c", 2, step) in here.stepped)
            await here.stop("c")
            await here.start("c", compute_s=0.02)
            state, records = await serving
            return state.tree, records

    tree, records = here.network.run(play())
    require_equal(tree, alone(here.plan))
    assert [(one.arrived, one.missed) for one in closed_rounds(records)] == ROUNDS * [(NAMES, {})]


@pytest.mark.parametrize("kind", ["step", "update", "checkpoint"])
def test_a_server_that_restarts_ends_at_the_same_bits(here, kind):
    """The open round begins anew: its top is lost, and so are the updates that belong to it."""

    def cut(written: object) -> bool:
        return written == 2 if kind == "checkpoint" else isinstance(written, UpdateAccepted) and written.round == 2

    async def play() -> tuple[dict[str, Tensor], list[AnyRecord]]:
        async with here.devices(*NAMES, compute_s=0.02):
            if kind == "step":
                serving = asyncio.create_task(here.serve())
                await until(lambda: ("b", 2, 3) in here.stepped)
                serving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await serving
            else:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(here.serve(Stopping(here.folder / RUN, cut)))
            state, records = await here.serve()
            return state.tree, records

    tree, records = here.network.run(play())
    require_equal(tree, alone(here.plan))
    assert [one.round for one in records if isinstance(one, Rewound)] == [2]
    rounds = closed_rounds(records)
    assert [(one.arrived, one.steps, one.missed) for one in rounds] == ROUNDS * [(NAMES, STEPS, {})]
    kept = [(one.device, one.round) for one in drop_void(records) if isinstance(one, UpdateAccepted)]
    assert len(kept) == len(set(kept)) == ROUNDS * len(NAMES)
