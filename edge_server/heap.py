"""Give the memory of freed tensors back to the system at once."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def give_back_large_blocks() -> None:
    """Tell glibc to map large blocks one by one.

    Left to itself it raises that bound to 32 MiB as tensors are freed; whole models then stay in its pools, and with
    twenty devices of 25 MB the server keeps 4.6 model sizes over idle instead of 3.1. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
