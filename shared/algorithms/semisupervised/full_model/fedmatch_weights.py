"""What both halves of FedMatch agree on: its settings, weights that are the sum of two parts, and how they travel.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang. Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint
Learning, ICLR 2021, https://arxiv.org/abs/2006.12097; the defaults are those of their code,
https://github.com/wyjeong/FedMatch. Of the two parts sigma is a tree, and psi one vector of shape (N,), all leaves' one
after the other in the order of their names. Of a vector that is known on the other side, only what has changed by more
than `least_change` travels, as in `sparse_update`: those changes, and which entries they are of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.algorithms.personal.sparse_update import INDEX, MASK, VALUES, pack_sparse, unpack_sparse, view_shaped
from shared.algorithms.semisupervised.settings import SteppedSettings, prefixed, select
from shared.errors import ConfigError, WireError
from shared.protocol.messages import Hyper
from shared.tensors import bits
from shared.tensors.tree import Tree, check_like

SIGMA, PSI, HELPER, LAST = "sigma/", "psi/", "helper/", "last/"
"""What leaves begin with: of the sum's parts; of a helper's psi, on its way down; of a device's psi that the server
keeps. Running statistics, and parameters that are not trained, have their own names."""
PSI_VALUES = PSI + VALUES
"""All of psi: a leaf of the server's state, and of what goes down."""


@dataclass(frozen=True, kw_only=True)
class FedmatchSettings(SteppedSettings):
    """FedMatch's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        helpers: H, devices whose predictions a device compares its own with; 0 for none.
        helper_period: Every how many rounds devices are sent helpers, those nearest to them.
        supervised_weight: lambda_s of the labels' cross-entropy, by which the whole objective is divided, so that
            `learning_rate` is that of this cross-entropy.
        consistency_weight: lambda_ICCS of the divergence from helpers' predictions.
        agreement_weight: Of the cross-entropy of strong views with the labels that device and helpers agree on.
        sparsity_weight: lambda_L1 of psi's absolute values.
        closeness_weight: lambda_L2 of the squares of sigma - psi.
        psi_share: Of sigma, what psi is at first.
        least_value: Entries of psi no larger than this are taken for zero when it is sent, tested or served.
        least_change: Entries that have changed no more than this do not travel.
    """

    threshold: float = 0.75
    helpers: int = 2
    helper_period: int = 10
    supervised_weight: float = 10.0
    consistency_weight: float = 0.01
    agreement_weight: float = 0.01
    sparsity_weight: float = 1e-5
    closeness_weight: float = 10.0
    psi_share: float = 0.2
    least_value: float = 1e-5
    least_change: float = 1e-5

    def __post_init__(self) -> None:
        """Refuse what is no such method.

        Raises:
            ValueError: A setting is out of range, or unknown.
        """
        super().__post_init__()
        if self.helpers < 0 or self.helper_period < 1:
            raise ValueError("helpers must be >= 0, helper_period >= 1")
        if not 0 < self.supervised_weight < math.inf:
            raise ValueError(f"supervised_weight must be above 0 and finite, not {self.supervised_weight}")
        weights = ("consistency_weight", "agreement_weight", "sparsity_weight", "closeness_weight")
        for name in (*weights, "psi_share", "least_value", "least_change"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, not {value}")

    def check_hyper(self, hyper: Hyper) -> None:
        """Refuse a step size by which psi moves away from sigma, ever farther, in place of towards it.

        Of the term lambda_L2 (sigma - psi)^2 alone, steps of a size r converge where r h < 2 (1 + m) with a momentum m,
        or 2 (1 + m) / (1 + 2 m) where that is Nesterov's; h is the term's curvature.

        Raises:
            ConfigError: It is such a one.
        """
        curvature = 2 * self.closeness_weight / self.supervised_weight + hyper.weight_decay
        most = 2 * (1 + hyper.momentum) / (1 + 2 * hyper.momentum * self.nesterov)
        if curvature * hyper.learning_rate >= most:
            raise ConfigError(
                f"hyper.learning_rate {hyper.learning_rate:g}: with closeness_weight {self.closeness_weight:g} and "
                f"supervised_weight {self.supervised_weight:g} psi would diverge: lower it below "
                f"{most / curvature:.3g}, or lower closeness_weight"
            )


def summed(sigma: Mapping[str, Tensor], psi: Tensor) -> Tree:
    """Return theta = sigma + psi, leaf by leaf, in the order of names.

    Args:
        sigma: Trained leaves by name.
        psi: Of shape (N,).
    """
    ordered = {name: sigma[name] for name in sorted(sigma)}
    return {name: ordered[name] + part for name, part in view_shaped(psi, ordered).items()}


def without_small(psi: Tensor, least: float) -> Tensor:
    """Return psi with zeros where it is no larger than `least`."""
    return torch.where(psi.abs() > least, psi, 0.0)


def pack_changes(changes: Tensor, least: float, prefix: str) -> Tree:
    """Return what travels of changes of shape (N,): those larger than `least`, and which they are; one at least.

    Args:
        least: Below it, or at it, a change does not travel.
        prefix: Of the leaves' names.
    """
    mask = changes.abs() > least
    mask[0] |= not mask.any()  # so that nothing at all is not taken for nobody
    return prefixed(pack_sparse(changes, None if mask.all() else mask), prefix)


def unpack_changes(tree: Mapping[str, Tensor], prefix: str, like: Tensor) -> Tensor:
    """Return changes of shape (N,), zero where none travelled.

    Args:
        tree: Leaves with that prefix, and perhaps others.
        like: What changed, of shape (N,).

    Raises:
        WireError: They are no such changes.
    """
    return unpack_sparse(check_changes(tree, prefix, like), len(like))[0]


def check_changes(tree: Mapping[str, Tensor], prefix: str, like: Tensor) -> Tree:
    """Refuse what `pack_changes` does not give, storage or not; return it without the prefix.

    Args:
        tree: Leaves with that prefix, and perhaps others.
        like: What changed, of shape (N,).

    Raises:
        WireError: They are no such changes.
    """
    packed = select(tree, prefix)
    if set(packed) not in ({VALUES}, {VALUES, MASK}, {VALUES, INDEX}):
        raise WireError(f"tensors {sorted(packed)[:8]} are no changes of some entries", reason="unknown-tensor")
    whole, count = len(packed) == 1, packed[VALUES].numel()
    if not 1 <= count <= len(like):
        raise WireError(f"{count} changes of {len(like)} entries", reason="shape")
    outlines = {
        VALUES: torch.empty(len(like) if whole else count, dtype=like.dtype, device="meta"),
        MASK: torch.empty(bits.packed_bytes(len(like), 1), dtype=torch.uint8, device="meta"),
        INDEX: torch.empty(count, dtype=torch.int32, device="meta"),
    }
    check_like(packed, outlines)
    if not packed[VALUES].is_meta:
        unpack_sparse(packed, len(like))
    return packed
