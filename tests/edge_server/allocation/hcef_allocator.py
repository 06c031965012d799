"""HCEF's control as an allocator of the tests: local steps and the share of the change that is sent, per device.

J. Zhang, X. Gao, Y. Guo, Y. Gong: https://arxiv.org/abs/2409.04022
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_server.allocation.allocator import Allocator
from edge_server.allocation.figures import DeviceFacts, Estimate, choose_figures, link_estimates
from edge_server.allocation.inputs import Case, RoundSetting, task_limits
from edge_server.allocation.optimizers.base import Bound, Solver
from edge_server.allocation.optimizers.hcef import solve
from edge_server.allocation.optimizers.hcef_problem import Hcef
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Decision, Figure, Given
from shared.protocol.measurements import Cost


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
