"""CPU share (nice value, CPU list) of the trainer beside model serving."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from device_agent.config import TrainerConfig
from device_agent.profile.schema import Profile

FROM_CONFIG = "the agent's file"
FROM_DEFAULT = "usual for every board"


class TrainerShare(NamedTuple):
    """The trainer's share of the processor, and the origin of each value.

    Attributes:
        nice: Nice value; 0 for that of the agent.
        cpus: CPU numbers that the trainer may run on; empty for all.
    """

    nice: int
    cpus: tuple[int, ...]
    nice_from: str
    cpus_from: str


def choose_trainer_device(config: TrainerConfig, profile: Profile) -> str:
    """Choose `auto`, `cpu` or `cuda` for the trainer, from the agent's file, else from the board's profile."""
    return config.device or profile.trainer.device


def choose_share(config: TrainerConfig, profile: Profile, present: Collection[int], *, serves: bool) -> TrainerShare:
    """Choose the trainer's share of the processor.

    Args:
        present: CPU numbers that the agent may run on.
        serves: True if the board serves models too.
    """
    usual = profile.inference
    unspared = tuple(sorted(present)[usual.spared_cpus :]) if usual.spared_cpus else ()
    nice, cpus = (usual.trainer_nice, unspared) if serves else (0, ())
    return TrainerShare(
        nice=nice if config.nice is None else config.nice,
        cpus=cpus if config.cpus is None else tuple(sorted(config.cpus)),
        nice_from=FROM_CONFIG if config.nice is not None else origin_of(profile, "trainer_nice"),
        cpus_from=FROM_CONFIG if config.cpus is not None else origin_of(profile, "spared_cpus"),
    )


def origin_of(profile: Profile, key: str) -> str:
    """Describe the origin of a value in a profile's `[inference]`."""
    origin = profile.inference.origin.get(key, "")
    return f"{profile.id}: {origin}" if origin else FROM_DEFAULT


def format_share(share: TrainerShare) -> str:
    """Format a share and its origins as one line."""
    cpus = f"CPUs {', '.join(map(str, share.cpus))}" if share.cpus else "all CPUs"
    return f"the trainer has nice {share.nice} ({share.nice_from}), {cpus} ({share.cpus_from})"
