r"""HCEF: each device takes some of its local steps, by chance, and sends a part of its change.

Zhang, Gao, Guo, Gong. HCEF: heterogeneity-aware cooperative federated edge learning with adaptive computation and
communication compression. https://arxiv.org/abs/2409.04022

    x^(s+1) = x^s - eta 1_s g(x^s),   1_s ~ Bernoulli(rho),   s = 0 ... tau - 1          (4), (6)
    y <- y + 1 / N sum_n Q_theta(x_n^tau - x_n^0)

tau is `local_steps`; rho and theta come with every task as `steps` and `sent`, 1 where nobody decides; Q is the codec,
`topk`. A skipped step touches nothing: no parameter, no momentum, no batch, no second; so what counts is how many of
the tau are taken. That is a function of the task's seed, and the server, which draws it too, tells it with the task.
With `draw = "even"` a device takes floor(rho tau + u) steps, u uniform in [0, 1): rho tau in the mean as well, but
never a whole step more, so that the slowest of many devices takes little longer than was decided. The paper's time and
energy, (8) and (9), are expectations, which such a round is near to.

Momentum starts anew with every task, unless `momentum` is "kept"; the paper does not say. With rho = theta = 1 and as
many steps as an epoch has, it is FedAvg then.

What rho and theta are decided from (Algorithm 2), from M gradients of minibatches at the parameters that came:

    sigma^2 = E |g - grad F|^2,   G^2 = |grad F|^2
    s^2 = 1 / (M - 1) sum |g_m - mean|^2,   sigma^2 ~ (1 - f) s^2,   G^2 ~ max(0, |mean|^2 - (1 / M - f) s^2)

f is 0 where each minibatch is drawn from all of the device's N examples; where they are the first of an epoch, none of
which shares an example with another, f = B / N. Neither is biased; |mean|^2 alone would be too large by sigma^2 / M.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import index
from random import Random
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Batch,
    Batches,
    Cohort,
    Outcome,
    Resources,
    Result,
    assign_alike,
)
from shared.algorithms.fedavg import LocalSgd, descend_batches, fedavg, require_finite_loss
from shared.algorithms.local_training import epochs
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Scalar, Value
from shared.tensors import tree
from shared.tensors.counts import floor_share
from shared.tensors.tree import State, Tree

STEPS, SENT = "steps", "sent"
"""Values of a task: rho, the share of its local steps that a device takes, and theta, of its change that it sends."""
GRADIENTS = "gradients"
"""Value of a task: gradients that its device estimates by; 0 in rounds without estimates."""
SIGMA2, G2, STEPS_TAKEN = "sigma2", "g2", "steps_taken"
"""What a device says with its update."""
NEAR = 1e-9
"""A share of the steps that is whole but for rounding is."""
FEWEST = 2
"""Gradients of which a variance can be told."""


@dataclass(frozen=True)
class HcefSettings:
    """What the method is set to.

    Attributes:
        local_steps: tau, local steps of a round, a batch each; `[hyper] local_epochs` does not count here.
        gradients: M, gradients from which each device estimates sigma^2 and G^2 before it trains, 2 or more; 0: none.
            They take as long as so many steps.
        estimate_every: From one round with estimates to the next, the first being one: what was told holds until then.
        weighting: Whether every device counts alike, as in the paper, or by its examples, as in FedAvg.
        draw: What chance decides: each step for itself, as in the paper, or whether rho tau is rounded up or down.
        momentum: Whether it begins anew with every task, or a device goes on with that of its last step.
    """

    local_steps: int = 5
    gradients: int = 0
    estimate_every: int = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    draw: Literal["trials", "even"] = "trials"
    momentum: Literal["anew", "kept"] = "anew"

    def __post_init__(self) -> None:
        """Refuse what no round can use.

        Raises:
            ValueError: It is such a setting.
        """
        if index(self.local_steps) < 1 or (index(self.gradients) and self.gradients < FEWEST):
            raise ValueError("local_steps must be >= 1, gradients 0 or >= 2")
        if index(self.estimate_every) < 1:
            raise ValueError("estimate_every must be >= 1")
        if self.weighting not in ("uniform", "examples"):
            raise ValueError(f'weighting is {self.weighting!r}, it must be "uniform" or "examples"')
        if self.draw not in ("trials", "even") or self.momentum not in ("anew", "kept"):
            raise ValueError('draw must be "trials" or "even", momentum "anew" or "kept"')


def steps_taken(seed: int, local_steps: int, share: float, draw: Literal["trials", "even"] = "trials") -> int:
    """Return how many of the local steps a device takes, rho tau in the mean.

    Args:
        local_steps: tau.
        share: rho.
        draw: `trials`: so many, each of which succeeds with probability rho; `even`: rho tau is rounded up as often as
            it must be, and else down.
    """
    chance = Random(f"{seed}/steps")  # noqa: S311 - a draw, not a secret
    if draw == "even":
        whole = floor_share(share, local_steps)
        rest = share * local_steps - whole
        return min(local_steps, whole + (rest + chance.random() * (1 - NEAR) + NEAR >= 1))
    return sum(chance.random() < share for _ in range(local_steps))


def told_share(values: Mapping[str, Value], name: str) -> float:
    """Return rho or theta as a task says it; 1 where it says nothing.

    Raises:
        WireError: It is no share.
    """
    value = values.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise WireError(f"{name} is {value!r}, a share is from 0 to 1")
    return float(value)


def assign(
    settings: HcefSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Tell every device its shares, and how many gradients it computes in all.

    Raises:
        WireError: An allocated share is none.
    """
    enough = max(settings.local_steps, settings.gradients)  # epochs, a batch each at least
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=enough)
    gradients, told = 0 if (number - 1) % settings.estimate_every else settings.gradients, {}
    for device, one in assign_alike(state, cohort, allocation, number).items():
        taken = _steps_of(settings, one)
        values = {**one.values, GRADIENTS: gradients, "local_steps": taken + gradients}
        told[device] = msgspec.structs.replace(one, hyper=hyper, values=values)
    return told


def local(
    settings: HcefSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`.

    Raises:
        Diverged: A loss is not finite.
        WireError: The task's share of steps is none.
    """
    layers, hyper, metrics = model.layers, assignment.hyper, dict[str, float]()
    taken = _steps_of(settings, assignment)
    if settings.gradients and assignment.values.get(GRADIENTS):
        layers.load_state_dict(start)
        metrics[SIGMA2], metrics[G2] = gradient_moments(layers, batches, hyper.batch_size, settings.gradients)
    layers.load_state_dict(start)  # anew: running statistics have moved
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    momenta = {name: leaf.clone() for name, leaf in state.tree.items()} if settings.momentum == "kept" else Tree()
    weights = list(layers.named_parameters())
    loss = descend_batches(layers, weights, islice(batches, taken), hyper, momenta=momenta)
    weight = 1.0 if settings.weighting == "uniform" else float(batches.num_examples)
    moved = tree.subtract(model.tree(), start)
    metrics[STEPS_TAKEN] = float(taken)
    kept = State(momenta, state.facts) if settings.momentum == "kept" else state
    return kept, Result(moved, weight, batches.num_examples, loss, metrics=metrics)


def _steps_of(settings: HcefSettings, told: Assignment) -> int:
    return steps_taken(told.seed, settings.local_steps, told_share(told.values, STEPS), settings.draw)


def gradient_moments(layers: nn.Module, batches: Batches, batch_size: int, count: int) -> tuple[float, float]:
    """Return estimates of sigma^2 and G^2 at a network's parameters, neither below zero; running statistics move.

    Args:
        layers: From inputs of shape (B, ...) to outputs of shape (B, classes), with the parameters that came.
        batch_size: B.
        count: M, at least 2.

    Raises:
        Diverged: The loss of a minibatch is not finite.
    """
    layers.train()
    weights = [weight for weight in layers.parameters() if weight.requires_grad]
    share = batch_size / max(1, batches.num_examples)
    parted = count * share <= 1
    drawn = enumerate(_minibatches(batches, count, parted=parted), start=1)
    return moments_of((_gradient(layers, weights, batch, number) for number, batch in drawn), share if parted else 0.0)


def moments_of(gradients: Iterable[Tensor], common: float) -> tuple[float, float]:
    """Return estimates of sigma^2 and G^2 from the gradients of minibatches, neither below zero.

    Args:
        gradients: Vectors of shape (d,); of fewer than two nothing can be told, and both are 0.
        common: f, the share of the examples that a minibatch is where no two share one; else 0.
    """
    mean, spread, seen = torch.zeros(()), 0.0, 0
    for gradient in gradients:
        seen += 1
        beside = gradient - mean
        mean = mean + beside / seen
        spread += float(torch.dot(beside, gradient - mean))
    if seen < FEWEST:
        return 0.0, 0.0
    variance = max(0.0, spread / (seen - 1))
    return (1 - common) * variance, max(0.0, float(torch.dot(mean, mean)) - (1 / seen - common) * variance)


def _minibatches(batches: Batches, count: int, *, parted: bool) -> Iterator[Batch]:
    """Yield minibatches: of one epoch, so that no two share an example, or the first of as many epochs."""
    if parted:
        yield from islice(batches, count)
        return
    for epoch in islice(epochs(batches), count):
        first, *_ = epoch
        yield first


def _gradient(layers: nn.Module, weights: list[nn.Parameter], batch: Batch, number: int) -> Tensor:
    """Return the gradient of a minibatch's mean loss as one vector; those in the parameters stay as they are."""
    loss = functional.cross_entropy(layers(batch[0]), batch[1])
    require_finite_loss(loss.item(), number)
    parts = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def hcef(
    *,
    local_steps: int = 5,
    gradients: int = 0,
    estimate_every: int = 1,
    weighting: Literal["uniform", "examples"] = "uniform",
    draw: Literal["trials", "even"] = "trials",
    momentum: Literal["anew", "kept"] = "anew",
) -> Algorithm:
    """Build the algorithm; options as in `HcefSettings`. Its server state is the model's own tree.

    Raises:
        ValueError: One is out of range.
    """
    settings = HcefSettings(local_steps, gradients, estimate_every, weighting, draw, momentum)
    averaged = fedavg()
    facts: dict[str, Scalar] = {
        "local_steps": local_steps,
        "gradients": gradients,
        "estimate_every": estimate_every,
    }

    def init(model: Model, seed: int) -> State:
        return State(averaged.init(model, seed).tree, facts)

    return replace(
        averaged,
        init=init,
        assign=partial(assign, settings),
        local=partial(local, settings),
        resources=Resources(frozenset({STEPS, SENT}), timed_step=LocalSgd()),
    )
