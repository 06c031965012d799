"""Tell glibc's allocator what lives in our processes: many frames of 256 KiB, and few tensors of megabytes.

Left to itself it gives the memory of every freed frame back and takes it anew, page by page: measured with two agents
and 25 MB, a third of all CPU time of a round. And it keeps whole freed models in its pools: with twenty devices of
25 MB, 4.6 model sizes in the server instead of 3. A trainer wants just that: it takes and frees the same tensors at
each step, and the pages of small ones went back and forth, a quarter of a small CNN's step. What is kept has its
price: VGG-19 in batches of 64 takes 620 to 700 MiB, and 440 where tensors are mapped one by one, in 1.07 of the time.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 4 << 20
KEPT_BYTES = 32 << 20
LEAF_BYTES = 1 << 20

STEPS = 32 << 20, 32 << 20
"""What `tune` is told where training steps are taken; glibc takes no more as the first of the two."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES)}
"""The same for a program that is not ours, such as a broker that we start."""


def enable_huge_pages() -> None:
    """Let torch ask for pages of 2 MiB for large tensors; call it before torch takes its first memory.

    A fresh tensor of 25 MB is filled in 12 ms instead of 32: the rest went into six thousand page faults. A system that
    has no such pages ignores it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def tune(large_bytes: int = LARGE_BYTES, kept_bytes: int = KEPT_BYTES) -> None:
    """Keep freed blocks below `large_bytes`, `kept_bytes` of them at most, and map larger ones one by one.

    Other C libraries are left alone.
    """
    _set({M_MMAP_THRESHOLD: large_bytes, M_TRIM_THRESHOLD: kept_bytes})


def tune_for_frames(frame_bytes: int) -> None:
    """Keep freed frames, map what is longer one by one, and let all threads share one pool; call it before any starts.

    For a server that only folds: it does so on whichever thread is free. With a pool a thread, each kept its copy of
    every leaf that was not mapped; in one pool, frames settle where a leaf was, and the next round's finds no room
    there. With twenty devices of 25 MB, a tensor of 3.3 MB among them, that was 0.6 model sizes.

    Args:
        frame_bytes: Of a usual frame.
    """
    tune(max(LEAF_BYTES, 2 * frame_bytes))
    _set({M_ARENA_MAX: 1})


def share_one_pool() -> None:
    """Let all threads of an agent, which mostly wait, share one pool; call it before any starts."""
    _set({M_ARENA_MAX: 1})


def give_back() -> None:
    """Give the system what a start left behind: importing takes a tenth more than what an agent that waits holds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(options: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
