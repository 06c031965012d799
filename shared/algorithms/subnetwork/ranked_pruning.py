"""Ranked pruning: each device prunes the common model once, by its local data.

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
from shared.algorithms.local_training import Tally, epochs
from shared.algorithms.personal_model import require_finite
from shared.algorithms.subnetwork import server_half
from shared.algorithms.subnetwork.neuron_ranking import Merit, select_strongest
from shared.algorithms.subnetwork.random_dropout import build_smaller, parameters_in_use, train_what_came
from shared.algorithms.subnetwork.server_half import CHAIN, KEEP, keep_share, read_download, stored_chain
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Scalar
from shared.subnetworks.neurons import (
    PREFIX,
    Active,
    Chain,
    all_neurons,
    count_kept,
    extract,
    first_neurons,
    pack,
    read_chain,
    unpack,
)
from shared.tensors.tree import Mean, State, Tree, check_like

MASK, KEPT = "mask/", "kept/"
"""What the server remembers of a device: its bitmaps, as hexadecimal digits, and of which share they are."""


def build_ranked(merit: Merit, stopping: Stopping, *, keep: float) -> Algorithm:
    """Build the algorithm by which neurons matter; for its options see `fedspu`.

    Args:
        merit: How much a neuron matters, of its weights and their gradients.
        stopping: When a device stops.
        keep: Share of neurons where the server does not say.
    """

    def local(model: Model, state: State, down: Tree, batches: Batches, told: Assignment) -> Outcome:
        """Device half: choose, at first; train the part, send it, keep it."""
        active, index, values = read_download(model, down)
        layout, tally, passes, marks = read_chain(model.layers), Tally(), epochs(batches), Tree()
        if chooses(told):
            active = _chosen(state, layout.hidden, keep_share(told))
            if not active:
                active = _choose(model, values, merit, told, next(passes, iter(())), tally)
                values = model.tree()
            index, marks = layout.index(active), pack(active, layout.hidden)
            values = extract(values, index)
        layers = build_smaller(model, active, values)
        tally.train(layers, list(layers.named_parameters()), following.from_iterable(passes), told.hyper)
        trained = dict(layers.state_dict())
        require_finite(trained)
        facts, metrics = stopping.judge(state.facts, tally.mean, layers, trained, batches.validation)
        part, count = {key: trained[key].contiguous() for key in index}, batches.num_examples
        own = State(part | pack(active, layout.hidden), facts)
        return own, Result(part | marks, float(count), count, tally.mean, metrics=metrics)

    built = server_half.neurons(local, chosen_neurons, keep=keep)
    return replace(
        built,
        assign=_build_assign(built),
        absorb=_build_absorb(built),
        aggregate=_build_aggregate(built),
        check_update=check_update,
        personal=Personal(
            _used, lambda state, device, told: built.broadcast(state, device, told) if chooses(told) else {}
        ),
        resources=replace(
            built.resources,
            step_share=_step_share,
            timed_step=partial(train_what_came, Stopping()),
            fixed_values=settled_share,
        ),
    )


def _step_share(model: Model, told: Assignment) -> float:
    """Return how much of a step is left; of a device's first task, which chooses, an epoch is of the whole network."""
    left, many = server_half.smaller_step(model, told), told.hyper.local_epochs
    return (1 + (many - 1) * left) / many if chooses(told) else left


def chosen_neurons(state: State, device: str, _assignment: Assignment) -> Active:
    """Return the neurons that a device has chosen; all of them before it did."""
    return _remembered(state, device, stored_chain(state.facts).hidden)


def _remembered(state: State, device: str, hidden: Mapping[str, int]) -> Active:
    mask = state.facts.get(MASK + device)
    return all_neurons(hidden) if mask is None else unpack(_from_hex(str(mask), hidden), hidden)


def settled_share(state: State, device: str) -> dict[str, float]:
    """Return the share of the neurons that a device has chosen, as `keep`; nothing before it did.

    Of a run begun before shares were remembered, the least share that has as many neurons.
    """
    if MASK + device not in state.facts:
        return {}
    if (kept := state.facts.get(KEPT + device)) is not None:
        return {KEEP: float(kept)}
    layout = stored_chain(state.facts)
    active = _remembered(state, device, layout.hidden)
    shares = [(len(active[name]), len(active[name]) / count) for name, count in layout.hidden.items()]
    return {KEEP: max([share for held, share in shares if held > 1] or [min(share for _, share in shares)])}


def _used(model: Model, state: State, down: Tree, told: Assignment) -> Tree:
    """Return a device's part as it left it; what came, where it has none yet.

    Raises:
        TaskFailed: It had one.
    """
    if not state.tree and not down:
        raise TaskFailed("this device has lost its part of the model; its next training brings it back")
    return parameters_in_use(model, state, state.tree or down, told)


def chooses(assignment: Assignment) -> bool:
    """Tell whether a device is to choose its neurons, since the server does not know of any."""
    return CHAIN in assignment.values


def _build_assign(built: Algorithm) -> Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]:
    """Tell those who have chosen what they keep; send the others along by what their update will be checked."""

    def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
        chain = {CHAIN: str(state.facts[CHAIN])}
        return {
            device: msgspec.structs.replace(one, values=one.values | (settled_share(state, device) or chain))
            for device, one in built.assign(state, cohort, allocation, number).items()
        }

    return assign


def _chosen(state: State, hidden: Mapping[str, int], keep: float) -> dict[str, Tensor]:
    """Return what this device chose before, where the server has not heard of it; nothing where it did not."""
    if not any(key.startswith(PREFIX) for key in state.tree):
        return {}
    active = unpack(state.tree, hidden)
    return active if all(len(active[name]) == count_kept(count, keep) for name, count in hidden.items()) else {}


def _choose(
    model: Model, values: Tree, merit: Merit, told: Assignment, epoch: Iterator[Batch], tally: Tally
) -> dict[str, Tensor]:
    """Train the whole model for an epoch and return the neurons that matter most to it."""
    layers = model.layers
    layers.load_state_dict(values, strict=False)
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    weights = dict(layers.named_parameters())
    gradients = {name: torch.zeros_like(weights[f"{name}.weight"]) for name in read_chain(layers).hidden}

    def gather() -> None:
        for name, total in gradients.items():
            step = weights[f"{name}.weight"].grad
            assert step is not None
            total.add_(step)

    tally.train(layers, list(weights.items()), epoch, told.hyper, gather)
    merits = {name: merit(weights[f"{name}.weight"].detach(), total) for name, total in gradients.items()}
    return select_strongest(merits, keep_share(told))


def check_update(assignment: Assignment, down: Tree, up: Tree) -> None:
    """Refuse what does not belong to the neurons that a device has, or says to have chosen.

    Raises:
        WireError: It does not.
    """
    if not chooses(assignment):
        server_half.check_update(assignment, down, up)
        return
    layout = Chain.parse(str(assignment.values[CHAIN]))
    active = first_neurons(layout.hidden, keep_share(assignment))
    like = extract(down, layout.index(active)) | pack(active, layout.hidden)
    if up.keys() != like.keys():
        raise WireError("a device's first update has not the tensors of its choice", reason="unknown-tensor")
    check_like(up, like)
    if not up[next(iter(like))].is_meta:
        chosen = unpack(up, layout.hidden)
        if any(len(chosen[name]) != len(first) for name, first in active.items()):
            raise WireError("a device has chosen more or fewer neurons than its share is", reason="shape")


def _build_absorb(built: Algorithm) -> Callable[[Mean, str, Assignment, Result], Mean]:
    """Take a device's choice from its first update, before its values."""

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        if chooses(assignment):
            masks = {key: leaf for key, leaf in result.tree.items() if key.startswith(PREFIX)}
            told: dict[str, Scalar] = {MASK + device: _to_hex(masks), KEPT + device: keep_share(assignment)}
            values = {key: leaf for key, leaf in result.tree.items() if key not in masks}
            mean, result = replace(mean, facts=mean.facts | told), replace(result, tree=values)
        return built.absorb(mean, device, assignment, result)

    return absorb


def _build_aggregate(built: Algorithm) -> Callable[[State, Mean], State]:
    """Remember what devices have chosen."""

    def aggregate(state: State, mean: Mean) -> State:
        masks = {key: fact for key, fact in mean.facts.items() if key.startswith((MASK, KEPT))}
        after = built.aggregate(state, mean)
        return State(after.tree, after.facts | masks)

    return aggregate


def _to_hex(masks: Tree) -> str:
    """Return bitmaps, in order of name, as hexadecimal digits."""
    return b"".join(masks[key].numpy().tobytes() for key in sorted(masks)).hex()


def _from_hex(text: str, hidden: Mapping[str, int]) -> Tree:
    """Read what `_to_hex` wrote."""
    masks, left = Tree(), bytearray.fromhex(text)
    for name in sorted(hidden):
        size = -(-hidden[name] // 8)
        masks[PREFIX + name] = torch.frombuffer(left[:size], dtype=torch.uint8)
        left = left[size:]
    return masks
