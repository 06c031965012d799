"""Tune glibc's malloc for many 256 KiB frames and few large tensors.

By default it returns the memory of every freed frame and takes it again, page by page: measured with two agents and
25 MB, a third of all CPU time of a round. And its arenas retain whole freed models: with twenty devices of 25 MB, 4.6
model sizes in the server instead of 3. A trainer wants exactly that: it allocates and frees the same tensors at each
step, and returning the pages of small ones took a quarter of a small CNN's step. The price is memory: VGG-19 in batches
of 64 takes 620 to 700 MiB, and 440 where tensors are mapped one by one, in 1.07 of the time.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 4 << 20
RETAINED_BYTES = 32 << 20
LEAF_BYTES = 1 << 20

STEPS = 32 << 20, 32 << 20
"""Arguments of `tune` for training steps; glibc accepts no larger mmap threshold."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(RETAINED_BYTES)}
"""The same for foreign programs, such as a broker that we start."""


def enable_huge_pages() -> None:
    """Let torch ask for 2 MiB pages for large tensors; call it before torch allocates memory.

    A fresh tensor of 25 MB is filled in 12 ms instead of 32, without six thousand page faults. Systems without huge
    pages ignore it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def tune(large_bytes: int = LARGE_BYTES, kept_bytes: int = RETAINED_BYTES) -> None:
    """Retain up to `kept_bytes` of freed blocks below `large_bytes`, and map larger ones one by one.

    No effect with other C libraries.
    """
    _set({M_MMAP_THRESHOLD: large_bytes, M_TRIM_THRESHOLD: kept_bytes})


def tune_for_frames(frame_bytes: int) -> None:
    """Retain freed frames, map larger blocks one by one, and share one arena among threads; call it before any starts.

    For a server that aggregates on whichever thread is free. With an arena per thread, each retained its copy of every
    leaf that was not mapped; in one arena, frames fill the gap of a leaf, and the next round's leaf finds no room
    there. With twenty devices of 25 MB, a tensor of 3.3 MB among them, that was 0.6 model sizes.
    """
    tune(max(LEAF_BYTES, 2 * frame_bytes))
    _set({M_ARENA_MAX: 1})


def share_arena() -> None:
    """Share one arena among an agent's threads, which mostly wait; call it before any starts."""
    _set({M_ARENA_MAX: 1})


def trim_heap() -> None:
    """Return free heap memory to the system: after its imports, an idle agent holds a tenth more than it needs."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(options: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
