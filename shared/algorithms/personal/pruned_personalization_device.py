"""Device half of pruned personalization: personal steps, ranking, masked global steps.

Liu, Ratnarajah, Sellathurai, Eldar. Adaptive Model Pruning and Personalization for Federated Learning over Wireless
Networks, https://arxiv.org/abs/2309.01816; equations as in `shared.algorithms.personal.pruned_personalization`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Batch, Batches, Outcome, Result
from shared.algorithms.fedavg import require_finite, require_finite_loss
from shared.algorithms.personal import sparse_update
from shared.algorithms.personal.network_parts import (
    OWN,
    PersonalizationSettings,
    personal_part,
    select_weights,
    shared_part,
)
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.models.leaves import load_leaves
from shared.protocol.messages import Assignment, Hyper
from shared.tensors.generators import seed_torch
from shared.tensors.training_step import descend
from shared.tensors.tree import State, Tree, check_like

MOMENTUM = "momentum/"
ENDLESS = 1 << 62


@dataclass
class Training:
    """A device's network in one round; its parameters are the model's.

    Attributes:
        model: The network, with the received global part and the device's personal part.
        shared: Leaves of the global part u, as received.
        momenta: Momentum of the personal part v, from round to round.
    """

    model: Model
    hyper: Hyper
    shared: Tree
    momenta: Tree
    loss_sum: float = 0.0
    seen: int = 0
    steps: int = 0
    _global_momenta: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        trainable = [(name, leaf) for name, leaf in self.model.layers.named_parameters() if leaf.requires_grad]
        self.shared_weights = [(name, leaf) for name, leaf in trainable if name in self.shared]
        self.personal_weights = [(name, leaf) for name, leaf in trainable if name not in self.shared]

    def step(self, batch: Batch, mask: Tree, *, update_shared: bool = True, update_personal: bool = True) -> float:
        """Take a step on one part or both; pruned weights of u are zero and stay zero. Equations (6) and (22).

        Args:
            batch: Inputs of shape (N, ...), labels of shape (N,).
            mask: True where a shared weight is retained.
        """
        inputs, labels = batch
        loss = self.model.objective.loss(self.model.layers(inputs), labels)
        moving = [*(self.personal_weights if update_personal else []), *(self.shared_weights if update_shared else [])]
        loss.backward(inputs=[leaf for _, leaf in moving])
        if update_personal:
            descend(self.personal_weights, self.momenta, self.hyper)
        if update_shared:
            for name, leaf in self.shared_weights:
                if name in mask and leaf.grad is not None:
                    leaf.grad.masked_fill_(~mask[name], 0.0)
            descend(self.shared_weights, self._global_momenta, self.hyper)
        return loss.item()

    def count(self, batch: Batch, loss: float) -> None:
        """Add a step's loss to the round's."""
        self.steps += 1
        self.loss_sum += require_finite_loss(loss, self.steps) * len(batch[1])
        self.seen += len(batch[1])

    def importance(self, settings: PersonalizationSettings, batches: Batches) -> Tensor:
        """Return the importance of each weight of u, of shape (N,), without side effects; equation (20).

        Uses the first batches of the round a second time, and restores the random state of the layers, so that all
        other steps are the same with and without warm-up.

        Raises:
            TaskFailed: Warm-up has diverged.
        """
        received = sparse_update.flatten_weights(select_weights(self.shared))
        if settings.importance == "magnitude":
            return received.abs()
        buffers = {name: leaf.clone() for name, leaf in self.model.layers.named_buffers()}
        with seed_torch(0):
            for batch in islice(iter(batches), settings.warmup_steps):
                self.step(batch, {}, update_personal=False)
        self._global_momenta = {}
        change = (sparse_update.flatten_weights(select_weights(self.now(self.shared))) - received).abs_()
        if not math.isfinite(change.max().item()):
            raise TaskFailed("warm-up has diverged: weights are NaN or infinite; lower the learning rate")
        self.put({**self.shared, **buffers})
        return change.mul_(received.abs()) if settings.importance == "taylor" else change

    def now(self, names: Tree) -> Tree:
        """Return the network's current leaves of these names."""
        leaves = self.model.tree()
        return {key: leaves[key] for key in names}

    @torch.no_grad()
    def put(self, leaves: Tree) -> None:
        """Overwrite leaves of the network."""
        for key, leaf in self.now(leaves).items():
            leaf.copy_(leaves[key])

    def statistics(self, *, shared: bool) -> Tree:
        """Return copies of one part's buffers, which a step on the other part must not change."""
        buffers = self.model.layers.named_buffers()
        return {name: leaf.clone() for name, leaf in buffers if (name in self.shared) == shared}


def local(
    settings: PersonalizationSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. Masked steps compute as densely as others: only bytes are saved.

    Raises:
        TaskFailed: There are no examples, training has diverged, or the device's state is of another model.
        WireError: The download is not the global part.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")
    _require_shared(settings, model, start)
    personal = personal_part(settings.split, model, state, assignment)
    load_leaves(model.layers, {**start, **personal})
    model.layers.train()
    model.layers.zero_grad()  # gradients of a task interrupted within a step
    momenta = {key.removeprefix(MOMENTUM): leaf for key, leaf in state.tree.items() if key.startswith(MOMENTUM)}
    training = Training(model, assignment.hyper, start, {key: leaf.clone() for key, leaf in momenta.items()})
    weights = select_weights(start)
    count = sum(leaf.numel() for leaf in weights.values())
    share = pruned_share(settings, assignment)
    number, stream = sparse_update.count_held(count, share), iter(batches)
    if settings.updating == "alternating":
        _personalize(training, stream, settings.personal_steps)
    mask = _prune(settings, training, batches, number) if 0 < number < count else None
    masks = sparse_update.view_shaped(mask, weights) if mask is not None else {}
    if settings.updating == "simultaneous":
        _train_both(settings, training, stream, masks, empty=not number)
    elif number:
        _globalize(training, stream, settings.global_steps, masks)
    after = {OWN + key: leaf for key, leaf in training.now(personal).items()}
    after |= {MOMENTUM + key: leaf for key, leaf in training.momenta.items()}
    require_finite(after)
    device_state = State({key: leaf.detach().contiguous().clone() for key, leaf in after.items()}, state.facts)
    return device_state, Result(
        tree=_upload(training.now(start), mask) if number else {},
        weight=float(batches.num_examples) if settings.weighting == "examples" else 1.0,
        num_examples=batches.num_examples,
        loss=training.loss_sum / training.seen if training.seen else None,
        metrics={"pruned": 1 - number / count},
    )


def train_unpruned(
    settings: PersonalizationSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Take a plain step on the whole network for every batch, which `[measure]` times."""
    unpruned = replace(settings, updating="simultaneous", personal_steps=ENDLESS, global_steps=ENDLESS, prune=0.0)
    values = {key: value for key, value in assignment.values.items() if key != "prune"}
    return local(unpruned, model, state, start, batches, msgspec.structs.replace(assignment, values=values))


def pruned_share(settings: PersonalizationSettings, assignment: Assignment) -> float:
    """Return rho, the share of global weights that a device leaves out.

    Raises:
        WireError: The assigned share is out of range.
    """
    share = assignment.values.get("prune", settings.prune)
    if isinstance(share, str | list) or not 0 <= share <= 1:
        raise WireError(f"prune is {share!r}, not a share in [0, 1]", reason="prune")
    return float(share)


def _require_shared(settings: PersonalizationSettings, model: Model, start: Tree) -> None:
    like = shared_part(settings.split, model)
    if start.keys() != like.keys():
        raise WireError(f"tensors {sorted(start)[:8]} are not the global part {sorted(like)[:8]}", reason="params")
    check_like(start, like)


def _personalize(training: Training, stream: Iterator[Batch], steps: int) -> None:
    """Take steps on v with u as received; equation (6)."""
    if not training.personal_weights:
        return
    statistics = training.statistics(shared=True)
    for batch in islice(stream, steps):
        training.count(batch, training.step(batch, {}, update_shared=False))
    training.put(statistics)


def _prune(settings: PersonalizationSettings, training: Training, batches: Batches, number: int) -> Tensor:
    """Rank the weights and set all but the first `number` to zero; equation (21)."""
    mask = sparse_update.most_important(training.importance(settings, batches), number)
    weights = select_weights(training.shared)
    training.put(sparse_update.view_shaped(torch.where(mask, sparse_update.flatten_weights(weights), 0.0), weights))
    return mask


def _globalize(training: Training, stream: Iterator[Batch], steps: int, masks: Tree) -> None:
    """Take masked steps on u with the current v; equation (22)."""
    statistics = training.statistics(shared=False)
    for batch in islice(stream, steps):
        training.count(batch, training.step(batch, masks, update_personal=False))
    training.put(statistics)


def _train_both(
    settings: PersonalizationSettings, training: Training, stream: Iterator[Batch], masks: Tree, *, empty: bool
) -> None:
    for number, batch in enumerate(islice(stream, settings.steps)):
        update_personal, update_shared = number < settings.personal_steps, number < settings.global_steps and not empty
        update_personal = update_personal and bool(training.personal_weights)
        if update_personal or update_shared:
            training.count(
                batch, training.step(batch, masks, update_shared=update_shared, update_personal=update_personal)
            )


def _upload(after: Tree, mask: Tensor | None) -> Tree:
    weights = select_weights(after)
    dense = {key: leaf.detach().clone() for key, leaf in after.items() if key not in weights}
    return sparse_update.pack_sparse(sparse_update.flatten_weights(weights).detach(), mask) | dense
