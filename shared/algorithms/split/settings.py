"""FedSL settings, step size and cut, common to the server and device sides.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; see
`shared.algorithms.split.fedsl`. The step size is that of Loshchilov and Hutter, SGDR, ICLR 2017,
https://arxiv.org/abs/1608.03983, without restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from torch import Tensor

from shared.models.base import Model
from shared.protocol.messages import Assignment, Value
from shared.tensors.feature_dropout import Granularity

FLOAT_BITS = 32
"""Bits of a float, which mean no quantization."""
MATRIX = 2
"""Axes of a batch of outputs; minimum number of axes of a weight that multiplies."""


@dataclass(frozen=True)
class FedslSettings:
    """Settings of the method, by their names in a plan; symbols are the paper's.

    Attributes:
        cut: L_c, as the model counts its cuts; 0 for its first.
        period: I, rounds of the paper between two averages of the client parts.
        steps_per_round: Mini-batches of one round of the paper.
        sparsity: rho_f, share of the client part's weights that are zero at the end.
        importance: Ranking of the weights to prune.
        bits: q of the client part's gradient; 32 turns quantization off.
        drop: p, share of the features dropped at each step.
        granularity: Unit in which features are dropped.
        average: Mean of a coordinate over `all` devices, zeros included, or over its `holders`, which have not pruned
            it.
        weighted: Whether a device's weight in the average is its number of examples.
        server: Whether the server part moves by the `mean` of the devices' gradients, or by each in `turns`.
        schedule: Schedule of the step size, over all steps of the run.
        recompute: Whether a device recomputes activations in the backward pass instead of storing them: less memory for
            one more forward pass, and the same numbers.
    """

    cut: int
    period: int
    steps_per_round: int
    sparsity: float
    importance: Literal["taylor", "magnitude"]
    bits: int
    drop: float
    granularity: Granularity
    average: Literal["all", "holders"]
    weighted: bool
    server: Literal["mean", "turns"]
    schedule: Literal["cosine", "constant"]
    recompute: bool

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        if self.period < 1 or self.steps_per_round < 1 or self.cut < 0:
            raise ValueError("period and steps_per_round must be >= 1, cut >= 0")
        if not 0 <= self.sparsity < 1 or not 0 <= self.drop < 1 or not 1 <= self.bits <= FLOAT_BITS:
            raise ValueError(f"sparsity and drop must be in [0, 1), bits 1 to {FLOAT_BITS}")
        for name, hint in get_type_hints(type(self)).items():
            if (choices := get_args(hint)) and getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")

    @property
    def steps(self) -> int:
        """Mini-batches from one average to the next: one round of this implementation."""
        return self.period * self.steps_per_round

    def cut_of(self, model: Model) -> int:
        """Return the cut, as `Model.below` takes it."""
        return self.cut or next(iter(model.cut_places), 0)

    def step_size(self, assignment: Assignment, step: int) -> float:
        """Return eta at a step of the run, counted from 1; at the first step the full learning rate."""
        rate = assignment.hyper.learning_rate
        if self.schedule == "constant":
            return rate
        return rate / 2 * (1 + math.cos(math.pi * (step - 1) / total_steps(assignment)))


def first_step(assignment: Assignment) -> int:
    """Return the number of steps before this round."""
    return _count(assignment.values["first_step"])


def total_steps(assignment: Assignment) -> int:
    """Return the number of steps of the whole run."""
    return _count(assignment.values["total_steps"])


def _count(value: Value) -> int:
    assert isinstance(value, int)
    return value


def is_finite(tensor: Tensor) -> bool:
    """Return True if no number is NaN or infinite."""
    return not tensor.numel() or all(map(math.isfinite, (extreme.item() for extreme in tensor.aminmax())))
