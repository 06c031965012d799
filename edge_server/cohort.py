"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def select(online: Sequence[str], *, size: int, seed: int, number: int) -> tuple[str, ...]:
    """Return the devices of round `number`, in order of name.

    Args:
        online: Devices that are there.
        size: How many to draw, each equally likely; 0 for all.
        seed: The run's seed; the draw is a function of it, the round and who is there.
        number: The round.
    """
    devices = sorted(online)
    if not size or size >= len(devices):
        return tuple(devices)
    return tuple(sorted(Random(f"{seed}/{number}").sample(devices, size)))  # noqa: S311 - a draw, not a secret
