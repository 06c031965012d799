"""Ranked pruning: devices prune the common model once, by local data.

Common base of Hermes, FedMP and PruneFL as Niu, Dong, Qin compare FedSPU with them (AAAI 2025,
https://arxiv.org/abs/2403.11464): the three differ only in the ranking of neurons. At a device's first participation

    w       the whole model is sent to the device, which trains all of it for one epoch
    S_l     the floor(p_k n_l) neurons of each hidden layer with the highest merit, at least one; chosen only once
    w_k     the parameters that belong to S: the remaining epochs train these alone, in a physically smaller network
    up      these parameters, and one bit a neuron: sum_l ceil(n_l / 8) + 4 |A_k| bytes

Afterwards both directions carry these parameters alone, as in FedSPU, whatever p_k is decided later: a device keeps
the share of its first participation, and its tasks state it. Each coordinate is averaged over the devices that have
it; a device is evaluated with its parameters as it last trained them. The authors' code ranks a freshly initialised
network after one step or none, so that its choice does not depend on data; here, as their text describes, the
received model is trained and then ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain as following

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Allocation, Batch, Batches, Cohort, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, require_finite
from shared.algorithms.local_training import Tally, epochs
from shared.algorithms.subnetwork import server_half
from shared.algorithms.subnetwork.neuron_ranking import Merit, select_strongest
from shared.algorithms.subnetwork.random_dropout import build_smaller, received_parameters, train_received
from shared.algorithms.subnetwork.server_half import CHAIN, KEEP, keep_share, read_download, stored_chain
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Scalar
from shared.subnetworks.neurons import (
    PREFIX,
    Active,
    Chain,
    all_neurons,
    count_active,
    extract,
    first_neurons,
    pack,
    read_chain,
    unpack,
)
from shared.tensors.tree import Mean, State, Tree, check_like

MASK, KEPT = "mask/", "kept/"
"""Prefixes of the server's facts about a device: its bitmaps, as hexadecimal digits, and their share."""


def build_ranked(merit: Merit, stopping: Stopping, *, keep: float) -> Algorithm:
    """Build the algorithm from a ranking of neurons; for its options see `fedspu`.

    Args:
        merit: Ranks neurons by their weights and gradients.
        keep: Share of neurons for devices without an allocated share.
    """

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: choose neurons at first; train their parameters, send them, store them."""
        active, index, values = read_download(model, down)
        layout, tally, passes, marks = read_chain(model.chain), Tally(), epochs(batches), Tree()
        if must_choose(assignment):
            active = _stored_choice(state, layout.hidden, keep_share(assignment))
            if not active:
                active = _choose_neurons(model, values, merit, assignment, next(passes, iter(())), tally)
                values = model.tree()
            index, marks = layout.index(active), pack(active, layout.hidden)
            values = extract(values, index)
        smaller = replace(model, layers=build_smaller(model, active, values))
        tally.train(smaller, following.from_iterable(passes), assignment.hyper)
        trained = dict(smaller.layers.state_dict())
        require_finite(trained)
        facts, metrics = stopping.judge(state.facts, tally.mean, smaller, trained, batches.validation)
        part, count = {key: trained[key].contiguous() for key in index}, batches.num_examples
        device_state = State(part | pack(active, layout.hidden), facts)
        return device_state, Result(part | marks, float(count), count, tally.mean, metrics=metrics)

    base = server_half.build_algorithm(local, chosen_neurons, keep=keep)
    return replace(
        base,
        assign=_build_assign(base),
        absorb=_build_absorb(base),
        aggregate=_build_aggregate(base),
        check_update=check_update,
        step_options=ALL_STEP_OPTIONS,
        personal=Personal(
            _personal_parameters,
            lambda state, device, assignment: (
                base.broadcast(state, device, assignment) if must_choose(assignment) else {}
            ),
        ),
        resources=replace(
            base.resources,
            step_share=_step_share,
            timed_step=partial(train_received, Stopping()),
            fixed_values=fixed_share,
        ),
    )


def _step_share(model: Model, assignment: Assignment) -> float:
    """Return the relative cost of a step; in a device's first task, one epoch trains the whole network."""
    share, epochs = server_half.smaller_step(model, assignment), assignment.hyper.local_epochs
    return (1 + (epochs - 1) * share) / epochs if must_choose(assignment) else share


def chosen_neurons(state: State, device: str, _assignment: Assignment) -> Active:
    """Return the neurons that a device has chosen; before its choice, all."""
    return _recorded_neurons(state, device, stored_chain(state.facts).hidden)


def _recorded_neurons(state: State, device: str, hidden: Mapping[str, int]) -> Active:
    mask = state.facts.get(MASK + device)
    return all_neurons(hidden) if mask is None else unpack(_from_hex(str(mask), hidden), hidden)


def fixed_share(state: State, device: str) -> dict[str, float]:
    """Return the share of neurons that a device has chosen, as `keep`; empty before its choice.

    In a run begun before shares were recorded, the smallest share that gives as many neurons.
    """
    if MASK + device not in state.facts:
        return {}
    if (share := state.facts.get(KEPT + device)) is not None:
        return {KEEP: float(share)}
    layout = stored_chain(state.facts)
    active = _recorded_neurons(state, device, layout.hidden)
    shares = [(len(active[name]), len(active[name]) / count) for name, count in layout.hidden.items()]
    return {KEEP: max([share for neurons, share in shares if neurons > 1] or [min(share for _, share in shares)])}


def _personal_parameters(model: Model, state: State, down: Tree, assignment: Assignment) -> Tree:
    """Return a device's trained parameters; the download, where it has none yet.

    Raises:
        TaskFailed: The device has lost its parameters.
    """
    if not state.tree and not down:
        raise TaskFailed("this device has lost its part of the model; its next training restores it")
    return received_parameters(model, state, state.tree or down, assignment)


def must_choose(assignment: Assignment) -> bool:
    """Return True if the device has to choose its neurons, because the server does not know any."""
    return CHAIN in assignment.values


def _build_assign(base: Algorithm) -> Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]:
    """Assign devices with a choice their share, and the others the chain by which the server checks their update."""

    def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
        chain = {CHAIN: str(state.facts[CHAIN])}
        return {
            device: msgspec.structs.replace(task, values=task.values | (fixed_share(state, device) or chain))
            for device, task in base.assign(state, cohort, allocation, number).items()
        }

    return assign


def _stored_choice(state: State, hidden: Mapping[str, int], keep: float) -> dict[str, Tensor]:
    """Return this device's earlier choice, whose update the server did not receive; empty without one."""
    if not any(key.startswith(PREFIX) for key in state.tree):
        return {}
    active = unpack(state.tree, hidden)
    return active if all(len(active[name]) == count_active(count, keep) for name, count in hidden.items()) else {}


def _choose_neurons(
    model: Model, values: Tree, merit: Merit, assignment: Assignment, epoch: Iterator[Batch], tally: Tally
) -> dict[str, Tensor]:
    """Train the whole model for an epoch and return the neurons with the highest merit."""
    layers = model.layers
    layers.load_state_dict(values, strict=False)
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    weights = dict(layers.named_parameters())
    gradients = {name: torch.zeros_like(weights[f"{name}.weight"]) for name in read_chain(model.chain).hidden}

    def gather() -> None:
        for name, total in gradients.items():
            step = weights[f"{name}.weight"].grad
            assert step is not None
            total.add_(step)

    tally.train(model, epoch, assignment.hyper, correct=gather)
    merits = {name: merit(weights[f"{name}.weight"].detach(), total) for name, total in gradients.items()}
    return select_strongest(merits, keep_share(assignment))


def check_update(assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update that does not match the neurons that a device has, or that it has just chosen.

    Raises:
        WireError: It does not match.
    """
    if not must_choose(assignment):
        server_half.check_update(assignment, down, up)
        return
    layout = Chain.parse(str(assignment.values[CHAIN]))
    active = first_neurons(layout.hidden, keep_share(assignment))
    like = extract(down, layout.index(active)) | pack(active, layout.hidden)
    if up.keys() != like.keys():
        raise WireError("a device's first update does not have the tensors of its choice", reason="unknown-tensor")
    check_like(up, like)
    if not up[next(iter(like))].is_meta:
        chosen = unpack(up, layout.hidden)
        if any(len(chosen[name]) != len(first) for name, first in active.items()):
            raise WireError("a device has chosen more or fewer neurons than its share allows", reason="shape")


def _build_absorb(base: Algorithm) -> Callable[[Mean, str, Assignment, Result], Mean]:

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        if must_choose(assignment):
            masks = {key: leaf for key, leaf in result.tree.items() if key.startswith(PREFIX)}
            mask = b"".join(masks[key].numpy().tobytes() for key in sorted(masks)).hex()
            choice: dict[str, Scalar] = {MASK + device: mask, KEPT + device: keep_share(assignment)}
            values = {key: leaf for key, leaf in result.tree.items() if key not in masks}
            mean, result = replace(mean, facts=mean.facts | choice), replace(result, tree=values)
        return base.absorb(mean, device, assignment, result)

    return absorb


def _build_aggregate(base: Algorithm) -> Callable[[State, Mean], State]:

    def aggregate(state: State, mean: Mean) -> State:
        masks = {key: fact for key, fact in mean.facts.items() if key.startswith((MASK, KEPT))}
        after = base.aggregate(state, mean)
        return State(after.tree, after.facts | masks)

    return aggregate


def _from_hex(text: str, hidden: Mapping[str, int]) -> Tree:
    masks, remaining = Tree(), bytearray.fromhex(text)
    for name in sorted(hidden):
        size = -(-hidden[name] // 8)
        masks[PREFIX + name] = torch.frombuffer(remaining[:size], dtype=torch.uint8)
        remaining = remaining[size:]
    return masks
