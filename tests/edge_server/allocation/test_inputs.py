"""From reports, a journal and a plan to one round's figures and limits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_server.allocation.coordinator import decide, round_case
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting, Sizes
from edge_server.allocation.model_sizes import measure_model, update_bytes
from edge_server.journal.budget import RunSpending
from edge_server.journal.decision import Decision, DeviceDecision, Figure
from edge_server.journal.records import AnyRecord, CostSettled, Measured, RoundOpened, UpdateAccepted
from edge_server.learner import blank_network, plan_algorithm
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.algorithms.fedavg import fedavg
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from shared.protocol.measurements import Cost, Reading, StepCost
from shared.protocol.messages import Assignment, Hyper, Report
from shared.registry import build
from shared.tensors.tree import State
from tests.edge_server.harness import write_plan
from tests.edge_server.textbook import make_plan
from tests.naming import naming

SIZES = Sizes(1000, 800, 4000, 4000, 4000, 4000)
SPENT = RunSpending(seconds=40.0, joules=30.0, charged=0.0, is_whole=True, unmetered=())
DEVICE = '[[device]]\nname = "a"\ncompute_s = 3.0\nup_mbit_s = 2.0\n'


def plan_of(folder: Path, table: str, **sections: str) -> Plan:
    return load(write_plan(folder, rounds=4, optimizer=table, **sections), folder)


def ask(plan: Plan, *records: AnyRecord, number: int = 3, **reports: Report) -> Case:
    experience = Experience()
    experience.take(records)
    return round_case(RoundSetting(plan, number, ("a", "b"), SPENT, SIZES), experience, reports)


def report(rate: float, *, age_s: float = 0.0) -> Report:
    reading = Reading(value=rate, unit="bits_per_s", source="tcp", quality="measured", at=100.0 - age_s)
    return Report(device="a", at=100.0, readings={"link.up_bits_per_s": reading})


def test_sources_in_their_order(tmp_path):
    """Of one device the plan tells; of the other nothing; then a report, which is the better word, until it is old."""
    plan = plan_of(tmp_path, 'name = "keep_ratio"', more=DEVICE)
    first = ask(plan)
    assert first.figures["a"]["up_bits_per_s"] == Figure(2e6, "profile")
    assert first.figures["a"]["task_s"] == Figure(3.0, "profile")
    assert first.figures["b"]["up_bits_per_s"] == Figure(1e6, "default")
    assert first.figures["b"]["task_s"] == Figure(10.0, "default")
    assert ask(plan, a=report(5e6)).figures["a"]["up_bits_per_s"] == Figure(5e6, "measured")
    last = Decision(
        optimizer="keep_ratio", devices={"a": DeviceDecision(figures={"up_bits_per_s": Figure(4e6, "measured")})}
    )
    before = RoundOpened(round=2, assignments={}, decision=last)
    assert ask(plan, before, a=report(5e6)).figures["a"]["up_bits_per_s"] == Figure(5e6, "measured")
    assert ask(plan, before, a=report(5e6, age_s=4000)).figures["a"]["up_bits_per_s"] == Figure(4e6, "last_good")
    assert ask(plan, before, a=report(float("nan"))).figures["a"]["up_bits_per_s"] == Figure(4e6, "last_good")


def test_a_radio_link_of_the_plan_is_its_profile(tmp_path):
    """1 to 3 MHz at a signal as strong as the noise: 1 bit/s a hertz; the base station sends three times as strong."""
    radio = 'bandwidth_hz = [1e6, 3e6], path_loss = "none", noise_w = 0.1, tx_dbm = 20.0, server_dbm = 24.771212547'
    plan = plan_of(
        tmp_path, 'name = "bandwidth"', more=f'[[device]]\nname = "a"\nlink = {{ kind = "wireless", {radio} }}'
    )
    found = ask(plan).figures["a"]
    assert found["up_bits_per_s"] == Figure(pytest.approx(2e6), "profile")
    assert found["down_bits_per_s"] == Figure(pytest.approx(4e6), "profile")


def test_an_error_of_the_upload_belongs_to_a_rate_that_was_held(tmp_path):
    """It took a fifth longer than at half of 8 kbit/s. What a guess was wrong by is no error of what was measured."""
    given = DeviceDecision(
        values={"share": 0.5, "up_bits_per_s": 4000.0},
        figures={"up_bits_per_s": Figure(8000.0, "measured")},
        predicted=Cost(upload_s=8.0),
    )
    opens = RoundOpened(round=1, assignments={}, decision=Decision(optimizer="bandwidth", devices={"a": given}))
    plan = plan_of(tmp_path, 'name = "bandwidth"')
    held = ask(plan, opens, CostSettled(round=1, device="a", cost=Cost(upload_s=9.6, bytes_up=4096))).figures["a"]
    assert held["up_bits_per_s"] == Figure(8000.0, "measured")
    assert held["upload_error"] == Figure(pytest.approx(1.2), "measured")
    guess = Decision(
        optimizer="bandwidth",
        devices={"a": msgspec.structs.replace(given, figures={"up_bits_per_s": Figure(8000.0, "profile")})},
    )
    opens = RoundOpened(round=1, assignments={}, decision=guess)
    slow = ask(plan, opens, CostSettled(round=1, device="a", cost=Cost(upload_s=16.384, bytes_up=4096))).figures["a"]
    assert slow["up_bits_per_s"] == Figure(pytest.approx(4000.0), "measured")
    assert "upload_error" not in slow


def test_who_was_there_before_keeps_its_place(tmp_path):
    """Those that the plan names, those that rounds had, in that order, and only then who is new: also to a restart."""
    told = Assignment(seed=0, hyper=Hyper())
    rounds = [RoundOpened(round=number, assignments={name: told}) for number, name in ((1, "z"), (2, "b"), (3, "z"))]
    places = ask(plan_of(tmp_path, 'name = "clusters"'), *rounds, number=4).places
    assert places == {"z": 0, "b": 1, "a": 2}


def test_what_a_task_cost_tells_of_a_whole_one(tmp_path):
    """At p = 0.5 a frozen step does (2 + 1/4) / 3 of the work: 1.5 s tell of 2 s."""
    plan = plan_of(tmp_path, 'name = "keep_ratio"')
    decision = Decision(optimizer="keep_ratio", devices={"a": DeviceDecision(values={"keep": 0.5})})
    told = {"a": Assignment(seed=0, hyper=Hyper())}
    records = (
        RoundOpened(round=1, assignments=told, decision=decision),
        CostSettled(round=1, device="a", cost=Cost(compute_s=1.5, compute_joules=3.0)),
    )
    figures = ask(plan, *records).figures["a"]
    assert figures["task_s"] == Figure(pytest.approx(2.0), "measured")
    assert figures["task_joules"] == Figure(pytest.approx(4.0), "measured")


def test_before_a_first_task_what_was_timed_tells_of_one(tmp_path):
    """Eight steps of 0.25 s and 0.5 J, if the plan says that a task has so many."""
    timed = Measured(by_device={"a": StepCost(seconds=0.25, steps=10, joules=0.5, weights=1000, flops=1)})
    figures = ask(plan_of(tmp_path, 'name = "keep_ratio"\noptions = { steps = 8 }'), timed, number=1).figures["a"]
    assert (figures["task_s"], figures["task_joules"]) == (Figure(2.0, "measured"), Figure(4.0, "measured"))
    unknown = ask(plan_of(tmp_path, 'name = "keep_ratio"'), timed, number=1).figures["a"]
    assert (unknown["task_s"].source, "task_joules" in unknown) == ("default", False)


def test_a_step_is_what_was_timed_or_a_task_shared_out(tmp_path):
    """Five steps on each part and one of warm-up: (5 * 0.2 + 6 * 0.8) s of 0.5 s; a planned task of 3 s among these."""
    plan = plan_of(tmp_path, 'name = "bandwidth"', more=DEVICE)
    measured = Measured(by_device={"b": StepCost(steps=1, seconds=0.25, weights=1000, flops=1)})
    found = ask(plan, measured)
    assert found.figures["a"]["step_s"] == Figure(pytest.approx(3.0 / 5.8), "profile")
    assert found.figures["b"]["step_s"] == Figure(0.25, "measured")
    assert found.limits["weights_global"] == 800.0
    ranges = 'compute = { kind = "ranges", hertz = [1e3, 3e3], cycles_per_weight = 20.0 }'
    clocked = plan_of(tmp_path, 'name = "bandwidth"', more=f'[[device]]\nname = "a"\n{ranges}')
    assert ask(clocked).figures["a"]["step_s"] == Figure(20.0 * 1000 / 2e3, "profile")


def test_limits_are_what_is_left_of_the_budgets(tmp_path):
    """40 s of 100 are spent and two rounds are left; 30 J of 70, for two rounds of two devices."""
    table = 'name = "keep_ratio"'
    assert ask(plan_of(tmp_path, table)).limits["deadline_s"] == 30.0
    assert "joules" not in ask(plan_of(tmp_path, table)).limits
    some = ask(plan_of(tmp_path, table, budget="time_s = 90.0\njoules = 70.0"))
    assert some.limits["deadline_s"] == 25.0
    assert some.limits["joules"] == 10.0
    assert (some.limits["spent_s"], some.limits["spent_joules"]) == (40.0, 30.0)
    none = ask(plan_of(tmp_path, table, budget="time_s = 20.0\njoules = 20.0"))
    assert (none.limits["deadline_s"], none.limits["joules"]) == (0.0, 0.0)
    given = ask(plan_of(tmp_path, 'name = "keep_ratio"\noptions = { deadline_s = 7.0, joules = 3.0 }'))
    assert (given.limits["deadline_s"], given.limits["joules"]) == (7.0, 3.0)


def test_sizes_of_a_network(tmp_path):
    """64-4-10: 64 * 4 + 4 * 10 weights and 14 biases; of half of the hidden neurons, half of the weights."""
    plan = plan_of(tmp_path, 'name = "keep_ratio"')
    model = build_blank(plan.model)
    found = measure_model(fedavg(), model, State(build_initial(plan.model, 0).tree()))
    whole, weights = sum(one.numel() for one in model.layers.parameters()), 0
    for one in model.layers.parameters():
        weights += one.numel() if one.ndim > 1 else 0
    assert (found.weights, found.shared, found.bytes) == (whole, weights, 4 * whole)
    (half, part), (_, all_) = update_bytes(model, [0.5, 1.0])
    assert (half, all_) == (0.5, 4 * whole)
    assert part < 0.6 * all_


WHOLE: dict[str, str] = {}
LORA = {"lora": "rank = 2"}


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        *((name, WHOLE) for name in ("fedavg", "fedadam", "scaffold", "fedspu", "hermes")),
        ("hcef", LORA),
        ("scaffold", LORA),
    ],
)
def test_sizes_of_a_method_are_what_its_devices_receive_and_send(tmp_path, algorithm, sections):
    """SCAFFOLD carries a control variate beside every weight; of a network with adapters, only these travel."""
    sections = {"hyper": "batch_size = 8\nlearning_rate = 0.1", "evaluation": "every = 0"} | sections
    plan = make_plan(tmp_path, rounds=2, algorithm=f'name = "{algorithm}"', **sections)
    state, records = replay_plan(plan, tmp_path / "run")
    accepted = [record for record in records if isinstance(record, UpdateAccepted) and record.round == 2]
    found = measure_model(plan_algorithm(plan), blank_network(plan), state)
    whole = sum(leaf.nbytes for leaf in blank_network(plan).tree().values())
    assert found.bytes == whole
    assert (found.upload_bytes == 2 * whole) == (algorithm == "scaffold" and "lora" not in sections)
    assert (found.upload_bytes < whole) == ("lora" in sections)
    for record in accepted:
        assert found.upload_bytes <= record.update.params.size <= found.upload_bytes + 600
        assert found.download_bytes <= record.update.cost.bytes_down <= found.download_bytes + 900


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('name = "best"', "optimizer.name"),
        ('name = "clusters"\noptions = { keep = "0.2,2" }', "options.keep"),
        ('name = "clusters"\noptions = { deadline_s = 3.0 }', "deadline_s"),
        ('name = "keep_ratio"\noptions = { joules = -1.0 }', "options.joules"),
        ('name = "bandwidth"\noptions = { most_pruned = 1.5 }', "options.most_pruned"),
        ('name = "bandwidth"\noptions = { equal = "both" }', "equal"),
        ('name = "clusters"\noptions = { keep = 0.5 }', "options.keep"),
        ('name = "bandwidth"\nsolver = "guess"', "solver"),
        ('name = "clusters"\nsolver = "cvxpy"', "solver"),
    ],
)
def test_a_mistake_in_the_table_names_its_key(tmp_path, table, says):
    with pytest.raises(ConfigError, match=naming(says)):
        plan_of(tmp_path, table)


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ("", {1.0: 5, 0.5: 11, 0.0: 10}),
        ('updating = "simultaneous"', {1.0: 5, 0.5: 6, 0.0: 5}),
        ('updating = "simultaneous", personal_steps = 2', {1.0: 2, 0.5: 6, 0.0: 5}),
        ('importance = "magnitude"', {1.0: 5, 0.5: 10, 0.0: 10}),
        ("personal_steps = 0", {1.0: 0, 0.5: 6, 0.0: 5}),
    ],
)
def test_iterations_are_those_that_devices_take(tmp_path, options, iterations):
    """Of all pruned, of half, of nothing: what is told to a device, what its seconds are shared among, what it is held
    to take; without anything to share no steps on it, without pruning no warm-up."""
    network = 'name = "cnn"\noptions = { side = 8, width = 4, hidden = 8 }'
    algorithm = f'name = "pruned_personalization"\noptions = {{ {options} }}'
    plan = plan_of(
        tmp_path, 'name = "bandwidth"\noptions = { compute = "dense", most_pruned = 1.0, deadline_s = 1e6 }',
        algorithm=algorithm, model=network, evaluation="every = 0",
    )  # fmt: skip
    method, model = build(ALGORITHMS, plan.algorithm, "algorithm"), build_initial(plan.model, 0)
    state = method.init(model, 0)
    for pruned, steps in iterations.items():
        told = method.assign(state, Cohort(("a",), Hyper(), seed=0), {"a": {"prune": pruned}}, 1)
        assert told["a"].values["local_steps"] == steps
        experience = Experience()
        before = Decision(optimizer="bandwidth", devices={"a": DeviceDecision(values={"prune": pruned})})
        cost = CostSettled(round=1, device="a", cost=Cost(compute_s=0.25 * steps))
        experience.take([RoundOpened(round=1, assignments=told, decision=before), cost] if steps else [])
        setting = RoundSetting(plan, 2, ("a",), SPENT, measure_model(method, model, state))
        asked = round_case(setting, experience, {})
        if steps:
            assert asked.figures["a"]["step_s"] == Figure(pytest.approx(0.25), "measured")
            whole = decide(plan.optimizer, asked).devices["a"]
            assert whole.values["prune"] == 0.0
            assert whole.predicted.compute_s == pytest.approx(0.25 * iterations[0.0])
