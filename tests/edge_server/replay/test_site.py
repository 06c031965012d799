"""Devices connect, leave and come back in a replay as their behaviour says."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace as but

import msgspec
import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import Measured, closed_rounds
from edge_server.plan.plan import devices
from edge_server.replay.devices.behaviour import Behaviour, Effort
from edge_server.replay.devices.curve import constant
from edge_server.replay.jobs import JobQueue
from edge_server.replay.participants import Participants
from edge_server.replay.play import play
from edge_server.replay.pool import LocalPool
from edge_server.replay.training_executor import TrainingExecutor
from edge_server.replay.workload import Workload
from shared.data.cache import DataCache
from shared.models.cost import step_flops
from shared.protocol.measurements import Provenance
from shared.protocol.messages import Spec
from shared.runtime.clock import VirtualLoop
from tests.edge_server.harness import write_examples
from tests.edge_server.textbook import NAMES, make_plan, require_equal, textbook

TEN = Behaviour(compute=lambda _work, _t: Effort(10.0), up=constant(8e3), down=constant(8e3), delay_s=0.01)


def played(plan, folder, behaviours):
    """Replay a plan with these behaviours; return the final model and the records."""
    scale = Workload(DataCache())
    store = SqliteStore(folder / "run", durable=False)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            jobs = JobQueue(LocalPool(TrainingExecutor(scale.cache).execute))
            cast = Participants(devices(plan), behaviours, jobs, scale, folder / "devices")
            state = runner.run(play(plan, "run", store, cast))
        return state.tree, store.records()
    finally:
        store.close()


def test_who_is_not_there_is_not_asked(tmp_path):
    """`b` comes after 60 s, `c` leaves for good after 30: three rounds of about 16 s, 100 s of waiting between."""
    plan = make_plan(tmp_path, cohort="min_devices = 2", round="deadline_s = 50.0")
    behaviours = [TEN, but(TEN, present=((60.0, math.inf),)), but(TEN, present=((0.0, 30.0),))]
    _, records = played(plan, tmp_path, behaviours)
    rounds = closed_rounds(records)
    assert [closed.arrived for closed in rounds] == [("a", "c"), ("a",), ("a", "b")]
    assert rounds[1].seconds == pytest.approx(50.0, abs=0.5)  # `c` left in the middle of it


@pytest.mark.parametrize(
    "away", [(1.0, 3.0), (5.0, 8.0), (5.0, 40.0), (14.0, 15.0)], ids=["fetching", "training", "for long", "sending"]
)
def test_a_device_that_was_away_goes_on_where_it_was(tmp_path, away):
    """Whatever it was at: frames in the air are lost, messages wait for it, and the model is the textbook's."""
    plan = make_plan(tmp_path, round="deadline_s = 300.0")
    gone = but(TEN, present=((0.0, away[0]), (away[1], math.inf)))
    tree, records = played(plan, tmp_path, [TEN, gone, TEN])
    require_equal(tree, textbook(plan))
    rounds = closed_rounds(records)
    assert [closed.arrived for closed in rounds] == 3 * [NAMES]
    undisturbed = rounds[1].seconds
    assert rounds[2].seconds == pytest.approx(undisturbed, abs=0.1)
    lost = max(0.0, away[1] - undisturbed) if away[0] == 5.0 else 0.1
    assert undisturbed + lost - 0.2 < rounds[0].seconds < undisturbed + lost + 16.0


def test_costs_are_those_of_the_behaviour(tmp_path):
    """Joules, cycles and idle watts of computing, joules of transfers over their very seconds, and the sources."""
    told = Provenance(source="a table", quality="modelled")
    charged = []

    def radio(way, start, stop):
        charged.append((way, stop - start))
        return 2.0 * (stop - start) if way == "up" else None

    device = but(
        TEN,
        compute=lambda work, t: Effort(3.0, 3e9, work.steps + t / 1e6, 1.5, {"compute_joules": told}),
        radio=radio,
        provenance={"upload_s": told, "upload_joules": told, "download_s": told, "download_joules": told},
    )
    plan = make_plan(tmp_path, rounds=1)
    _, records = played(plan, tmp_path, [device] * 3)
    for cost in costs_by_round(records)[1].values():
        assert (cost.compute_s, cost.cycles, cost.idle_w, cost.cpu_s) == (3.0, 3e9, 1.5, None)
        assert cost.compute_joules == pytest.approx(int(cost.compute_joules), abs=1e-4)
        assert cost.upload_joules == pytest.approx(2.0 * cost.upload_s)
        assert cost.download_joules is None
        assert ("down", cost.download_s) in charged
        assert set(cost.provenance) == {"compute_joules", "upload_s", "upload_joules", "download_s"}


@pytest.mark.parametrize(("name", "share"), [("random_dropout", 0.25), ("fjord_fixed", 0.25), ("fedavg", 1.0)])
def test_a_method_that_computes_less_is_less_work(tmp_path, name, share):
    """Half the neurons are a quarter of a training step, and no less of an evaluation."""
    heard = []

    def compute(work, _t):
        heard.append(work)
        return Effort(2.0)

    data, evaluation = f"{write_examples(tmp_path, 90)}\nholdout = 0.1", "on_device = true"
    plan = make_plan(tmp_path, rounds=1, partition='kind = "even"', evaluation=evaluation, data=data)
    options = {} if name == "fedavg" else {"keep": 0.5}
    plan = msgspec.structs.replace(plan, algorithm=Spec(name=name, options=options))
    played(plan, tmp_path, [but(TEN, compute=compute)] * 3)
    dense = 3 * step_flops(plan.model, (8,), 8) + step_flops(plan.model, (8,), 3)
    evaluated = 3 * step_flops(plan.model, (8,), 1, trains=False)
    trained = [work for work in heard if work.train]
    assert {(work.share, work.flops) for work in trained} == {(share, share * 2 * dense + evaluated)}
    assert {work.flops for work in heard if not work.train} <= {evaluated}


FORWARD = 8 * 64 + 64 * 3
WHOLE = FORWARD + 8 * 64 + 2 * 64 * 3
ADAPTERS = 2 * (8 + 64 + 64 + 3)


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ({"model": 'freeze = ["1"]'}, (FORWARD + 64 * 3) / WHOLE),
        ({"model": 'freeze = ["3"]'}, (FORWARD + 64 * 3 + 8 * 64) / WHOLE),
        ({"lora": "rank = 2"}, (FORWARD + 2 * ADAPTERS + 64 * 3 + 2 * (64 + 64 + 3)) / WHOLE),
    ],
    ids=["first", "last", "lora"],
)
def test_frozen_weights_have_no_gradient_to_compute(tmp_path, sections, share):
    """In products of the two layers: forward, gradients of what is trained, and of inputs above the first of it."""
    heard = []

    def compute(work, _t):
        heard.append(work)
        return Effort(2.0)

    network = 'name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }'
    sections = {"model": network, "partition": 'kind = "even"'} | {
        key: f"{network}\n{more}" if key == "model" else more for key, more in sections.items()
    }
    plan = make_plan(tmp_path, rounds=1, **sections)
    played(plan, tmp_path, [but(TEN, compute=compute)] * 3)
    whole = 3 * step_flops(plan.model, (8,), 8) + step_flops(plan.model, (8,), 6)
    trained = [work for work in heard if work.train]
    assert [work.share for work in trained] == [pytest.approx(share)] * 3
    assert [work.flops for work in trained] == [pytest.approx(2 * share * whole)] * 3


def test_work_is_counted_from_data_plan_and_network(tmp_path):
    """30 examples each, 3 held back; 2 epochs of 8, 8, 8 and 3; a task that measures costs one step."""
    heard = []

    def compute(work, _t):
        heard.append(work)
        return Effort(2.0 if work.steps > 1 else 0.25)

    plan = make_plan(
        tmp_path,
        rounds=1,
        partition='kind = "even"',
        measure="seconds = 7.0",
        evaluation="on_device = true",
        data=f"{write_examples(tmp_path, 90)}\nholdout = 0.1",
    )
    _, records = played(plan, tmp_path, [but(TEN, compute=compute)] * 3)
    evaluated = 3 * step_flops(plan.model, (8,), 1, trains=False)
    epoch = 3 * step_flops(plan.model, (8,), 8) + step_flops(plan.model, (8,), 3)
    trained = [work for work in heard if work.train and work.steps > 1]
    timed = [work for work in heard if work.train and work.steps == 1]
    assert {(work.examples, work.flops) for work in timed} == {(8, step_flops(plan.model, (8,), 8))}
    assert {(work.steps, work.examples, work.flops) for work in trained} == {(2 * 4, 2 * 27, 2 * epoch + evaluated)}
    assert {work.weights for work in heard} == {8 * 64 + 64 + 64 * 3 + 3}
    [measured] = [record for record in records if isinstance(record, Measured)]
    assert {(cost.steps, cost.seconds) for cost in measured.by_device.values()} == {(5, 0.25)}
    assert [work.flops for work in heard if work.round == 2] == 3 * [evaluated]
