"""Read pretrained weights: safetensors, or a state dict of `torch.save`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # pickle itself is banned

from shared.errors import ConfigError
from shared.runtime.file_digest import file_sha256

SUFFIXES = (".safetensors", ".pt", ".pth")
WRAPPER = "state_dict"
"""Key under which training scripts store the state dict in a larger one."""
KEY = "model.weights"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; nothing is unpickled but tensors.

    Raises:
        ConfigError: It does not exist, has another format, or holds something else.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{KEY}: {path} does not end in {' or '.join(SUFFIXES)}; convert it with safetensors or torch.save"
        )
    try:
        read: object = (
            load_file(path) if path.suffix == SUFFIXES[0] else torch.load(path, map_location="cpu", weights_only=True)
        )
    except OSError as error:
        raise ConfigError(f"{KEY}: {path}: {error.strerror or error}; correct the path") from error
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{KEY}: {path} holds no state dict of tensors ({problem}); save model.state_dict() alone"
        ) from error
    if isinstance(read, dict) and isinstance(read.get(WRAPPER), dict):
        read = read[WRAPPER]
    if not isinstance(read, dict) or not all(isinstance(leaf, Tensor) for leaf in read.values()):
        raise ConfigError(f"{KEY}: {path} holds no state dict of tensors; save model.state_dict() alone")
    return {str(name): leaf for name, leaf in read.items()}


def digest_weights(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return file_sha256(path)
    except OSError as error:
        raise ConfigError(f"{KEY}: {path}: {error.strerror}; correct the path") from error
