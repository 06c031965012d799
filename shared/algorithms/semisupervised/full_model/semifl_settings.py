"""SemiFL settings and epoch batches, common to the server and device sides.

E. Diao, J. Ding, V. Tarokh. SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training,
NeurIPS 2022, https://arxiv.org/abs/2106.01432; the defaults are those of their code, linked in `semifl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.algorithms.semisupervised.full_model.network_steps import Descent
from shared.algorithms.semisupervised.settings import LabelledSettings
from shared.protocol.messages import Hyper


@dataclass(frozen=True, kw_only=True)
class SemiflSettings(LabelledSettings):
    """SemiFL's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        epochs: E, a device's passes over its fix set of confident examples.
        server_epochs: The server's passes over its labelled examples, before each round.
        warmup_epochs: Additional passes before the first round, for better pseudo-labels.
        threshold: tau; an example belongs to the fix set if its likeliest class is at least as likely.
        mixing: a of Beta(a, a), from which the shares of mixed examples are drawn.
        server_momentum: Momentum of the server's step along the devices' mean change.
        clip: The largest norm of a step's gradient; larger ones are scaled down to it.
    """

    epochs: int = 5
    server_epochs: int = 5
    warmup_epochs: int = 0
    mixing: float = 0.75
    server_momentum: float = 0.5
    clip: float = 1.0
    least_rate: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        super().__post_init__()
        if min(self.epochs, self.server_epochs) < 1 or self.warmup_epochs < 0:
            raise ValueError("epochs and server_epochs must be >= 1, warmup_epochs >= 0")
        if not 0 <= self.server_momentum < 1:
            raise ValueError("server_momentum must be in [0, 1)")
        if not 0 < self.mixing < math.inf or not 0 < self.clip < math.inf:
            raise ValueError("mixing and clip must be above 0 and finite; a large clip, such as 1e9, clips nothing")

    def descent(self, weights: Sequence[tuple[str, Tensor]], hyper: Hyper) -> Descent:
        """Return the SGD of a round.

        Args:
            weights: By name; those without a gradient are not trained.
        """
        return Descent([pair for pair in weights if pair[1].requires_grad], hyper, self.nesterov, self.clip)


def draw_epoch_batches(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Split the positions 0 to count - 1, in random order, into the fewest batches of about equal size.

    The size of the fix set cannot be planned, and BatchNorm has no variance of a last batch of one example.

    Args:
        count: Examples, at least one.
    """
    return torch.randperm(count, generator=generator).tensor_split(-(-count // size))
