"""The device half of FedMatch: psi alone learns, from what device and helpers agree on, and stays close to sigma.

W. Jeong et al., ICLR 2021, https://arxiv.org/abs/2006.12097; see `fedmatch` for the equations. No label is looked at,
and no helper is asked: what comes are their parameters, which pass the device's own examples here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional

from shared.algorithms.base import Batches, Outcome, Result
from shared.algorithms.semisupervised.full_model.fedmatch_weights import (
    HELPER,
    PSI,
    PSI_VALUES,
    SIGMA,
    FedmatchSettings,
    pack_changes,
    summed,
    unpack_changes,
    without_small,
)
from shared.algorithms.semisupervised.full_model.network_steps import (
    Descent,
    Objective,
    require_examples,
    unlabelled_views,
)
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import CONSISTENCY
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree, check_like, subtract

AGREEMENT, SPARSITY, CLOSENESS = (f"{name}_loss" for name in ("agreement", "sparsity", "closeness"))
"""Among the metrics of an update, with `CONSISTENCY`: what the mean loss is the sum of."""
CHANGED = "changed_entries"
"""Among the metrics of an update: which share of psi's entries travels."""


def agreed_labels(votes: Sequence[Tensor]) -> Tensor:
    """Return the class that most of several networks take each example for, int64 of shape (B,); of equals the lowest.

    Args:
        votes: Outputs of each, of shape (B, classes).
    """
    cast = (functional.one_hot(one.argmax(1), one.shape[1]) for one in votes)
    return torch.stack([*cast]).sum(0).argmax(1)


def disagreement(outputs: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return 1/H sum_h KL(p_h || p), a mean over the batch, in nats.

    Args:
        outputs: The device's own, before softmax, of shape (B, classes).
        others: Those of the helpers, at least one.
    """
    own = outputs.log_softmax(1)
    each = [functional.kl_div(own, other.softmax(1), reduction="batchmean") for other in others]
    return torch.stack(each).mean()


@dataclass(frozen=True)
class Received:
    """What comes down.

    Attributes:
        sigma: Trained leaves by name, in the order of names.
        psi: Of shape (N,).
        others: Running statistics, and parameters that are not trained.
        helpers: psi of each helper.
    """

    sigma: Tree
    psi: Tensor
    others: Tree
    helpers: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: Model, start: Tree) -> Received:
        """Read the leaves that came.

        Raises:
            WireError: They are not those of this network.
        """
        trained = {name: leaf for name, leaf in sorted(model.layers.named_parameters()) if leaf.requires_grad}
        others = {name: leaf for name, leaf in model.layers.state_dict().items() if name not in trained}
        count = sum(leaf.numel() for leaf in trained.values())
        like = {SIGMA + name: leaf for name, leaf in trained.items()} | others
        like[PSI_VALUES] = torch.empty(count, dtype=next(iter(trained.values())).dtype, device="meta")
        if missing := sorted(like.keys() - start.keys()):
            raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
        check_like({name: leaf for name, leaf in start.items() if not name.startswith(HELPER)}, like)
        psi = start[PSI_VALUES]
        places = sorted({name.split("/")[1] for name in start if name.startswith(HELPER)})
        helpers = tuple(psi + unpack_changes(start, f"{HELPER}{place}/", psi) for place in places)
        return cls(
            {name: start[SIGMA + name] for name in trained}, psi, {name: start[name] for name in others}, helpers
        )


@dataclass
class LocalPsi:
    """psi on its device, with all that it learns from.

    Attributes:
        came: What came down; not changed.
        psi: What is trained, of shape (N,).
        statistics: Running statistics, which training passes change in place.
    """

    settings: FedmatchSettings
    model: Model
    came: Received
    psi: Tensor
    statistics: Tree

    @classmethod
    def begin(cls, settings: FedmatchSettings, model: Model, came: Received) -> LocalPsi:
        """Return it as it came."""
        statistics = {name: leaf.clone() for name, leaf in came.others.items()}
        return cls(settings, model, came, came.psi.clone().requires_grad_(), statistics)

    def predict(self, theta: Tree, inputs: Tensor) -> Tensor:
        """Return a network's outputs in evaluation mode, of shape (B, classes)."""
        leaves = {**theta, **{name: leaf.clone() for name, leaf in self.statistics.items()}}
        return run_part(self.model, self.model.layers, leaves, inputs, train=False)

    def objective(self, inputs: Tensor, strong: Tensor) -> Objective:
        """Return the objective of a batch over lambda_s, and of how many examples the device is sure.

        Args:
            inputs: Examples as they are, of shape (B, ...).
        """
        own, sigma = self.settings, self.came.sigma
        theta = summed(sigma, self.psi)
        with torch.set_grad_enabled(bool(self.came.helpers)):
            outputs = self.predict(theta, inputs)
        places = (outputs.detach().softmax(1).amax(1) >= own.threshold).nonzero().flatten()
        flat = torch.cat([leaf.flatten() for leaf in sigma.values()])
        terms = {
            SPARSITY: own.sparsity_weight * self.psi.abs().sum(),
            CLOSENESS: own.closeness_weight * (flat - self.psi).square().sum(),
        }
        if len(places):
            with torch.no_grad():
                others = [self.predict(summed(sigma, helper), inputs[places]) for helper in self.came.helpers]
            labels = agreed_labels([outputs.detach()[places], *others])
            leaves = {**theta, **self.statistics}
            hard = run_part(self.model, self.model.layers, leaves, strong, train=True)[places]
            terms[AGREEMENT] = own.agreement_weight * functional.cross_entropy(hard, labels)
            if others:
                terms[CONSISTENCY] = own.consistency_weight * disagreement(outputs[places], others)
        told = {name: term.item() / own.supervised_weight for name, term in terms.items()}
        nothing = dict.fromkeys((CONSISTENCY, AGREEMENT), 0.0)  # of a batch of which the device is sure of nothing
        loss = reduce(add, terms.values()) / own.supervised_weight
        return Objective(loss, len(inputs), nothing | told, len(places))

    def moved(self) -> Tree:
        """Return what travels: changes of psi's entries, and of running statistics."""
        least = self.settings.least_value
        changes = without_small(self.psi.detach(), least) - self.came.psi
        return pack_changes(changes, self.settings.least_change, PSI) | subtract(self.statistics, self.came.others)


def local(
    settings: FedmatchSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. Labels, if the batches had any, are not looked at.

    Raises:
        TaskFailed: There are no examples, or the training has diverged.
        WireError: The server sent other parameters.
    """
    require_examples(batches)
    here = LocalPsi.begin(settings, model, Received.of(model, start))
    views = unlabelled_views(settings, batches, assignment, "strong")
    descent = Descent([("psi", here.psi)], assignment.hyper, settings.nesterov)
    taken = descent.take(here.objective(inputs, strong) for inputs, (strong,) in views)
    moved = here.moved()
    metrics = {CHANGED: moved[PSI_VALUES].numel() / here.psi.numel(), **taken.terms}
    if taken.examples:
        metrics["sure_labels"] = taken.sure / taken.examples
    return state, Result(moved, 1.0, batches.num_examples, taken.loss, metrics=metrics)
