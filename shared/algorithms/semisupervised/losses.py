"""SemiSFL losses: contrastive, clustering and consistency; equations (1), (3) to (6).

Y. Xu et al. SemiSFL: Split Federated Learning on Unlabeled and Non-IID Data; their code is
https://github.com/littlefishe/Capsule. With anchors z_j, references z~_a (both of length 1) and a temperature kappa,

    T_j = -1/|P(j)| sum_{p in P(j)} log( exp(z_j . z~_p / kappa) / sum_a exp(z_j . z~_a / kappa) )        (3), (5)

which is the supervised contrastive loss of P. Khosla et al., NeurIPS 2020, https://arxiv.org/abs/2004.11362. The paper
prints z for the references and omits the anchor itself; its text and code compare with the teacher's projections of
another view, the anchor's included, and so does this. The consistency with pseudo-labels is that of FixMatch, K. Sohn
et al., NeurIPS 2020, https://arxiv.org/abs/2001.07685.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class References:
    """References with which anchors are compared.

    Attributes:
        projections: The teacher's, normalised to length 1; of shape (R, P).
        labels: True labels or pseudo-labels, int64 of shape (R,).
        confident: Possible positives, boolean of shape (R,); all references are in the sum over a.
    """

    projections: Tensor
    labels: Tensor
    confident: Tensor

    @classmethod
    def concatenate(cls, *several: References) -> References:
        """Return the concatenation of several references, in order."""
        return cls(
            torch.cat([references.projections for references in several]),
            torch.cat([references.labels for references in several]),
            torch.cat([references.confident for references in several]),
        )


def contrast(anchors: Tensor, labels: Tensor, references: References, temperature: float) -> Tensor:
    """Return the contrastive loss of each anchor, of shape (B,); zero, without a gradient, where it has no positive.

    For labelled examples this is T; for unlabelled ones, with the teacher's labels, the clustering regularization C:
    there every example is an anchor, and only references above the threshold are positives.

    Args:
        anchors: The student's projections, normalised to length 1; of shape (B, P).
        labels: int64 of shape (B,).
        temperature: kappa, above zero.
    """
    logits = anchors @ references.projections.T / temperature
    positive = (labels[:, None] == references.labels) & references.confident
    count = positive.sum(1)
    mean = torch.where(positive, logits, 0.0).sum(1) / count.clamp_min(1)
    return torch.where(count > 0, logits.logsumexp(1) - mean, 0.0)


@dataclass(frozen=True)
class PseudoLabels:
    """Pseudo-labels of unlabelled examples.

    Attributes:
        labels: The likeliest class of each, int64 of shape (B,).
        confident: Whether its probability is above the threshold, boolean of shape (B,).
    """

    labels: Tensor
    confident: Tensor

    @classmethod
    def of(cls, logits: Tensor, threshold: float) -> PseudoLabels:
        """Return pseudo-labels from the labeller's logits of the weak view, of shape (B, classes); threshold is tau."""
        likeliest, labels = logits.softmax(1).max(1)
        return cls(labels, likeliest > threshold)


def consistency(logits: Tensor, pseudo: PseudoLabels) -> Tensor:
    """Return H_j of equation (1), of shape (B,): cross-entropy with the pseudo-label, zero if that is not confident.

    The mean is over all B, not over the confident examples.

    Args:
        logits: The student's, for the strong view; of shape (B, classes).
        pseudo: The teacher's, for the weak view.
    """
    return torch.where(pseudo.confident, functional.cross_entropy(logits, pseudo.labels, reduction="none"), 0.0)


def unit_rows(rows: Tensor) -> Tensor:
    """Normalise each row to length 1; without it the logits reach 40 at a temperature of 0.2."""
    return functional.normalize(rows.flatten(1), dim=1)
