"""HCEF's control as an allocator of the tests, which decides local steps and the share of the change that is sent.

Two values a device by one record and one line of the registry, from the plan to the device.
J. Zhang, X. Gao, Y. Guo, Y. Gong: https://arxiv.org/abs/2409.04022
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edge_server.allocation import coordinator
from edge_server.allocation.allocator import Allocator
from edge_server.allocation.explain import explain, explanation_lines
from edge_server.allocation.figures import DeviceFacts, Estimate, choose_figures, link_estimates
from edge_server.allocation.inputs import Case, RoundSetting, recorded_case, task_limits
from edge_server.allocation.optimizers.base import Bound, Solver
from edge_server.allocation.optimizers.hcef import solve
from edge_server.allocation.optimizers.hcef_problem import Hcef
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Decision, Figure, Given
from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.journal.sqlite import read
from edge_server.replay.run import replay
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from tests.edge_server.harness import write_examples, write_plan


class HcefOptions(MeasuringOptions, frozen=True, kw_only=True):
    tau: int = 8
    step_s: float = 0.5
    joules: float = 1e6


def limits(options: HcefOptions, setting: RoundSetting) -> dict[str, float]:
    return task_limits(setting, options.deadline_s, options.joules)


def figures(options: HcefOptions, device: DeviceFacts, _limits: Mapping[str, float]) -> dict[str, Figure]:
    step = Estimate(device.known.mu_s, default=options.step_s)
    return choose_figures({**link_estimates(device, options), "step_s": step}, device.last, options)


def decide(options: HcefOptions, solver: Solver, case: Case) -> Decision:
    if not case.names:
        return Decision()
    step, full = np.array(case.column("step_s", np.inf)), 8 * case.limits["model_bytes"]
    upload = full / np.array(case.column("up_bits_per_s", 0.0))
    problem = Hcef(step, upload, 0.0, 0.0, case.limits["deadline_s"], case.limits["joules"], options.tau, 1.0, 1.0)
    found, devices = solve(problem, solver=solver), {}
    for place, device in enumerate(case.names):
        steps, sent = max(1, int(found.steps[place] * options.tau)), float(found.sent[place])
        devices[device] = Given(
            values={"local_steps": steps, "top_k": sent},
            figures=case.known(device),
            predicted=Cost(compute_s=float(steps * step[place]), upload_s=float(sent * upload[place])),
            binding=Bound(int(found.bound[place])).name.lower(),
        )
    return Decision(devices=devices, objective=found.objective, feasible=found.feasible)


HCEF = Allocator(options=HcefOptions, decides=("local_steps", "top_k"), decide=decide, limits=limits, figures=figures)


DEVICES = """
[[device]]
name = "fast"
compute_s = 2.0
up_mbit_s = 10.0
down_mbit_s = 10.0
[[device]]
name = "slow"
compute_s = 2.0
up_mbit_s = 0.05
down_mbit_s = 10.0
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The one line of the registry."""
    monkeypatch.setitem(coordinator.ALLOCATORS, "hcef", HCEF)


def plan_file(folder: Path, options: str) -> Path:
    text = {
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 512, classes = 3 }',
        "data": write_examples(folder, 60),
        "partition": 'kind = "even"',
        "round": "deadline_s = 500.0",
        "optimizer": f'name = "hcef"\noptions = {{ {options} }}',
    }
    return write_plan(folder, rounds=2, more=DEVICES, **text)


@pytest.fixture
def records(tmp_path) -> list[AnyRecord]:
    replay(load(plan_file(tmp_path, "deadline_s = 4.0, tau = 6"), tmp_path), tmp_path / "run")
    return read(tmp_path / "run")


def test_both_values_are_decided_recorded_and_told_to_every_device(records):
    """4 s allow 6 steps of 0.5 s and a second of upload: the whole change at 10 Mbit/s, a part of it at 50 kbit/s."""
    rounds = [one for one in records if isinstance(one, RoundOpened)]
    assert len(rounds) == 2
    for one in rounds:
        assert one.decision.optimizer == "hcef"
        for device, given in one.decision.devices.items():
            told = one.assignments[device].values
            assert given.values.keys() == {"local_steps", "top_k"}
            assert {name: told[name] for name in given.values} == given.values
        fast, slow = (one.decision.devices[device] for device in ("fast", "slow"))
        assert fast.values["top_k"] == pytest.approx(1.0)
        assert fast.values["local_steps"] > 1
        assert 0.0 < slow.values["top_k"] < 0.9
        assert slow.predicted.compute_s + slow.predicted.upload_s <= 4.0 + 0.5


def test_both_values_are_explained(records):
    found = explain(records, 1)
    assert [one.device for one in found.devices] == ["fast", "slow"]
    assert all(one.values.keys() == {"local_steps", "top_k"} and not one.buys for one in found.devices)
    text = "\n".join(explanation_lines(found))
    assert "hcef decided, for tasks within 4 s" in text
    assert f"local_steps {found.devices[0].values['local_steps']}" in text
    assert "top_k 1" in text


def test_the_same_case_gives_the_same_decision(records):
    for one in records:
        if isinstance(one, RoundOpened):
            table = records[0].plan.optimizer
            assert coordinator.decide(table, recorded_case(one.decision)) == one.decision


def test_a_mistake_in_its_options_names_file_key_and_remedy(tmp_path):
    path = plan_file(tmp_path, "taus = 6")
    with pytest.raises(ConfigError, match=r"optimizer: options of hcef: .*`taus`; correct its spelling \(known: .*tau"):
        load(path, tmp_path)
    path = plan_file(tmp_path, 'tau = "six"')
    with pytest.raises(ConfigError, match=r"plan.toml: optimizer: options.tau of hcef: Expected `int`.*correct the"):
        load(path, tmp_path)


def test_what_no_method_uses_is_told(tmp_path, caplog):
    load(plan_file(tmp_path, "tau = 6"), tmp_path)
    assert "decides local_steps, top_k, which algorithm 'fedavg' does not use" in caplog.text
