"""Explain which layer of a network does not accept its inputs, with both shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.registry import FAULTS

AXES = ("L", "H x W", "D x H x W")
"""Names of the axes of signals, images and volumes."""
_EXPECTED: Sequence[tuple[type[nn.Module], Callable[[Any], list[tuple[object, ...]]]]] = (
    (nn.Linear, lambda layer: [("N", "...", layer.in_features)]),
    (nn.Conv1d, lambda layer: [("N", layer.in_channels, AXES[0])]),
    (nn.Conv2d, lambda layer: [("N", layer.in_channels, AXES[1])]),
    (nn.Conv3d, lambda layer: [("N", layer.in_channels, AXES[2])]),
    (nn.BatchNorm1d, lambda layer: [("N", layer.num_features), ("N", layer.num_features, AXES[0])]),
    (nn.BatchNorm2d, lambda layer: [("N", layer.num_features, AXES[1])]),
    (nn.BatchNorm3d, lambda layer: [("N", layer.num_features, AXES[2])]),
    (nn.LayerNorm, lambda layer: [("N", "...", *layer.normalized_shape)]),
    (nn.GroupNorm, lambda layer: [("N", layer.num_channels, "...")]),
    (nn.RNNBase, lambda layer: [("N", "steps", layer.input_size)]),
)
"""Shapes of the inputs that a layer accepts."""


def describe_misfit(network: nn.Module, call: Callable[[], object], error: BaseException) -> str:
    """Return a failed call's cause: the innermost layer that failed, what it got, and what it expects.

    The call is repeated to find that layer; its other effects, such as draws, must be repeatable.

    Args:
        network: The module whose layers are watched.
        call: Function that runs the network and fails.
        error: Error of the first call; its text is the cause where no layer is to blame.
    """
    entered = list[tuple[str, nn.Module, Sequence[Any]]]()
    hooks = []
    for name, module in network.named_modules():
        if not name:
            continue
        hooks.append(
            module.register_forward_pre_hook(lambda layer, inputs, name=name: entered.append((name, layer, inputs)))
        )
        hooks.append(module.register_forward_hook(lambda _layer, _inputs, _outputs: entered.pop() and None))
    try:
        call()
    except FAULTS as repeated:
        error = repeated
    finally:
        for hook in hooks:
            hook.remove()
    problem = str(error).partition("\n")[0] or type(error).__name__
    if not entered:
        return problem
    name, layer, inputs = entered[-1]
    tensors = [tensor for tensor in inputs if isinstance(tensor, Tensor)]
    shapes = ", ".join(f"{dtype_name(tensor.dtype)} {_shape('N', *map(str, tensor.shape[1:]))}" for tensor in tensors)
    expected = _describe_expected(layer)
    mismatch = f", and expects {expected}" if expected else f": {problem}"
    return f"layer {name}, {type(layer).__name__}, gets {shapes or 'no tensor'}{mismatch}"


def _shape(*axes: str) -> str:
    return f"({' x '.join(axes)})"


def _describe_expected(layer: nn.Module) -> str:
    """Return the inputs that a layer of torch accepts; empty for other layers."""
    if isinstance(layer, nn.Embedding):
        return f"whole numbers from 0 to {layer.num_embeddings - 1}: convert them with .long() in forward"
    shapes = next((shapes_of(layer) for kind, shapes_of in _EXPECTED if isinstance(layer, kind)), [])
    return " or ".join(_shape(*map(str, axes)) for axes in shapes)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a data type's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")
