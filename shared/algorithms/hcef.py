"""HCEF: devices take a random share of steps and compress updates.

Zhang, Gao, Guo, Gong. HCEF: heterogeneity-aware cooperative federated edge learning with adaptive computation and
communication compression. https://arxiv.org/abs/2409.04022

    x^(s+1) = x^s - eta 1_s g(x^s),   1_s ~ Bernoulli(rho),   s = 0 ... tau - 1          (4), (6)
    y <- y + 1 / N sum_n Q_theta(x_n^tau - x_n^0)

tau is `local_steps`; rho and theta arrive with every task as `steps` and `sent`, 1 without an optimizer; Q is the codec
`topk`. A skipped step changes nothing: no parameter, no momentum, no batch, no time. So only the number of steps taken
matters. It is a function of the task's seed; the server draws it too, and sends it with the task. With `draw = "even"`
a device takes floor(rho tau + u) steps, u uniform in [0, 1): rho tau in the mean as well, but never a whole step more,
so that the slowest of many devices takes little longer than planned. The paper's time and energy, (8) and (9), are
expectations, to which such a round is close.

Momentum starts at zero in every task, unless `momentum` is "kept"; the paper does not specify it. With rho = theta = 1
and as many steps as an epoch has, this is FedAvg.

rho and theta are decided (Algorithm 2) from M gradients of minibatches at the received parameters:

    sigma^2 = E |g - grad F|^2,   G^2 = |grad F|^2
    s^2 = 1 / (M - 1) sum |g_m - mean|^2,   sigma^2 ~ (1 - f) s^2,   G^2 ~ max(0, |mean|^2 - (1 / M - f) s^2)

f is 0 where each minibatch is drawn from all of the device's N examples; where they are the first of an epoch, which
are disjoint, f = B / N. Neither estimate is biased; |mean|^2 alone would be too large by sigma^2 / M.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import index
from random import Random
from typing import Literal, get_args, get_type_hints

import msgspec
import torch
from torch import Tensor, nn

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
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, LocalSgd, descend_batches, fedavg, require_finite_loss
from shared.algorithms.local_training import epochs
from shared.errors import WireError
from shared.models.base import Model
from shared.models.leaves import load_leaves
from shared.protocol.messages import Assignment, Scalar, Value
from shared.tensors import tree
from shared.tensors.counts import floor_share
from shared.tensors.tree import State, Tree

STEPS, SENT = "steps", "sent"
"""Values of a task: rho, the share of the local steps to take, and theta, the share of the change to send."""
GRADIENTS = "gradients"
"""Value of a task: number of gradients for the estimates; 0 in rounds without estimates."""
SIGMA2, G2, STEPS_TAKEN = "sigma2", "g2", "steps_taken"
"""Metrics of an update."""
NEAR = 1e-9
"""Tolerance within which a number of steps counts as whole."""
FEWEST = 2
"""Minimum number of gradients for a variance."""


@dataclass(frozen=True)
class HcefSettings:
    """Settings of the method.

    Attributes:
        local_steps: tau, local steps of a round, one batch each; `[hyper] local_epochs` is ignored.
        gradients: M, gradients from which each device estimates sigma^2 and G^2 before it trains, 2 or more; 0: none.
            They take as long as the same number of steps.
        estimate_every: Rounds from one with estimates to the next, the first being one; estimates hold until the next.
        weighting: Weight of a device in the mean: equal for all, as in the paper, or by examples, as in FedAvg.
        draw: Random decision: `trials`, for each step, as in the paper; or `even`, whether rho tau is rounded up or
            down.
        momentum: `anew`: zero at the start of every task; `kept`: continued from the device's last step.
    """

    local_steps: int = 5
    gradients: int = 0
    estimate_every: int = 1
    weighting: Literal["uniform", "examples"] = "uniform"
    draw: Literal["trials", "even"] = "trials"
    momentum: Literal["anew", "kept"] = "anew"

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        if index(self.local_steps) < 1 or (index(self.gradients) and self.gradients < FEWEST):
            raise ValueError("local_steps must be >= 1, gradients 0 or >= 2")
        if index(self.estimate_every) < 1:
            raise ValueError("estimate_every must be >= 1")
        for name, hint in get_type_hints(type(self)).items():
            if (choices := get_args(hint)) and getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")


def steps_taken(seed: int, local_steps: int, share: float, draw: Literal["trials", "even"] = "trials") -> int:
    """Return the number of local steps that a device takes, on average rho tau.

    Args:
        local_steps: tau of the paper.
        share: rho of the paper, in [0, 1].
        draw: `trials`: each step is taken with probability rho; `even`: rho tau is rounded up or down at random.
    """
    chance = Random(f"{seed}/steps")  # noqa: S311 - a draw, not a secret
    if draw == "even":
        whole_steps = floor_share(share, local_steps)
        fraction = share * local_steps - whole_steps
        return min(local_steps, whole_steps + (fraction + chance.random() * (1 - NEAR) + NEAR >= 1))
    return sum(chance.random() < share for _ in range(local_steps))


def assigned_share(values: Mapping[str, Value], name: str) -> float:
    """Return rho or theta of a task; 1 where it is absent.

    Raises:
        WireError: It is not in [0, 1].
    """
    value = values.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise WireError(f"{name} is {value!r}, a share is from 0 to 1")
    return float(value)


def assign(
    settings: HcefSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Assign every device its shares, and the number of gradients that it computes.

    Raises:
        WireError: An allocated share is out of range.
    """
    enough = max(settings.local_steps, settings.gradients)  # epochs of at least one batch
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=enough)
    gradients, assignments = 0 if (number - 1) % settings.estimate_every else settings.gradients, {}
    for device, assignment in assign_alike(state, cohort, allocation, number).items():
        steps = _assigned_steps(settings, assignment)
        values = {**assignment.values, GRADIENTS: gradients, "local_steps": steps + gradients}
        assignments[device] = msgspec.structs.replace(assignment, hyper=hyper, values=values)
    return assignments


def local(
    settings: HcefSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`.

    Raises:
        Diverged: A loss is not finite.
        WireError: The task's share of steps is out of range.
    """
    layers, hyper, metrics = model.layers, assignment.hyper, dict[str, float]()
    steps = _assigned_steps(settings, assignment)
    if settings.gradients and assignment.values.get(GRADIENTS):
        load_leaves(layers, start)
        metrics[SIGMA2], metrics[G2] = gradient_moments(model, batches, hyper.batch_size, settings.gradients)
    load_leaves(layers, start)  # again: running statistics have changed
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    momenta = {name: leaf.clone() for name, leaf in state.tree.items()} if settings.momentum == "kept" else Tree()
    weights = list(layers.named_parameters())
    loss = descend_batches(layers, weights, islice(batches, steps), hyper, model.objective, momenta=momenta)
    weight = 1.0 if settings.weighting == "uniform" else float(batches.num_examples)
    change = tree.subtract(model.tree(), start)
    metrics[STEPS_TAKEN] = float(steps)
    device_state = State(momenta, state.facts) if settings.momentum == "kept" else state
    return device_state, Result(change, weight, batches.num_examples, loss, metrics=metrics)


def _assigned_steps(settings: HcefSettings, assignment: Assignment) -> int:
    return steps_taken(assignment.seed, settings.local_steps, assigned_share(assignment.values, STEPS), settings.draw)


def gradient_moments(model: Model, batches: Batches, batch_size: int, count: int) -> tuple[float, float]:
    """Return estimates of sigma^2 and G^2 at a network's parameters, both >= 0; running statistics change.

    Args:
        model: With the received parameters.
        batch_size: B of the paper, examples of a minibatch.
        count: M, at least 2.

    Raises:
        Diverged: The loss of a minibatch is not finite.
    """
    model.layers.train()
    weights = [weight for weight in model.layers.parameters() if weight.requires_grad]
    share = batch_size / max(1, batches.num_examples)
    disjoint = count * share <= 1
    minibatches = enumerate(_minibatches(batches, count, disjoint=disjoint), start=1)
    return moments_of(
        (_gradient(model, weights, batch, number) for number, batch in minibatches), share if disjoint else 0.0
    )


def moments_of(gradients: Iterable[Tensor], common: float) -> tuple[float, float]:
    """Return estimates of sigma^2 and G^2 from the gradients of minibatches, both >= 0.

    Args:
        gradients: Vectors of shape (d,); with fewer than two, both estimates are 0.
        common: f, a minibatch's share of the examples where minibatches are disjoint; else 0.
    """
    mean, spread, count = torch.zeros(()), 0.0, 0
    for gradient in gradients:
        count += 1
        deviation = gradient - mean
        mean = mean + deviation / count
        spread += float(torch.dot(deviation, gradient - mean))
    if count < FEWEST:
        return 0.0, 0.0
    variance = max(0.0, spread / (count - 1))
    return (1 - common) * variance, max(0.0, float(torch.dot(mean, mean)) - (1 / count - common) * variance)


def _minibatches(batches: Batches, count: int, *, disjoint: bool) -> Iterator[Batch]:
    if disjoint:
        yield from islice(batches, count)
        return
    for epoch in islice(epochs(batches), count):
        first, *_ = epoch
        yield first


def _gradient(model: Model, weights: list[nn.Parameter], batch: Batch, number: int) -> Tensor:
    """Return the gradient of a minibatch's mean loss as one vector; gradients in the parameters stay."""
    loss = model.objective.loss(model.layers(batch[0]), batch[1])
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
    """Build the algorithm; options as in `HcefSettings`. Its server state is the model's tree.

    Raises:
        ValueError: An option is out of range.
    """
    settings = HcefSettings(local_steps, gradients, estimate_every, weighting, draw, momentum)
    averaged = fedavg()
    facts: dict[str, Scalar] = {"local_steps": local_steps, "gradients": gradients, "estimate_every": estimate_every}

    def init(model: Model, seed: int) -> State:
        return State(averaged.init(model, seed).tree, facts)

    return replace(
        averaged,
        init=init,
        assign=partial(assign, settings),
        local=partial(local, settings),
        step_options=ALL_STEP_OPTIONS - {"optimizer"},  # rho and theta are decided for steps of SGD
        resources=Resources(frozenset({STEPS, SENT}), timed_step=LocalSgd()),
    )
