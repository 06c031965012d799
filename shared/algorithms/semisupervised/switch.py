"""Switch the labeller between teacher and student, by divergence from uniform.

The idea is that of FedSwitch: J. Zhao, S. Ghosh, A. Bharadwaj, C.-Y. Ma. When does the student surpass the teacher?
Federated Semi-supervised Learning with Teacher-Student EMA, https://arxiv.org/abs/2301.10114, of which no code is
public. The test is a reconstruction from the abstract and from what Y. Xu et al., SemiSFL, say of it, not the authors'.
With q the mean of the teacher's predictions over a device's examples, of M classes,

    KL(q || uniform) = sum_m q_m log(M q_m) = log M - H(q)

is 0 where all classes are predicted equally often, and log M where it is always the same class. Below a threshold the
teacher labels, else the student, which has been fitted to these very examples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence_from_uniform(mean_prediction: Tensor) -> float:
    """Return KL(q || uniform) in nats, in [0, log M], for shares of M classes with any sum."""
    shares = mean_prediction.to(torch.float64)
    shares = shares / shares.sum()
    return max(0.0, float(torch.special.xlogy(shares, shares * len(shares)).sum()))


def use_teacher(mean_prediction: Tensor, threshold: float) -> bool:
    """Return True if the teacher, not the student, labels a device's examples.

    Args:
        mean_prediction: q, the teacher's, of shape (M,).
        threshold: Divergence in nats: 0 for never, more than log M for always.
    """
    return divergence_from_uniform(mean_prediction) < threshold
