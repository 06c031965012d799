"""Several named inputs of a network, packed into one tensor per example.

Examples travel through batches, evaluation, releases and serving as one float32 tensor. A data set with several inputs
holds them flattened, one after the other in alphabetical order of their names (`shared.data.sources.npz`); here they
are taken apart again before the network's forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAMES = "named_inputs"
"""Attribute of a network's class: names of its inputs."""


def with_named_inputs(network: nn.Module, dtypes: dict[str, torch.dtype] | None = None, **shapes: Sequence[int]) -> Any:
    """Let a network take packed inputs of shape (N, total); its forward gets them by name.

    The network's class becomes a subclass of it; names in the state dict stay.

    Args:
        network: Its forward takes tensors of shape (N, ...) by the names of `shapes`.
        dtypes: Types of inputs that are not float32, such as int64 for word numbers, which must be below 2^24.
        shapes: Shape of one example of each input; () for one number, which the forward gets as (N, 1).

    Returns:
        The network itself.

    Raises:
        ValueError: There are no shapes, or a data type has no input.
    """
    unknown = sorted((dtypes or {}).keys() - shapes.keys())
    if not shapes or unknown:
        raise ValueError(f"name the shape of each input, as image=(1, 28, 28); unknown: {', '.join(unknown) or 'none'}")
    kind = type(network)
    layout = [
        (name, tuple(shape) or (1,), (dtypes or {}).get(name, torch.float32)) for name, shape in sorted(shapes.items())
    ]

    def forward(self: nn.Module, inputs: Tensor) -> Tensor:
        """Return the network's outputs for packed inputs of shape (N, total)."""
        outputs: Tensor = kind.forward(self, **unpack_inputs(inputs, layout))
        return outputs

    network.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, NAMES: tuple(sorted(shapes))}
    )
    return network


def unpack_inputs(inputs: Tensor, layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Return the inputs by name, each of shape (N, ...).

    Args:
        inputs: Of shape (N, total).
        layout: Name, shape of one example and data type of each input, in order.

    Raises:
        ValueError: The examples have another number of values.
    """
    sizes = [math.prod(shape) for _, shape, _ in layout]
    if inputs.ndim != 2 or inputs.shape[1] != sum(sizes):  # noqa: PLR2004 - examples and values
        parts = ", ".join(f"{name} {shape}" for name, shape, _ in layout)
        raise ValueError(f"examples have shape {tuple(inputs.shape[1:])}, and {parts} together ({sum(sizes)},)")
    parts_by_name = zip(layout, inputs.split(sizes, dim=1), strict=True)
    return {name: part.reshape((-1, *shape)).to(dtype) for (name, shape, dtype), part in parts_by_name}
