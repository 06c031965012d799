"""FjORD: ordered dropout, with the common network cut to a few widths.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane. FjORD: Fair and Accurate Federated Learning under
Heterogeneous Targets with Ordered Dropout. NeurIPS 2021. https://arxiv.org/abs/2102.13451

    S_l(p) = {1, ..., floor(p n_l)}                     the network of width p is part of every wider one
    p ~ uniform {p_i <= p_max}                          a width for each batch, p_max the device's largest
    w <- w - eta grad CE(f_p(x), y)
    w <- w - eta grad [CE(f_pmax(x), y) + CE(f_p(x), softmax f_pmax(x))]        with `distil`; targets have no gradient
    w[j] <- sum_k n_k w_k[j] / sum_k n_k                over the devices with p_max >= p, j in the block of width p
                                                        and in no narrower one: over those that hold it

BatchNorm's weight and bias are cut like all other parameters. Each width has its own running statistics, since the
sums that come into a neuron differ: named `...@i` for the i-th width, the widest's as in the network itself. A device
gets the statistics of its own width in place of the common ones, and those of all narrower widths. It is evaluated
with the parameters that it received last.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.subnetwork.fjord_device import Nested
from shared.algorithms.subnetwork.fjord_widths import Widths, is_batchnorm_statistic, parse_widths
from shared.algorithms.subnetwork.random_dropout import received_parameters
from shared.algorithms.subnetwork.server_half import (
    begin,
    build_absorb,
    build_algorithm,
    build_broadcast,
    keep_share,
    stored_chain,
)
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import Active, extract, first_neurons, read_chain
from shared.tensors import tree as trees
from shared.tensors.tree import Mean, State, Tree


@stops_early
def fjord(
    keep: float = 1.0, *, widths: str = "0.2,0.4,0.6,0.8,1", distil: bool = False, stopping: Stopping
) -> Algorithm:
    """Build the algorithm.

    Args:
        keep: Share of the neurons for devices without a share from the resource optimizer, in (0, 1]; p_max is the
            largest of the widths up to a device's share, or the smallest of all.
        widths: p_i, ascending to 1, separated by commas.
        distil: Whether each batch also trains the width p_max, whose outputs are then the targets of p.
        stopping: When devices leave for good.

    Raises:
        ValueError: An option is out of its range.
    """
    every = parse_widths(widths)

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: train networks of all widths up to the device's own, send their common parameters."""
        nested = Nested.from_download(model, down, every, every.largest_within(keep_share(assignment)))
        loss = nested.train(batches, assignment, distil=distil)
        layers, part = nested.layers[-1], nested.part(nested.widest)
        facts, metrics = stopping.judge(state.facts, loss, replace(model, layers=layers), part, batches.validation)
        up, count = {key: leaf.detach() for key, leaf in nested.leaves.items()}, batches.num_examples
        return State(facts=facts), Result(up, float(count), count, loss, metrics=metrics)

    return replace(
        build_algorithm(
            local, partial(choose_width, every), keep=keep, step_share=partial(_step_share, every, distil=distil)
        ),
        init=partial(_init, every),
        broadcast=partial(_broadcast, every),
        absorb=partial(_absorb, every),
        personal=Personal(partial(_parameters_in_use, every)),
    )


def choose_width(every: Widths, state: State, _device: str, assignment: Assignment) -> Active:
    """Return the neurons of a device's width."""
    return first_neurons(stored_chain(state.facts).hidden, every.shares[every.largest_within(keep_share(assignment))])


def _init(every: Widths, model: Model, seed: int) -> State:
    state, layout = begin(model, seed), read_chain(model.chain)
    more = Tree()
    for width, share in enumerate(every.shares[:-1]):
        part = extract(state.tree, layout.index(first_neurons(layout.hidden, share)))
        more |= {every.statistic_name(key, width): leaf for key, leaf in part.items() if is_batchnorm_statistic(key)}
    return State(state.tree | more, state.facts)


def _broadcast(every: Widths, state: State, device: str, assignment: Assignment) -> Tree:
    common = build_broadcast(partial(choose_width, every))(state, device, assignment)
    down = {key: leaf for key, leaf in common.items() if not is_batchnorm_statistic(key)}
    for width in range(every.largest_within(keep_share(assignment)) + 1):
        source = common if every.is_full_width(width) else state.tree
        down |= {
            name: source[name]
            for key in common
            if is_batchnorm_statistic(key)
            for name in [every.statistic_name(key, width)]
        }
    return down


def _absorb(every: Widths, mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
    common, narrow = every.separate_statistics(result.tree)
    covered, covered_narrow = every.separate_statistics(result.coverage)
    mean = build_absorb(partial(choose_width, every))(
        mean, device, assignment, replace(result, tree=common, coverage=covered)
    )
    return trees.accumulate(mean, narrow, result.weight, covered_narrow)


def _step_share(every: Widths, _model: Model, assignment: Assignment, *, distil: bool) -> float:
    """Return the relative cost of a step: p^2 averaged over the widths, plus p_max^2 for the pass to distil from."""
    shares = every.shares[: every.largest_within(keep_share(assignment)) + 1]
    return sum(share**2 for share in shares) / len(shares) + (shares[-1] ** 2 if distil else 0.0)


def _parameters_in_use(every: Widths, model: Model, state: State, down: Tree, assignment: Assignment) -> Tree:
    return every.cut(received_parameters(model, state, down, assignment), every.largest_within(keep_share(assignment)))
