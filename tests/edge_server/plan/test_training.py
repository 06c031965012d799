"""Options of local training in a plan: schedules as torch's, refusals, and records of plans without them."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest
import torch
from torch import nn

from edge_server.plan.plan import Plan
from edge_server.plan.training import HyperPlan
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.protocol.messages import Hyper, StepOptions
from tests.edge_server.harness import write_plan
from tests.naming import naming

ROUNDS = 12


def rates(**keys) -> list[float]:
    hyper = HyperPlan(learning_rate=0.5, **keys)
    return [hyper.of_round(number, ROUNDS).learning_rate for number in range(1, ROUNDS + 1)]


def torch_rates(schedule, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler, found = schedule(optimizer, **options), []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_are_torchs_with_a_round_for_an_epoch():
    schedules = torch.optim.lr_scheduler
    assert rates(schedule="cosine") == pytest.approx(torch_rates(schedules.CosineAnnealingLR, T_max=ROUNDS))
    stepped = torch_rates(schedules.StepLR, step_size=5, gamma=0.3)
    assert rates(schedule="step", step_rounds=5, step_factor=0.3) == pytest.approx(stepped)
    assert rates() == rates(schedule="constant") == [0.5] * ROUNDS


def test_the_rate_rises_in_the_rounds_before_the_schedule():
    """The schedule begins after them, at the whole rate."""
    cosine = [
        one.learning_rate
        for one in (HyperPlan(learning_rate=0.5, schedule="cosine").of_round(n, 9) for n in range(1, 10))
    ]
    assert rates(warmup_rounds=3, schedule="cosine") == pytest.approx([0.125, 0.25, 0.375, *cosine])
    assert rates(warmup_rounds=1) == [0.25] + [0.5] * 11
    assert all(rate > 0 for rate in rates(warmup_rounds=30, schedule="cosine"))


def test_tasks_beside_the_rounds_have_a_rate_too():
    """Of a measurement before the first, of an evaluation after the last."""
    hyper = HyperPlan(learning_rate=0.5, schedule="cosine")
    assert hyper.of_round(0, ROUNDS).learning_rate == 0.5
    assert hyper.of_round(99, ROUNDS) == hyper.of_round(ROUNDS, ROUNDS)


def test_a_task_carries_the_options_of_its_step_alone():
    given = HyperPlan(optimizer="adamw", beta2=0.99, clip_norm=1.0, precision="bfloat16", schedule="cosine")
    step = StepOptions(optimizer="adamw", beta2=0.99, clip_norm=1.0, precision="bfloat16")
    assert given.of_round(1, 4).step_options == given.step == step
    assert msgspec.to_builtins(step) == {"optimizer": "adamw", "beta2": 0.99, "clip_norm": 1.0, "precision": "bfloat16"}
    assert HyperPlan(optimizer="sgd", clip_norm=0.0).of_round(1, 4) == Hyper()


def test_a_plan_without_them_is_recorded_and_sent_as_versions_before_did(tmp_path):
    plan = load(write_plan(tmp_path), tmp_path)
    keys = {"local_epochs", "batch_size", "learning_rate", "momentum", "weight_decay"}
    assert msgspec.to_builtins(plan)["hyper"].keys() == msgspec.to_builtins(plan.hyper_of(1)).keys() == keys
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("hyper", "named"),
    [
        ('optimizer = "adam"\nmomentum = 0.9', ("momentum", "beta1", "adam")),
        ('optimizer = "rmsprop"', ("rmsprop", "hyper.optimizer")),
        ("beta1 = 0.5", ("beta1", "optimizer")),
        ('optimizer = "adam"\nbeta2 = 1.0', ("beta2", 1.0)),
        ("clip_norm = -1.0", ("clip_norm", -1.0)),
        ('schedule = "cosine"\nstep_rounds = 3', ("step_rounds", "schedule")),
        ('schedule = "step"\nstep_factor = 0.0', ("step_factor", 0.0)),
        ("warmup_rounds = -1", ("warmup_rounds",)),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(tmp_path, hyper, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        load(write_plan(tmp_path, hyper=hyper), tmp_path)


OPTIONS = {"optimizer": '"adam"', "clip_norm": "1.0", "precision": '"bfloat16"'}
METHODS = {"scaffold": {"precision"}, "hcef": {"clip_norm", "precision"}, "fedsl": set(), "fedadam": set(OPTIONS)}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_whose_steps_do_not_support_an_option_is_refused(tmp_path, method, option):
    """With the methods that do."""
    path = write_plan(tmp_path, algorithm=f'name = "{method}"', hyper=f"{option} = {OPTIONS[option]}")
    if option in METHODS[method]:
        assert load(path, tmp_path).hyper.step.features == {option}
        return
    with pytest.raises(ConfigError, match=naming(f"hyper.{option}", method, "fedavg")):
        load(path, tmp_path)


def test_no_method_supports_an_option_that_is_unknown():
    for name, builder in ALGORITHMS.items():
        assert builder().step_options <= set(OPTIONS), name


@pytest.mark.parametrize("options", ['schedule = "constant"', ""])
@pytest.mark.parametrize("hyper", ['schedule = "cosine"', "warmup_rounds = 2", 'schedule = "constant"'])
def test_two_schedules_at_once_are_refused(tmp_path, hyper, options):
    """Split learning has a cosine of its own unless that is constant."""
    model = 'name = "mlp"\noptions = { features = 64, hidden = 8, classes = 10 }'
    path = write_plan(tmp_path, algorithm=f'name = "fedsl"\noptions = {{ {options} }}', model=model, hyper=hyper)
    if options or "constant" in hyper:
        assert load(path, tmp_path).rounds == 2
        return
    with pytest.raises(ConfigError, match=naming("hyper.schedule", "fedsl", "cosine", "constant")):
        load(path, tmp_path)


def test_a_network_with_a_slash_in_a_name_is_refused(tmp_path, monkeypatch):
    """Leaves with one are what a method keeps beside the network, and would not be sent."""

    def build() -> Model:
        return Model(nn.Sequential(OrderedDict({"flat": nn.Flatten(), "to/classes": nn.Linear(64, 10)})), {}, (64,))

    monkeypatch.setitem(MODELS, "slashed", build)
    with pytest.raises(ConfigError, match=naming("to/classes.weight", "rename")):
        load(write_plan(tmp_path, model='name = "slashed"'), tmp_path)
