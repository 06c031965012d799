"""FedMatch settings, and weights as the sum of two parts.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang. Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint
Learning, ICLR 2021, https://arxiv.org/abs/2006.12097; the defaults are those of their code,
https://github.com/wyjeong/FedMatch. Of the two parts sigma is a tree, and psi one vector of shape (N,), the leaves
concatenated in the order of their names. Of a vector that the other side knows, only changes larger than `least_change`
travel, with their positions, as in `sparse_update`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.algorithms.personal.sparse_update import INDEX, MASK, VALUES, pack_sparse, unpack_sparse, view_shaped
from shared.algorithms.semisupervised.settings import SteppedSettings, add_prefix, take_prefix
from shared.errors import ConfigError, WireError
from shared.protocol.messages import Hyper
from shared.tensors import bits
from shared.tensors.tree import Tree, check_like

SIGMA, PSI, HELPER, LAST = "sigma/", "psi/", "helper/", "last/"
"""Prefixes of leaves: the two parts; a helper's psi in a download; a device's psi stored on the server. Running
statistics and untrained parameters have no prefix."""
PSI_VALUES = PSI + VALUES
"""Leaf with all of psi, in the server's state and the download."""


@dataclass(frozen=True, kw_only=True)
class FedmatchSettings(SteppedSettings):
    """FedMatch's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        helpers: H, devices with whose predictions a device compares its own; 0 for none.
        helper_period: Rounds between two with helpers, those nearest to each device.
        supervised_weight: lambda_s of the labels' cross-entropy, by which the whole objective is divided, so that
            `learning_rate` is that of this cross-entropy.
        consistency_weight: lambda_ICCS of the divergence from helpers' predictions.
        agreement_weight: Weight of the cross-entropy of strong views with the labels agreed between device and helpers.
        sparsity_weight: lambda_L1 of psi's absolute values.
        closeness_weight: lambda_L2 of the squares of sigma - psi.
        psi_share: Initial psi as a share of sigma.
        least_value: Entries of psi up to this size are treated as zero when it is sent, tested or served.
        least_change: Entries with changes up to this size are not sent.
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
        """Raise ValueError for a setting that is out of range or unknown."""
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
        """Reject a step size with which psi would move ever farther away from sigma instead of towards it.

        For the term lambda_L2 (sigma - psi)^2 alone, steps of size r converge where r h < 2 (1 + m) with momentum m, or
        2 (1 + m) / (1 + 2 m) with Nesterov momentum; h is the term's curvature.

        Raises:
            ConfigError: The step size is too large.
        """
        curvature = 2 * self.closeness_weight / self.supervised_weight + hyper.weight_decay
        most = 2 * (1 + hyper.momentum) / (1 + 2 * hyper.momentum * self.nesterov)
        if curvature * hyper.learning_rate >= most:
            raise ConfigError(
                f"hyper.learning_rate {hyper.learning_rate:g}: with closeness_weight {self.closeness_weight:g} and "
                f"supervised_weight {self.supervised_weight:g} psi would diverge: lower it below "
                f"{most / curvature:.3g}, or lower closeness_weight"
            )


def add_psi(sigma: Mapping[str, Tensor], psi: Tensor) -> Tree:
    """Return theta = sigma + psi, leaf by leaf, in the order of names.

    Args:
        psi: Of shape (N,).
    """
    ordered = {name: sigma[name] for name in sorted(sigma)}
    return {name: ordered[name] + part for name, part in view_shaped(psi, ordered).items()}


def without_small(psi: Tensor, least: float) -> Tensor:
    """Return psi with zeros where it is at most `least`."""
    return torch.where(psi.abs() > least, psi, 0.0)


def pack_changes(changes: Tensor, least: float, prefix: str) -> Tree:
    """Return the tensors of changes of shape (N,) larger than `least`, with their positions; at least one change."""
    mask = changes.abs() > least
    mask[0] |= not mask.any()  # an empty update would mean that the device took no part
    return add_prefix(pack_sparse(changes, None if mask.all() else mask), prefix)


def unpack_changes(tree: Mapping[str, Tensor], prefix: str, like: Tensor) -> Tensor:
    """Return changes of shape (N,), zero where none travelled.

    Args:
        tree: Leaves with that prefix, and perhaps others.
        like: The changed vector, of shape (N,).

    Raises:
        WireError: They are not valid changes.
    """
    return unpack_sparse(check_changes(tree, prefix, like), len(like))[0]


def check_changes(tree: Mapping[str, Tensor], prefix: str, like: Tensor) -> Tree:
    """Reject an invalid result of `pack_changes`, with or without storage; return it without the prefix.

    Args:
        tree: Leaves with that prefix, and perhaps others.
        like: The changed vector, of shape (N,).

    Raises:
        WireError: They are not valid changes.
    """
    packed = take_prefix(tree, prefix)
    if set(packed) not in ({VALUES}, {VALUES, MASK}, {VALUES, INDEX}):
        raise WireError(f"tensors {sorted(packed)[:8]} are not changes of entries", reason="unknown-tensor")
    complete, count = len(packed) == 1, packed[VALUES].numel()
    if not 1 <= count <= len(like):
        raise WireError(f"{count} changes of {len(like)} entries", reason="shape")
    outlines = {
        VALUES: torch.empty(len(like) if complete else count, dtype=like.dtype, device="meta"),
        MASK: torch.empty(bits.packed_bytes(len(like), 1), dtype=torch.uint8, device="meta"),
        INDEX: torch.empty(count, dtype=torch.int32, device="meta"),
    }
    check_like(packed, outlines)
    if not packed[VALUES].is_meta:
        unpack_sparse(packed, len(like))
    return packed
