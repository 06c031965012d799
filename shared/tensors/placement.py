"""Where tensors are computed with: on the CPU, or on a GPU that torch reaches by CUDA.

A task or a round moves its network, its state and its batches there at its beginning and takes back what came of them
at its end. Files, payloads and codecs never leave the CPU, nor does anything that is drawn at random: every device of
a mixed fleet draws the same. On the CPU nothing is moved or copied, and all bits are as they always were.

Sums in another order differ in their last bits, so that a GPU gives other bits than a CPU. To give the same ones
again after a restart, torch is told to choose kernels that add in one order where it has such, and convolutions
multiply numbers of 32 bits as they are, not rounded to TF32's 10 bits.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from shared.errors import ConfigError, TaskFailed
from shared.protocol.messages import Scalar, Update
from shared.tensors.tree import State, Tree

ON_CPU = Update(run="", round=0, device="", params=None).trained_on
"""The very default: what only equals it would be written into every update."""
log = logging.getLogger(__name__)

Device: TypeAlias = torch.device
CPU = torch.device("cpu")
CHOICES = ("auto", "cpu", "cuda")
"""Of a configuration: the GPU where torch reaches one, else the CPU; or always one of them."""
WORKSPACE = ":4096:8"
"""Of cuBLAS: with a workspace of its own for each stream its sums are in one order."""
NAME_LENGTH = 60
_EXHAUSTED = ("CUDA error: out of memory", "_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
"""What libraries below torch say of memory that they were not given."""


def choose_device(choice: str, limit: int = 0) -> torch.device:
    """Return what a configuration names, made ready.

    Args:
        choice: One of `CHOICES`.
        limit: Most bytes of memory that this process may take; also of a GPU that has none of its own. 0 for all.

    Raises:
        ConfigError: It names what torch does not reach here.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return CPU
    if choice not in CHOICES:
        raise ConfigError(f"trainer.device: {choice!r}; use {', '.join(CHOICES)}")
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.device is {choice!r}, and {_lack()}; or set it to auto")
    return _made_ready(torch.device("cuda", torch.cuda.current_device()), limit)


def _lack() -> str:
    if not torch.backends.cuda.is_built():
        return (
            f"this torch ({torch.__version__}) was built without CUDA: install one with it, on a Jetson the wheel that "
            "NVIDIA builds for its JetPack (the Python index has none for Jetsons)"
        )
    return (
        f"torch ({torch.__version__}) reaches no GPU: look at its driver, and whether this user is in the group video"
    )


def _made_ready(device: torch.device, limit: int) -> torch.device:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)  # read when CUDA begins
    torch.cuda.init()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # of a user's own network an operation may have none
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - its stubs lack it
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    share_memory(device, limit, 0)
    log.info("trains on %s", describe(device))
    return device


def share_memory(device: torch.device, limit: int, resident: int) -> None:
    """Allow a GPU that shares the board's memory what a limit leaves beside what this process holds: each byte once.

    Args:
        device: What a trainer computes with; nothing is done for a CPU, or a GPU with memory of its own.
        limit: Most bytes of memory that this process may take; 0 for all.
        resident: Bytes that it holds now.
    """
    if device.type != "cuda" or not limit:
        return
    about = torch.cuda.get_device_properties(device)
    if about.is_integrated:
        share = shared_fraction(limit, resident, about.total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)


def shared_fraction(limit: int, resident: int, total: int) -> float:
    """Return the part of a board's memory that its GPU may take of a process's limit, in [0, 1].

    Args:
        limit: Most bytes that the process may take, on CPU and GPU together.
        resident: Bytes that it holds now.
        total: Bytes of the board's memory.
    """
    return min(1.0, max(0, limit - resident) / total)


def describe(device: torch.device) -> str:
    """Return what an update says of where it was trained: `cpu`, or `cuda` and the GPU's name."""
    if device.type != "cuda":
        return ON_CPU if device == CPU else device.type
    return f"cuda {torch.cuda.get_device_name(device)}"[:NAME_LENGTH]


def device_of(leaves: Iterable[Tensor]) -> torch.device:
    """Return where leaves are; the CPU where there is none with storage."""
    return next((leaf.device for leaf in leaves if not leaf.is_meta), CPU)


def to_device(tree: Mapping[str, Tensor], device: torch.device) -> Tree:
    """Return leaves on a device; those that are there already are not copied."""
    return {key: leaf.to(device) for key, leaf in tree.items()}


def state_on(state: State, device: torch.device) -> State:
    """Return a state on a device; leaves that are there already are not copied."""
    facts: dict[str, Scalar] = state.facts
    return State(to_device(state.tree, device), facts)


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was given: only then is a clock to be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generators() -> list[torch.Generator]:
    """Return torch's own generators: the CPU's, and those of GPUs where there are any in use."""
    found = [torch.default_generator]
    return [*found, *torch.cuda.default_generators] if torch.cuda.is_initialized() else found


def generator_states() -> list[Tensor]:
    """Return the state of each of torch's own generators."""
    return [generator.get_state() for generator in generators()]


def set_generator_states(states: Iterable[Tensor]) -> None:
    """Put torch's own generators back to where they were."""
    for generator, state in zip(generators(), states, strict=True):
        generator.set_state(state)


def is_broken(error: BaseException) -> bool:
    """Tell whether after this error CUDA refuses everything else that this process asks of it."""
    broken = getattr(torch, "AcceleratorError", ())  # there from 2.8 on
    return isinstance(error, broken) and not _is_exhausted(error)


def _is_exhausted(error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _EXHAUSTED)


@contextmanager
def memory_explained(device: torch.device, release: Callable[[], None]) -> Iterator[None]:
    """Have what is done inside fail with a remedy where the GPU's memory is exhausted, and give back what it held.

    Args:
        device: Where it is done.
        release: Gives up what else there is on the GPU.

    Raises:
        TaskFailed: It is.
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
