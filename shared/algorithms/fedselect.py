"""FedSelect: weights that change most become personal, the others stay common.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian. FedSelect: Personalized Federated Learning with Customized Selection of
Parameters for Fine-Tuning. CVPR 2024. https://arxiv.org/abs/2404.02478

    m_k     0 at a device's first participation, which trains all weights; then, in each tensor, the share `begin` with
            the largest |w_k - w| becomes personal: m_k = 1; w are the received weights
    w_k <- m_k w_k + (1 - m_k) w        received weights replace the common ones
    w_k <- w_k - eta m_k g, w_k <- w_k - eta (1 - m_k) g        epochs in turn; a task of one epoch trains both at once
    m_k     every `every` participations, the share `grow` of the common weights with the largest |w_k - w_k'| becomes
            personal, w_k' being the weights at the last growth of m_k, until the share `most` is reached
    w[j] <- sum_k n_k w_k[j] / sum_k n_k                        over the devices with m_k[j] = 0

Biases and running statistics are always common. As published, whole models travel, with personal weights as zeros,
which the codec `masked` omits; a common weight of exactly zero is treated as missing. FedSPU's text describes a share
that grows from 25 to 50 %; the authors' code starts from zero, and lets a tensor exceed the limit once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, fedavg, require_finite
from shared.algorithms.local_training import Tally, epochs
from shared.algorithms.personal.sparse_update import most_important
from shared.algorithms.personal_model import describe_origin
from shared.algorithms.subnetwork.server_half import aggregate, assign
from shared.models.base import Model
from shared.models.leaves import load_leaves
from shared.protocol.messages import Assignment, Hyper
from shared.tensors import tree as trees
from shared.tensors.counts import floor_share
from shared.tensors.tree import Mean, State, Tree

OWN, BEFORE, CHOSEN = "own/", "before/", "chosen/"
"""Prefixes in a device's state: its model, its weights at the last growth of the choice, and that choice."""
TIMES = "participations"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Growth:
    """Growth schedule of the personal weights of a tensor.

    Attributes:
        begin: Share of all weights that becomes personal after the first participation.
        grow: Share of the common weights that becomes personal at each later growth.
        most: Upper limit of the personal share of all weights.
        every: Participations between two growths.
    """

    begin: float = 0.25
    grow: float = 0.05
    most: float = 0.5
    every: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a share or a period that is out of range."""
        if not 0 <= self.begin <= self.most <= 1 or not 0 <= self.grow <= 1 or self.every < 1:
            raise ValueError("shares must be 0 <= begin <= most <= 1 and 0 <= grow <= 1; every must be >= 1")

    def count(self, size: int, owned: int, times: int) -> int:
        """Return the number of a tensor's `size` weights that become personal now.

        Args:
            owned: Number of personal weights so far.
        """
        if not times:
            return floor_share(self.begin, size)
        if times % self.every:
            return 0
        return max(0, min(floor_share(self.grow, size - owned), floor_share(self.most, size) - owned))


def init(model: Model, seed: int) -> State:
    """Return the initial server state: the model, and its origin for personal models."""
    return State({key: leaf.clone() for key, leaf in model.tree().items()}, describe_origin(model, seed))


@stops_early
def fedselect(
    *, begin: float = 0.25, grow: float = 0.05, most: float = 0.5, every: int = 1, stopping: Stopping
) -> Algorithm:
    """Build the algorithm; for its options see `Growth`."""
    growth = Growth(begin, grow, most, every)

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: merge, train personal and common weights in turn, grow the choice, send the common weights."""
        chosen = _select_prefix(state, CHOSEN)
        personal = _select_prefix(state, OWN)
        merged = {
            key: torch.where(chosen[key], personal[key], leaf) if key in chosen else leaf for key, leaf in down.items()
        }
        loss = _train(model, merged, chosen, batches, assignment.hyper)
        after = {key: leaf.detach().clone() for key, leaf in model.tree().items()}
        require_finite(after)
        facts, metrics = stopping.judge(state.facts, loss, model, after, batches.validation)
        common, count = Tree(), batches.num_examples
        for key, leaf in after.items():
            if leaf.is_floating_point():
                common[key] = leaf.masked_fill(chosen[key], 0) if key in chosen else leaf
        grown = grow_personal_mask(growth, state, down, after)
        return replace(grown, facts=facts | grown.facts), Result(common, float(count), count, loss, metrics=metrics)

    return replace(
        fedavg(),
        init=init,
        assign=assign,
        local=local,
        absorb=absorb,
        aggregate=aggregate,
        sends_changes=False,
        trains_parts=False,
        step_options=ALL_STEP_OPTIONS - {"optimizer"},  # it applies weight decay itself
        personal=Personal(lambda _model, state, down, _told: _select_prefix(state, OWN) or down),
        mixing=None,
    )


def grow_personal_mask(growth: Growth, state: State, down: Tree, after: Tree) -> State:
    """Return a device's state after a participation: its model, and the choice with the weights that changed most.

    Args:
        state: Device state before the participation.
    """
    times = state.facts.get(TIMES, 0)
    assert isinstance(times, int)
    chosen, before = _select_prefix(state, CHOSEN), _select_prefix(state, BEFORE)
    tree = {OWN + key: leaf for key, leaf in after.items()}
    for key, leaf in after.items():
        if not _is_weight(key, leaf):
            continue
        mask, since = (
            chosen.get(key, torch.zeros(leaf.shape, dtype=torch.bool, device=leaf.device)),
            before.get(key, down[key]),
        )
        more = growth.count(leaf.numel(), int(mask.count_nonzero()), times)
        if more:
            distance = (leaf - since).abs().masked_fill(mask, -1).flatten()
            mask, since = mask | most_important(distance.to(torch.float32), more).view(leaf.shape), leaf
        tree |= {CHOSEN + key: mask.contiguous(), BEFORE + key: since.clone()}
    return State(tree, {TIMES: times + 1})


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add an update; zeros among its weights do not count."""
    coverage = {key: leaf != 0 for key, leaf in result.tree.items() if _is_weight(key, leaf)}
    return trees.accumulate(mean, result.tree, result.weight, coverage)


def _is_weight(key: str, leaf: Tensor) -> bool:
    return key.endswith(WEIGHT) and leaf.is_floating_point()


def _select_prefix(state: State, prefix: str) -> Tree:
    return {key.removeprefix(prefix): leaf for key, leaf in state.tree.items() if key.startswith(prefix)}


def _train(model: Model, merged: Tree, chosen: Tree, batches: Batches, hyper: Hyper) -> float | None:
    load_leaves(model.layers, merged)
    model.layers.train()
    model.layers.zero_grad()  # of a task that was cut short in the middle of a step
    weights, tally = list(model.layers.named_parameters()), Tally()
    takes_turns = hyper.local_epochs > 1 and any(bool(mask.any()) for mask in chosen.values())
    undecayed = msgspec.structs.replace(hyper, weight_decay=0.0)
    for number, epoch in enumerate(epochs(batches)):
        if takes_turns:
            correct = _mask_gradients(weights, chosen, hyper, is_personal=number % 2 == 0)
            tally.train(model, epoch, undecayed, correct=correct)
        else:
            tally.train(model, epoch, hyper)
    return tally.mean


def _mask_gradients(
    weights: Sequence[tuple[str, Tensor]], chosen: Tree, hyper: Hyper, *, is_personal: bool
) -> Callable[[], None]:
    """Return a correction that restricts gradients to personal or to common weights, weight decay included."""

    @torch.no_grad()
    def correct() -> None:
        for name, weight in weights:
            if weight.grad is None:
                continue
            weight.grad.add_(weight, alpha=hyper.weight_decay)
            if name in chosen:
                weight.grad.mul_(chosen[name] if is_personal else ~chosen[name])
            elif is_personal:
                weight.grad = None

    return correct
