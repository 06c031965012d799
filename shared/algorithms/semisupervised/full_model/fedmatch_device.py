"""Device half of FedMatch: train psi on labels agreed with helpers.

W. Jeong et al., ICLR 2021, https://arxiv.org/abs/2006.12097; see `fedmatch` for the equations. No label is read, and no
helper is contacted: the device receives their parameters and passes its examples through them.
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
    add_psi,
    pack_changes,
    unpack_changes,
    without_small,
)
from shared.algorithms.semisupervised.full_model.network_steps import (
    Descent,
    StepLoss,
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
"""Metrics of an update: terms of the mean loss, together with `CONSISTENCY`."""
CHANGED = "changed_entries"
"""Metric of an update: share of psi's entries that travel."""


def agreed_labels(votes: Sequence[Tensor]) -> Tensor:
    """Return the majority class of several networks for each example, int64 of shape (B,); the lowest in a tie.

    Args:
        votes: Outputs of each network, of shape (B, classes).
    """
    ballots = (functional.one_hot(outputs.argmax(1), outputs.shape[1]) for outputs in votes)
    return torch.stack([*ballots]).sum(0).argmax(1)


def disagreement(outputs: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return 1/H sum_h KL(p_h || p), a mean over the batch, in nats.

    Args:
        outputs: The device's, before softmax, of shape (B, classes).
        others: Those of the helpers, at least one.
    """
    log_shares = outputs.log_softmax(1)
    each = [functional.kl_div(log_shares, other.softmax(1), reduction="batchmean") for other in others]
    return torch.stack(each).mean()


@dataclass(frozen=True)
class Received:
    """Download of a device.

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
        """Read the received leaves.

        Raises:
            WireError: They are not those of this network.
        """
        trained = {name: leaf for name, leaf in sorted(model.layers.named_parameters()) if leaf.requires_grad}
        others = {name: leaf for name, leaf in model.tree().items() if name not in trained}
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
    """Training state of psi on a device.

    Attributes:
        download: Received leaves; not changed.
        psi: Trained vector, of shape (N,).
        statistics: Running statistics, which training passes change in place.
    """

    settings: FedmatchSettings
    model: Model
    download: Received
    psi: Tensor
    statistics: Tree

    @classmethod
    def begin(cls, settings: FedmatchSettings, model: Model, download: Received) -> LocalPsi:
        """Start from the received psi and statistics."""
        statistics = {name: leaf.clone() for name, leaf in download.others.items()}
        return cls(settings, model, download, download.psi.clone().requires_grad_(), statistics)

    def predict(self, theta: Tree, inputs: Tensor) -> Tensor:
        """Return a network's outputs in evaluation mode, of shape (B, classes)."""
        leaves = {**theta, **{name: leaf.clone() for name, leaf in self.statistics.items()}}
        return run_part(self.model, self.model.layers, leaves, inputs, train=False)

    def objective(self, inputs: Tensor, strong: Tensor) -> StepLoss:
        """Return the objective of a batch divided by lambda_s, and the number of confident examples.

        Args:
            inputs: Examples without augmentation, of shape (B, ...).
            strong: A view of the same examples.
        """
        settings, sigma = self.settings, self.download.sigma
        theta = add_psi(sigma, self.psi)
        with torch.set_grad_enabled(bool(self.download.helpers)):
            outputs = self.predict(theta, inputs)
        places = (outputs.detach().softmax(1).amax(1) >= settings.threshold).nonzero().flatten()
        flat = torch.cat([leaf.flatten() for leaf in sigma.values()])
        terms = {
            SPARSITY: settings.sparsity_weight * self.psi.abs().sum(),
            CLOSENESS: settings.closeness_weight * (flat - self.psi).square().sum(),
        }
        if len(places):
            with torch.no_grad():
                others = [self.predict(add_psi(sigma, helper), inputs[places]) for helper in self.download.helpers]
            labels = agreed_labels([outputs.detach()[places], *others])
            leaves = {**theta, **self.statistics}
            hard = run_part(self.model, self.model.layers, leaves, strong, train=True)[places]
            terms[AGREEMENT] = settings.agreement_weight * functional.cross_entropy(hard, labels)
            if others:
                terms[CONSISTENCY] = settings.consistency_weight * disagreement(outputs[places], others)
        values = {name: term.item() / settings.supervised_weight for name, term in terms.items()}
        nothing = dict.fromkeys((CONSISTENCY, AGREEMENT), 0.0)  # of a batch without confident examples
        loss = reduce(add, terms.values()) / settings.supervised_weight
        return StepLoss(loss, len(inputs), nothing | values, len(places))

    def changes(self) -> Tree:
        """Return the tensors of the update: changes of psi's entries, and of running statistics."""
        least = self.settings.least_value
        changes = without_small(self.psi.detach(), least) - self.download.psi
        return pack_changes(changes, self.settings.least_change, PSI) | subtract(self.statistics, self.download.others)


def local(
    settings: FedmatchSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. Labels are not read.

    Raises:
        TaskFailed: There are no examples, or the training has diverged.
        WireError: The server sent other parameters.
    """
    require_examples(batches)
    training = LocalPsi.begin(settings, model, Received.of(model, start))
    views = unlabelled_views(settings, batches, assignment, "strong")
    descent = Descent([("psi", training.psi)], assignment.hyper, settings.nesterov)
    summary = descent.take(training.objective(inputs, strong) for inputs, (strong,) in views)
    update = training.changes()
    metrics = {CHANGED: update[PSI_VALUES].numel() / training.psi.numel(), **summary.terms}
    if summary.examples:
        metrics["sure_labels"] = summary.sure / summary.examples
    return state, Result(update, 1.0, batches.num_examples, summary.loss, metrics=metrics)
