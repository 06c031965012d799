"""FjORD: ordered dropout, so that the common network can be cut to any of a few widths.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane. FjORD: Fair and Accurate Federated Learning under
Heterogeneous Targets with Ordered Dropout. NeurIPS 2021. https://arxiv.org/abs/2102.13451

    S_l(p) = {1, ..., floor(p n_l)}                     the network of width p is part of every wider one
    p ~ uniform {p_i <= p_max}                          a width for each batch, p_max the device's own
    w <- w - eta grad CE(f_p(x), y)
    w <- w - eta grad [CE(f_pmax(x), y) + CE(f_p(x), softmax f_pmax(x))]        with `distil`; targets have no gradient
    w[j] <- sum_k n_k w_k[j] / sum_k n_k                over the devices with p_max >= p, j in the block of width p
                                                        and in no narrower one: over those that hold it

BatchNorm's weight and bias are cut as all else is; of its statistics every width has a set of its own, since the sums
that come into a neuron differ: named `...@i` for the i-th width, the widest's as in the network itself. A device has
those of its own width in place of the common ones, and all narrower ones. It uses the part that it was given last.

FjORD's device half: networks of several widths, each the beginning of the next, that train one set of parameters.

Horvath et al., NeurIPS 2021, https://arxiv.org/abs/2102.13451; see above. A batch costs what the
network of the width drawn for it does: it is computed with slices of the parameters, in a network that is no larger.

The widths that a network is cut to, and the names of the statistics that each width has of its own.

BatchNorm's running mean and variance of a width are named `KEY@I`, I being its number; those of the widest are KEY.
Horvath et al.: FjORD, NeurIPS 2021. https://arxiv.org/abs/2102.13451
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.fedavg import require_finite_loss
from shared.algorithms.local_training import Stopping, stops_early
from shared.algorithms.subnetwork.random_dropout import parameters_in_use
from shared.algorithms.subnetwork.server_half import (
    begin,
    build_absorb,
    build_broadcast,
    keep_share,
    neurons,
    read_download,
    stored_chain,
)
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import Active, Index, build_narrowed, extract, first_neurons, read_chain
from shared.tensors import tree as trees
from shared.tensors.counts import is_at_most
from shared.tensors.sgd import descend
from shared.tensors.tree import Mean, State, Tree, check_like

MARK = "@"
STATISTICS = (".running_mean", ".running_var")

PICTURE = 4
"""Dimensions of a weight that has kernels of two."""


@dataclass(frozen=True)
class Widths:
    """Shares of every layer's neurons.

    Attributes:
        shares: Ascending to 1.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what are no widths.

        Raises:
            ValueError: They are none.
        """
        if list(self.shares) != sorted(set(self.shares)) or not self.shares or self.shares[-1] != 1:
            raise ValueError("widths must ascend to 1")
        if not 0 < self.shares[0] < math.inf:
            raise ValueError("widths must be above 0")

    def up_to(self, share: float) -> int:
        """Return the number of the largest width up to a share; the smallest one's where there is none."""
        return max((width for width, one in enumerate(self.shares) if is_at_most(one, share)), default=0)

    def is_last(self, width: int) -> bool:
        """Tell whether a width is that of the whole network."""
        return width == len(self.shares) - 1

    def named(self, key: str, width: int) -> str:
        """Return the name that a statistic has at a width."""
        return key if self.is_last(width) else f"{key}{MARK}{width}"

    def parted(self, tree: Tree) -> tuple[Tree, Tree]:
        """Return what has the names of the whole network's leaves, and what belongs to one narrower width alone."""
        of_one = {key: leaf for key, leaf in tree.items() if MARK in key}
        return {key: leaf for key, leaf in tree.items() if key not in of_one}, of_one

    def cut(self, tree: Tree, width: int) -> Tree:
        """Return what a network of one width is made of, by the network's own names."""
        common = {key: leaf for key, leaf in tree.items() if not is_statistic(key)}
        names = {key.partition(MARK)[0] for key in tree if is_statistic(key)}
        return common | {key: tree[self.named(key, width)] for key in sorted(names)}


def is_statistic(key: str) -> bool:
    """Tell whether a leaf is a running mean or variance, of any width."""
    return key.partition(MARK)[0].endswith(STATISTICS)


def parse_widths(text: str) -> Widths:
    """Read widths with commas between them.

    Raises:
        ValueError: They are no ascending numbers.
    """
    if not isinstance(text, str):
        raise ValueError(f'widths must be a text such as "0.5,1", not {text!r}')  # noqa: TRY004
    return Widths(tuple(float(one) for one in text.split(",")))


@dataclass(frozen=True)
class Nested:
    """Parameters of one width, and the networks that are made of them.

    Attributes:
        leaves: As they came: parameters of the widest that is here, statistics of all that are here.
        layers: Network by network, up to the widest.
        indices: Of each, which rows and columns it has; these are always the first.
    """

    every: Widths
    leaves: Tree
    layers: tuple[nn.Sequential, ...]
    indices: tuple[Index, ...]

    @classmethod
    def received(cls, model: Model, down: Tree, every: Widths, own: int) -> Nested:
        """Read what came for a device of a width.

        Raises:
            WireError: It is not that.
        """
        layout = read_chain(model.layers)
        active = [first_neurons(layout.hidden, share) for share in every.shares[: own + 1]]
        indices = tuple(layout.index(one) for one in active)
        names = [key for key in layout.leaves if is_statistic(key)]
        wanted = {every.named(key, width): (key, width) for width in range(own + 1) for key in names}
        if {key for key in down if is_statistic(key)} != wanted.keys():
            raise WireError("statistics came that are not those of the device's widths", reason="unknown-tensor")
        _, _, values = read_download(model, every.cut(down, own))
        like = {name: _corner(values[key], *indices[width][key]) for name, (key, width) in wanted.items()}
        check_like({name: down[name] for name in wanted}, like)
        leaves = {key: _laid(values[key]).requires_grad_() for key in layout.leaves if not is_statistic(key)}
        leaves |= {name: down[name].clone() for name in wanted}
        return cls(every, leaves, tuple(build_narrowed(model.layers, one) for one in active), indices)

    @property
    def own(self) -> int:
        """Number of the widest that is here."""
        return len(self.layers) - 1

    def part(self, width: int) -> Tree:
        """Return what a network of one width is made of: views."""
        index, tree = self.indices[width], self.every.cut(self.leaves, width)
        return {key: _corner(leaf, *index[key]) for key, leaf in tree.items()}

    def __call__(self, width: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B, classes) of one network in training mode."""
        outputs: Tensor = functional_call(self.layers[width], self.part(width), (inputs,))
        return outputs

    def train(self, batches: Batches, told: Assignment, *, distil: bool) -> float | None:
        """Train a width drawn for each batch; return the mean loss, None without a batch.

        With `distil`, that of the widest, which each batch trains as well.

        Args:
            distil: Whether narrow networks learn from the widest.
        """
        generator = torch.Generator().manual_seed(told.seed)
        weights = [(key, leaf) for key, leaf in self.leaves.items() if leaf.requires_grad]
        momenta, seen, loss_sum = Tree(), 0, 0.0
        for step, (inputs, labels) in enumerate(batches, start=1):
            width = int(torch.randint(len(self.layers), (), generator=generator))
            targets, said = labels, None
            if distil:
                outputs = self(self.own, inputs)
                said = functional.cross_entropy(outputs, labels)
                said.backward()
                targets = outputs.detach().softmax(1)
            loss = functional.cross_entropy(self(width, inputs), targets)
            loss.backward()
            descend(weights, momenta, told.hyper)
            seen += len(labels)
            loss_sum += require_finite_loss((loss if said is None else said).item(), step) * len(labels)
        return loss_sum / seen if seen else None


def _laid(leaf: Tensor) -> Tensor:
    """Return a copy as convolutions read it: a pixel's channels side by side."""
    return leaf.clone(memory_format=torch.channels_last if leaf.ndim == PICTURE else torch.contiguous_format)


def _corner(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return the first rows and columns of a leaf, as many as are given."""
    leaf = leaf if rows is None else leaf[: len(rows)]
    return leaf if columns is None else leaf[:, : len(columns)]


@stops_early
def fjord(
    keep: float = 1.0, *, widths: str = "0.2,0.4,0.6,0.8,1", distil: bool = False, stopping: Stopping
) -> Algorithm:
    """Build the algorithm.

    Args:
        keep: Share of the neurons for devices of which the resource optimizer says nothing, in (0, 1]; p_max is the
            largest of the widths up to a device's share, or the smallest there is.
        widths: p_i, ascending to 1, with commas between them.
        distil: Whether each batch also trains the width p_max, whose outputs are then the targets of p.
        stopping: When devices leave for good.

    Raises:
        ValueError: An option is out of its range.
    """
    every = parse_widths(widths)

    def local(model: Model, state: State, down: Tree, batches: Batches, told: Assignment) -> Outcome:
        """Device half: train networks of all widths up to its own, send what they share."""
        nested = Nested.received(model, down, every, every.up_to(keep_share(told)))
        loss = nested.train(batches, told, distil=distil)
        layers, part = nested.layers[-1], nested.part(nested.own)
        facts, metrics = stopping.judge(state.facts, loss, layers, part, batches.validation)
        up, count = {key: leaf.detach() for key, leaf in nested.leaves.items()}, batches.num_examples
        return State(facts=facts), Result(up, float(count), count, loss, metrics=metrics)

    return replace(
        neurons(local, partial(first, every), keep=keep, step_share=partial(_step_share, every, distil=distil)),
        init=partial(_init, every),
        broadcast=partial(_broadcast, every),
        absorb=partial(_absorb, every),
        personal=Personal(partial(_used, every)),
    )


def first(every: Widths, state: State, _device: str, assignment: Assignment) -> Active:
    """Return the neurons of a device's own width."""
    return first_neurons(stored_chain(state.facts).hidden, every.shares[every.up_to(keep_share(assignment))])


def _init(every: Widths, model: Model, seed: int) -> State:
    """Begin the statistics of every width as the network's own."""
    state, layout = begin(model, seed), read_chain(model.layers)
    more = Tree()
    for width, share in enumerate(every.shares[:-1]):
        part = extract(state.tree, layout.index(first_neurons(layout.hidden, share)))
        more |= {every.named(key, width): leaf for key, leaf in part.items() if is_statistic(key)}
    return State(state.tree | more, state.facts)


def _broadcast(every: Widths, state: State, device: str, assignment: Assignment) -> Tree:
    """Return the part of a device's own width, with the statistics of all widths up to it."""
    common = build_broadcast(partial(first, every))(state, device, assignment)
    down = {key: leaf for key, leaf in common.items() if not is_statistic(key)}
    for width in range(every.up_to(keep_share(assignment)) + 1):
        source = common if every.is_last(width) else state.tree
        down |= {name: source[name] for key in common if is_statistic(key) for name in [every.named(key, width)]}
    return down


def _absorb(every: Widths, mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
    """Add an update: a width's statistics are averaged over the devices that have it."""
    common, of_one = every.parted(result.tree)
    covered, covered_of_one = every.parted(result.coverage)
    mean = build_absorb(partial(first, every))(mean, device, assignment, replace(result, tree=common, coverage=covered))
    return trees.accumulate(mean, of_one, result.weight, covered_of_one)


def _step_share(every: Widths, _model: Model, told: Assignment, *, distil: bool) -> float:
    """Return how much of a step is left: p^2 in the mean of the widths drawn, and of the widest to distil from."""
    shares = every.shares[: every.up_to(keep_share(told)) + 1]
    return sum(share**2 for share in shares) / len(shares) + (shares[-1] ** 2 if distil else 0.0)


def _used(every: Widths, model: Model, state: State, down: Tree, assignment: Assignment) -> Tree:
    """Return the network of a device's own width, as it was given it."""
    return every.cut(parameters_in_use(model, state, down, assignment), every.up_to(keep_share(assignment)))
