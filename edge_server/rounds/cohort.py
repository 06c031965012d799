"""Who takes part in a round, and how many of them must answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

ROUNDING = 1e-9
"""0.28 of 25 are 7, and 50 and a tenth of it are 55, also in binary."""


def select(online: Sequence[str], *, size: int, seed: int, number: int, over_selection: float = 0.0) -> tuple[str, ...]:
    """Return the devices of round `number`, in order of name.

    Args:
        online: Devices that are there.
        size: How many updates the round is to have; 0 for one of each device.
        seed: The run's seed; the draw is a function of it, the round and who is there.
        number: The round.
        over_selection: How many more to draw, as a share of `size`, so that the slowest need not be waited for
            (K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
            https://arxiv.org/abs/1902.01046).
    """
    devices, wanted = sorted(online), math.ceil(size * (1 + over_selection) - ROUNDING)
    if not size or wanted >= len(devices):
        return tuple(devices)
    return tuple(sorted(Random(f"{seed}/{number}").sample(devices, wanted)))  # noqa: S311 - a draw, not a secret


def needed(asked: int, *, size: int, quorum: float) -> int:
    """Return how many updates end a round at once.

    Args:
        asked: Devices that were given its task.
        size: Of the cohort without over-selection; 0 for all of them.
        quorum: The share of the cohort that suffices.
    """
    return math.ceil(quorum * (min(size, asked) if size else asked) - ROUNDING)
