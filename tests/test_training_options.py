"""Adam, schedules, clipping and precision: live, textbook and replay agree."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

from edge_server.journal.records import AnyRecord, Noted, RoundOpened, UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from shared.protocol import wire
from shared.protocol.messages import TASK_FIELDS, Status, derive_seed
from shared.protocol.topics import topic
from shared.tensors import mixed_precision
from shared.tensors.tree import Tree
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import RUN, SITE, beginning, moved, site
from tests.edge_server.textbook import NAMES, make_plan, require_equal, shares
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

numbers = itertools.count()
ADAM = 'optimizer = "adamw"\nbeta2 = 0.99\nclip_norm = 0.5\nschedule = "cosine"\nwarmup_rounds = 1'
ROUNDS = 4


def plan_of(folder: Path, options: str, **sections: str) -> Plan:
    hyper = f"local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.05\nweight_decay = 0.01\n{options}"
    return make_plan(folder, ROUNDS, hyper=hyper, **sections)


def textbook(plan: Plan) -> Tree:
    """Return FedAvg's model with torch's AdamW, clipping and cosine schedule, after a round at half the rate."""
    options = plan.model.options
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(options["features"], options["hidden"]), nn.ReLU(), nn.Linear(options["hidden"], 3)
    )
    server, own = beginning(plan), dict(zip(NAMES, shares(plan), strict=True))
    scheduled = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, T_max=plan.rounds - 1)
    for number in range(1, plan.rounds + 1):
        rate, total = 0.025 if number == 1 else scheduled.param_groups[0]["lr"], {}
        for device, examples in own.items():
            layers.load_state_dict(server)
            adam = torch.optim.AdamW(layers.parameters(), rate, (0.9, 0.99), weight_decay=0.01)
            order = torch.Generator().manual_seed(derive_seed(plan.seed, number, device))
            for index in (part for _ in "ab" for part in torch.randperm(len(examples), generator=order).split(8)):
                adam.zero_grad()
                functional.cross_entropy(layers(examples.inputs[index]), examples.labels[index]).backward()
                nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
                adam.step()
            for key, leaf in layers.state_dict().items():
                total[key] = total.get(key, 0) + (leaf - server[key]) * len(examples)
        server = {key: leaf + total[key] / sum(map(len, own.values())) for key, leaf in server.items()}
        if number > 1:
            scheduled.step()
            schedule.step()
    return server


def hypers(records: list[AnyRecord]) -> list[object]:
    """Return what every device was told, round by round."""
    opened = [record for record in records if isinstance(record, RoundOpened)]
    return [[told.hyper for _, told in sorted(one.assignments.items())] for one in opened]


def test_live_and_replayed_it_is_what_torch_computes_in_one_loop(network, tmp_path):
    """The live run and its replay to the bit; the loop of torch to 1e-6."""
    plan = plan_of(tmp_path, ADAM)
    live, records = Site(network, plan, tmp_path, name=f"options{next(numbers)}").play()
    again, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    require_equal(live.tree, again.tree)
    assert hypers(records) == hypers(others)
    assert len({told[0].learning_rate for told in hypers(records)}) == ROUNDS
    for key, leaf in textbook(plan).items():
        torch.testing.assert_close(live.tree[key], leaf, rtol=0, atol=1e-6)


def test_a_run_cut_within_its_schedule_goes_on_to_the_same_bits(tmp_path):
    plan = plan_of(tmp_path, ADAM)
    whole, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    here = Site(Network(), plan, tmp_path)
    state, records = here.play(
        lambda: here.serve_twice(lambda written: isinstance(written, UpdateAccepted) and written.round == 3)
    )
    require_equal(state.tree, whole.tree)
    assert hypers(records) == hypers(others)


def test_a_trace_repeats_the_options(tmp_path):
    """Rates are columns of the trace; what all rounds share is in its plan."""
    plan = plan_of(tmp_path, ADAM)
    _, records = replay_plan(plan, tmp_path / RUN)
    assert hypers(list(to_records(trace_of(records)))) == hypers(records)


@pytest.mark.parametrize("has", [True, False])
def test_reduced_precision_is_recorded_and_its_lack_noted_once_per_device(tmp_path, monkeypatch, has):
    """Without it, the result is that of 32 bits, bit for bit; with it, another."""
    plan = plan_of(tmp_path, 'precision = "bfloat16"')
    monkeypatch.setattr(mixed_precision, "cpu_multiplies_bfloat16", lambda: has)
    here = Site(Network(), plan, tmp_path)
    state, records = here.play(
        lambda: here.serve_twice(lambda written: isinstance(written, UpdateAccepted) and written.round == 3)
    )
    full, _ = replay_plan(plan_of(tmp_path, ""), tmp_path / "full" / RUN)
    notes = [record for record in records if isinstance(record, Noted) and record.reason == "precision"]
    updates = [record.update for record in records if isinstance(record, UpdateAccepted)]
    assert {(update.trained_on, update.metrics["precision_bits"]) for update in updates} == {
        ("cpu bfloat16", 16.0) if has else ("cpu", 32.0)
    }
    assert [note.device for note in notes] == ([] if has else list(NAMES))
    assert all(names_all(note.what, "bfloat16", "float32") for note in notes)
    changed = [key for key, leaf in full.tree.items() if not torch.equal(leaf, state.tree[key])]
    assert bool(changed) == has


@pytest.mark.parametrize("option", ['optimizer = "adam"', "clip_norm = 1.0", 'precision = "bfloat16"'])
async def test_an_agent_that_would_ignore_an_option_takes_no_part(tmp_path, option):
    """It would train by plain SGD, and nobody would know."""
    async with site(tmp_path, rounds=1, hyper=f"batch_size = 16\n{option}") as here:
        devices = [await here.device(name, online=False) for name in "abc"]
        for puppet, knows in zip(devices, (TASK_FIELDS, TASK_FIELDS, ()), strict=True):
            status = Status(device=puppet.name, session=1, instance=puppet.name, online=True, knows=knows)
            await here.broker.publish(topic(SITE, puppet.name, "status"), wire.encode(status), retain=True)
        for puppet in devices[:2]:
            task = await puppet.task()
            assert f"hyper.{option.split()[0]}" in TASK_FIELDS
            assert task.assignment.hyper.step.features == {option.split()[0]}
            await puppet.answer(task, moved(here.plan, 0.1))
        _, rounds = await here.ended()
        notes = [record.what for record in here.store.records() if isinstance(record, Noted)]
    assert [one.arrived for one in rounds] == [("a", "b")]
    assert [names_all(note, "c", f"hyper.{option.split()[0]}") for note in notes] == [True]


def test_a_plan_of_plain_sgd_takes_agents_of_all_versions(tmp_path):
    """And sends them the bytes that they know."""
    plan = plan_of(tmp_path, 'schedule = "cosine"')
    assert msgspec.to_builtins(plan.hyper_of(2)).keys() == msgspec.to_builtins(plan_of(tmp_path, "").hyper_of(2)).keys()
    state, records = Site(Network(), plan, tmp_path).play()
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
    assert state.tree
