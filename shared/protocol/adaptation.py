"""Parts of a network that a run trains: frozen leaves and low-rank adapters."""

from __future__ import annotations

import math

import msgspec

MOST_PATTERNS, MOST_RANK = 256, 4096


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Low-rank adapters; all other parameters are frozen.

    E. J. Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022. https://arxiv.org/abs/2106.09685

    Attributes:
        rank: Rank r of every adapter, at least 1.
        alpha: Adapters are scaled by alpha / rank.
        layers: Names of the linear and convolution layers that get an adapter, such as `features.0`; `*` and `?` are
            wildcards. Convolutions with groups get none.
        train: Names of layers or parameters that are trained in full besides, such as a new `classifier`.
    """

    rank: int = 4
    alpha: float = 8.0
    layers: tuple[str, ...] = ("*",)
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject values out of range."""
        if not 1 <= self.rank <= MOST_RANK or not 0 < self.alpha < math.inf:
            raise ValueError(
                f"rank is {self.rank}, alpha {self.alpha}: rank must be 1 to {MOST_RANK}, alpha above 0 and finite"
            )
        if not self.layers or len(self.layers) + len(self.train) > MOST_PATTERNS:
            raise ValueError(f"layers and train: give at least one layer, and at most {MOST_PATTERNS} names together")


class NetworkAdaptation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of a network that devices do not train.

    Attributes:
        frozen: Names of layers, parameters or buffers that stay as they are; `*` and `?` are wildcards.
        lora: Adapters that are trained instead of the layers.
    """

    frozen: tuple[str, ...] = ()
    lora: Lora | None = None

    def __post_init__(self) -> None:
        """Reject too many names."""
        if len(self.frozen) > MOST_PATTERNS:
            raise ValueError(f"frozen: {len(self.frozen)} names; at most {MOST_PATTERNS} are allowed")
