"""Torch's global random generators: seed them in a block, store and restore their states."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SEEDING = threading.RLock()


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block, and restore them after it.

    Covers the CPU and GPUs in use: `torch.manual_seed` would record a traceback for every other device type. Other
    threads wait for the end of the block: the generators are the process's, which may serve several runs.
    """
    with _SEEDING:
        before = [(generator, generator.get_state()) for generator in _generators()]
        for generator, _ in before:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


def generator_states() -> list[Tensor]:
    """Return the state of each generator: the CPU's, and those of GPUs in use."""
    return [generator.get_state() for generator in _generators()]


def set_generator_states(states: Iterable[Tensor]) -> None:
    """Restore the states of `generator_states`."""
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    cpu = [torch.default_generator]
    return [*cpu, *torch.cuda.default_generators] if torch.cuda.is_initialized() else cpu
