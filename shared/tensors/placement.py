"""Compute device: the CPU, or a GPU that torch reaches by CUDA.

A task or a round moves its network, state and batches to the device at its start and its results back at its end.
Files, payloads, codecs and random draws stay on the CPU: every device of a mixed fleet draws the same. On the CPU
nothing is moved or copied, and all bits stay the same.

Sums in another order differ in their last bits, so that a GPU gives other bits than a CPU. To be reproducible after a
restart, torch uses deterministic kernels where it has them, and convolutions multiply numbers of 32 bits without
rounding to TF32's 10 bits.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeAlias

import torch

from shared.errors import ConfigError, TaskFailed
from shared.protocol.messages import Update
from shared.tensors.tree import CPU

ON_CPU = Update(run="", round=0, device="", params=None).trained_on
"""The default of the field itself: an equal copy would be encoded in every update."""
log = logging.getLogger(__name__)

Device: TypeAlias = torch.device
CHOICES = ("auto", "cpu", "cuda")
"""Values of `trainer.device`; `auto` is the GPU if torch reaches one, else the CPU."""
WORKSPACE = ":4096:8"
"""Setting of cuBLAS: a workspace per stream makes the order of its sums deterministic."""
NAME_LENGTH = 60
_EXHAUSTED = ("CUDA error: out of memory", "_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
"""Messages of libraries below torch for exhausted memory."""


def choose_device(choice: str, limit: int = 0) -> torch.device:
    """Return the configured device, initialised.

    Args:
        choice: A value of `CHOICES`.
        limit: Maximum bytes of memory of this process, including a GPU that shares the board's memory. 0 for no limit.

    Raises:
        ConfigError: The device is unknown, or torch does not reach it.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return CPU
    if choice not in CHOICES:
        raise ConfigError(f"trainer.device: {choice!r}; use {', '.join(CHOICES)}")
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.device is {choice!r}, and {_explain_missing_gpu()}; or set it to auto")
    return _initialise(torch.device("cuda", torch.cuda.current_device()), limit)


def _explain_missing_gpu() -> str:
    if not torch.backends.cuda.is_built():
        return (
            f"this torch ({torch.__version__}) was built without CUDA: install one with it, on a Jetson the wheel that "
            "NVIDIA builds for its JetPack (the Python index has none for Jetsons)"
        )
    return (
        f"torch ({torch.__version__}) reaches no GPU: look at its driver, and whether this user is in the group video"
    )


def _initialise(device: torch.device, limit: int) -> torch.device:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)  # read when CUDA begins
    torch.cuda.init()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # an operation of a user's network may lack one
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - missing in torch's stubs
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    share_memory(device, limit, 0)
    log.info("trains on %s", describe(device))
    return device


def share_memory(device: torch.device, limit: int, resident: int) -> None:
    """Limit a GPU that shares the board's memory to the process's limit minus its resident memory.

    Args:
        device: Ignored for a CPU, or a GPU with its own memory.
        limit: Maximum bytes of memory of this process; 0 for no limit.
        resident: Bytes in use by the process.
    """
    if device.type != "cuda" or not limit:
        return
    about = torch.cuda.get_device_properties(device)
    if about.is_integrated:
        share = shared_fraction(limit, resident, about.total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)


def shared_fraction(limit: int, resident: int, total: int) -> float:
    """Return the fraction of a board's memory that its GPU may use within a process's limit, in [0, 1].

    Args:
        limit: Maximum bytes of the process, on CPU and GPU together.
        resident: Bytes in use by the process.
        total: Bytes of the board's memory.
    """
    return min(1.0, max(0, limit - resident) / total)


@lru_cache(maxsize=4)
def describe(device: torch.device) -> str:
    """Return the device's name for updates: `cpu`, or `cuda` and the GPU's name."""
    if device.type != "cuda":
        return ON_CPU if device == CPU else device.type
    return f"cuda {torch.cuda.get_device_name(device)}"[:NAME_LENGTH]


def synchronize(device: torch.device) -> None:
    """Wait for pending work of a device, before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_broken(error: BaseException) -> bool:
    """Return True if CUDA rejects all further work of this process after this error."""
    broken = getattr(torch, "AcceleratorError", ())  # exists since 2.8
    return isinstance(error, broken) and not _is_exhausted(error)


def _is_exhausted(error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _EXHAUSTED)


@contextmanager
def explain_exhausted_memory(device: torch.device, release: Callable[[], None]) -> Iterator[None]:
    """Turn exhausted GPU memory inside the block into an error with a remedy, and free the memory.

    Args:
        device: Device of the work.
        release: Frees other data on the GPU.

    Raises:
        TaskFailed: The memory is exhausted.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda" or not _is_exhausted(error):
            raise
        traceback.clear_frames(error.__traceback__)  # and the tensors in them
        release()
        torch.cuda.empty_cache()
        cause, remedy = str(error).partition(". ")[0], 'use a smaller batch or model, or [trainer] device = "cpu"'
        raise TaskFailed(f"out of memory on {describe(device)}: {cause}; {remedy}") from None
