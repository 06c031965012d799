"""Keep ratios of one round: the largest p_k whose task meets deadline, joules and memory.

A task counts as one step: its seconds and joules on the whole model are told by earlier tasks. Training takes, of the
model's bytes, 1 + 0.79 p^2 + 0.84 p: weights, gradients of active parameters, activations of active neurons, in the
proportions of FedSPU's Fig. 5 (Z. Niu, H. Dong, A. K. Qin, AAAI 2025, https://arxiv.org/abs/2403.11464).
"""

from __future__ import annotations

import math

import numpy as np

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.base import Bound, column
from edge_server.allocation.optimizers.keep_ratio import KeepRatio, Kept, solve
from edge_server.journal.decision import Decision, Figure, Given
from edge_server.plan.optimizer import KeepOptions
from shared.protocol.measurements import Cost

GRADIENTS, ACTIVATIONS = 0.30 / 0.38, 0.32 / 0.38
"""Beside the weights, as shares of their bytes."""


def decide(options: KeepOptions, _solver: object, case: Case) -> Decision:
    """Give every device the largest ratio that fits."""
    decided = Decision(optimizer="keep_ratio", limits=dict(case.limits), ladder=list(case.ladder))
    if not case.names:
        return decided
    ratios = np.array([ratio for ratio, _ in case.ladder])
    sizes = np.array([size for _, size in case.ladder], np.float64)
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    problem = KeepRatio(
        step_s=np.array(case.column("task_s", math.inf)) * np.array(case.column("compute_error", 1.0)),
        steps=1.0,
        up_bits_per_s=rate,
        ratios=ratios,
        up_bytes=sizes,
        down_bytes=sizes,
        down_bits_per_s=np.array(case.column("down_bits_per_s", math.inf)),
        deadline_s=case.limits["deadline_s"],
        step_joules=np.array(case.column("task_joules", 0.0)),
        tx_w=np.array(case.column("tx_w", 0.0)),
        energy_joules=case.limits.get("joules", math.inf),
        memory_bytes=case.limits["model_bytes"] * (1 + GRADIENTS * ratios**2 + ACTIVATIONS * ratios),
        memory_limit_bytes=np.array(case.column("memory_bytes", math.inf)),
        curve=np.array([options.work(ratio) for ratio in ratios]),
    )
    kept = solve(problem)
    return Decision(
        optimizer=decided.optimizer,
        limits=decided.limits,
        ladder=decided.ladder,
        devices={
            device: _given(options, case.known(device), problem, kept, place) for place, device in enumerate(case.names)
        },
        objective=float((1 - kept.keep).sum()),
        feasible=kept.feasible,
        enough=_enough(case, kept),
    )


def _given(options: KeepOptions, figures: dict[str, Figure], problem: KeepRatio, kept: Kept, place: int) -> Given:
    keep, size = float(kept.keep[place]), float(kept.up_bytes[place])
    bound, count = Bound(int(kept.bound[place])), len(kept.keep)
    up, down = (float(column(one, count)[place]) for one in (problem.up_bits_per_s, problem.down_bits_per_s))
    work, joules = options.work(keep), figures.get("task_joules")
    upload_s = 8 * size / up if up > 0 else None
    draws = figures.get("tx_w")
    gains = {Bound.TIME: kept.gain_per_s, Bound.ENERGY: kept.gain_per_joule, Bound.MEMORY: kept.gain_per_byte}
    return Given(
        values={"keep": keep},
        figures=figures,
        predicted=Cost(
            compute_s=float(problem.step_s[place]) * work,
            upload_s=upload_s,
            download_s=8 * size / down if 0 < down < math.inf else None,
            bytes_up=int(size),
            compute_joules=joules.value * work if joules else None,
            upload_joules=draws.value * upload_s if draws and upload_s else None,
        ),
        binding=bound.name.lower(),
        multiplier=float(gains[bound][place]) if bound in gains else None,
    )


def _enough(case: Case, kept: Kept) -> dict[str, float]:
    """Return what the smallest ratio takes on the device that takes most, of each limit that it exceeds."""
    found = {"deadline_s": float(kept.enough_s.max()), "joules": float(kept.enough_joules.max())}
    return {
        name: value
        for name, value in found.items()
        if name in case.limits and case.limits[name] < value < math.inf and not kept.feasible
    }
