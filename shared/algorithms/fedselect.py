"""FedSelect: single weights that move far become a device's own, the others stay common.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian. FedSelect: Personalized Federated Learning with Customized Selection of
Parameters for Fine-Tuning. CVPR 2024. https://arxiv.org/abs/2404.02478

    m_k     0 at a device's first participation: it trains all; then, tensor by tensor, the share `begin` of the weights
            with the largest |w_k - w|, w being what came, becomes its own: m_k = 1
    w_k <- m_k w_k + (1 - m_k) w        what comes takes the place of what is common
    w_k <- w_k - eta m_k g, w_k <- w_k - eta (1 - m_k) g        epochs in turn; a task of one epoch trains both at once
    m_k     every `every` participations, the share `grow` of the common weights with the largest |w_k - w_k'| becomes
            the device's own, w_k' being its weights when m_k grew last, until the share `most` is
    w[j] <- sum_k n_k w_k[j] / sum_k n_k                        over the devices with m_k[j] = 0

Biases and running statistics are always common. As published, whole models travel: those of a device's own weights as
zeros, which the codec `masked` leaves out; a common weight of exactly zero counts as nobody's. FedSPU's text describes
the share that grows from 25 to 50 %; the authors' code starts from nothing, and lets a tensor pass the limit once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import fedavg
from shared.algorithms.local_training import Tally, epochs
from shared.algorithms.personal.sparse_update import most_important
from shared.algorithms.personal_model import origin, require_finite
from shared.algorithms.subnetwork.server_half import aggregate, assign
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper
from shared.tensors import tree as trees
from shared.tensors.counts import floor_share
from shared.tensors.tree import Mean, State, Tree

OWN, BEFORE, CHOSEN = "own/", "before/", "chosen/"
"""What a device remembers: its model, its weights when its choice grew last, and that choice."""
TIMES = "participations"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Growth:
    """How many weights of a tensor become a device's own.

    Attributes:
        begin: Share of all, at first.
        grow: Share of those that are common, later.
        most: Share of all, at most.
        every: Participations from one time to the next.
    """

    begin: float = 0.25
    grow: float = 0.05
    most: float = 0.5
    every: int = 1

    def __post_init__(self) -> None:
        """Refuse shares that are none.

        Raises:
            ValueError: They are none.
        """
        if not 0 <= self.begin <= self.most <= 1 or not 0 <= self.grow <= 1 or self.every < 1:
            raise ValueError("shares must be 0 <= begin <= most <= 1 and 0 <= grow <= 1; every must be >= 1")

    def count(self, size: int, owned: int, times: int) -> int:
        """Return how many more of `size` weights become a device's own, `owned` being so, after `times` times.

        Args:
            size: Weights of the tensor.
            owned: How many are the device's own so far.
            times: How many times they have grown.
        """
        if not times:
            return floor_share(self.begin, size)
        if times % self.every:
            return 0
        return max(0, min(floor_share(self.grow, size - owned), floor_share(self.most, size) - owned))


@stops_early
def fedselect(
    *, begin: float = 0.25, grow: float = 0.05, most: float = 0.5, every: int = 1, stopping: Stopping
) -> Algorithm:
    """Build the algorithm; for its options see `Growth`."""
    growth = Growth(begin, grow, most, every)

    def local(model: Model, state: State, down: Tree, batches: Batches, told: Assignment) -> Outcome:
        """Device half: merge, train one's own and the common weights in turn, choose, send what is common."""
        chosen = _select_prefix(state, CHOSEN)
        merged = _merge_choice(chosen, _select_prefix(state, OWN), down)
        loss = _train(model, merged, chosen, batches, told.hyper)
        after = {key: leaf.detach().clone() for key, leaf in model.tree().items()}
        require_finite(after)
        facts, metrics = stopping.judge(state.facts, loss, model.layers, after, batches.validation)
        common, count = Tree(), batches.num_examples
        for key, leaf in after.items():
            if leaf.is_floating_point():
                common[key] = leaf.masked_fill(chosen[key], 0) if key in chosen else leaf
        own = grow_choice(growth, state, down, after)
        return replace(own, facts=facts | own.facts), Result(common, float(count), count, loss, metrics=metrics)

    return replace(
        fedavg(),
        init=lambda model, seed: State({key: leaf.clone() for key, leaf in model.tree().items()}, origin(model, seed)),
        assign=assign,
        local=local,
        absorb=absorb,
        aggregate=aggregate,
        sends_changes=False,
        personal=Personal(lambda _model, state, down, _told: _select_prefix(state, OWN) or down),
        mixing=None,
    )


def grow_choice(growth: Growth, state: State, down: Tree, after: Tree) -> State:
    """Return what a device remembers after a participation: its model, and its choice with what has moved most.

    Args:
        growth: How many weights become own.
        state: What the device remembers.
        after: Its network after training.
    """
    times = state.facts.get(TIMES, 0)
    assert isinstance(times, int)
    chosen, before = _select_prefix(state, CHOSEN), _select_prefix(state, BEFORE)
    kept = {OWN + key: leaf for key, leaf in after.items()}
    for key, leaf in after.items():
        if not _is_weight(key, leaf):
            continue
        mask, since = (
            chosen.get(key, torch.zeros(leaf.shape, dtype=torch.bool, device=leaf.device)),
            before.get(key, down[key]),
        )
        more = growth.count(leaf.numel(), int(mask.count_nonzero()), times)
        if more:
            moved = (leaf - since).abs().masked_fill(mask, -1).flatten()
            mask, since = mask | most_important(moved.to(torch.float32), more).view(leaf.shape), leaf
        kept |= {CHOSEN + key: mask.contiguous(), BEFORE + key: since.clone()}
    return State(kept, {TIMES: times + 1})


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add an update: of weights, those that are not zero."""
    held = {key: leaf != 0 for key, leaf in result.tree.items() if _is_weight(key, leaf)}
    return trees.accumulate(mean, result.tree, result.weight, held)


def _is_weight(key: str, leaf: Tensor) -> bool:
    return key.endswith(WEIGHT) and leaf.is_floating_point()


def _select_prefix(state: State, prefix: str) -> Tree:
    return {key.removeprefix(prefix): leaf for key, leaf in state.tree.items() if key.startswith(prefix)}


def _merge_choice(chosen: Tree, own: Tree, down: Tree) -> Tree:
    return {key: torch.where(chosen[key], own[key], leaf) if key in chosen else leaf for key, leaf in down.items()}


def _train(model: Model, merged: Tree, chosen: Tree, batches: Batches, hyper: Hyper) -> float | None:
    """Train the whole network, one's own and the common weights in epochs by turns; return the mean loss."""
    model.layers.load_state_dict(merged)
    model.layers.train()
    model.layers.zero_grad()  # of a task that was cut short in the middle of a step
    weights, tally = list(model.layers.named_parameters()), Tally()
    takes_turns = hyper.local_epochs > 1 and any(bool(mask.any()) for mask in chosen.values())
    for number, epoch in enumerate(epochs(batches)):
        if takes_turns:
            correct = _mask_gradients(weights, chosen, hyper, own=number % 2 == 0)
            tally.train(model.layers, weights, epoch, msgspec.structs.replace(hyper, weight_decay=0.0), correct)
        else:
            tally.train(model.layers, weights, epoch, hyper)
    return tally.mean


def _mask_gradients(
    weights: Sequence[tuple[str, Tensor]], chosen: Tree, hyper: Hyper, *, own: bool
) -> Callable[[], None]:
    """Return what leaves of the gradients only those of one's own weights, or those of the others; decay included."""

    @torch.no_grad()
    def correct() -> None:
        for name, weight in weights:
            if weight.grad is None:
                continue
            weight.grad.add_(weight, alpha=hyper.weight_decay)
            if name in chosen:
                weight.grad.mul_(chosen[name] if own else ~chosen[name])
            elif own:
                weight.grad = None

    return correct
