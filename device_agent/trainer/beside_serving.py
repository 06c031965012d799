"""What training leaves to a board's applications where their models are served beside it: pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from device_agent.config import TrainerConfig
from device_agent.profile.schema import Profile

FROM_CONFIG = "the agent's file"
FROM_DEFAULT = "usual for every board"


class TrainerShare(NamedTuple):
    """What the trainer takes of the processor.

    Attributes:
        nice: Its nice value; 0 for that of the agent.
        cpus: Numbers of the CPUs that it may run on; empty for all.
    """

    nice: int
    cpus: tuple[int, ...]
    nice_from: str
    cpus_from: str


def choose_trainer_device(config: TrainerConfig, profile: Profile) -> str:
    """Return what the trainer computes with: `auto`, `cpu` or `cuda`, by the operator, else by the board's profile."""
    return config.device or profile.trainer.device


def choose_share(config: TrainerConfig, profile: Profile, present: Collection[int], *, serves: bool) -> TrainerShare:
    """Return what the trainer is to take of a board's processor.

    Args:
        present: Numbers of the CPUs that the agent may run on.
        serves: Whether the board serves models too.
    """
    usual = profile.inference
    nice, cpus = (usual.trainer_nice, _select_cpus(usual.spared_cpus, present)) if serves else (0, ())
    return TrainerShare(
        nice=nice if config.nice is None else config.nice,
        cpus=cpus if config.cpus is None else tuple(sorted(config.cpus)),
        nice_from=FROM_CONFIG if config.nice is not None else origin_of(profile, "trainer_nice"),
        cpus_from=FROM_CONFIG if config.cpus is not None else origin_of(profile, "spared_cpus"),
    )


def origin_of(profile: Profile, key: str) -> str:
    """Return where a figure of a profile's `[inference]` is from, in words."""
    origin = profile.inference.origin.get(key, "")
    return f"{profile.id}: {origin}" if origin else FROM_DEFAULT


def _select_cpus(count: int, present: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs behind the first ones, which are spared; none, for all, where no other one would be left."""
    return tuple(sorted(present)[count:]) if count else ()


def format_share(share: TrainerShare) -> str:
    """Return what the trainer takes, and who says so, in a line."""
    cpus = f"CPUs {', '.join(map(str, share.cpus))}" if share.cpus else "all CPUs"
    return f"the trainer has nice {share.nice} ({share.nice_from}), {cpus} ({share.cpus_from})"
