"""Forward and backward of layers with parameters, of active neurons alone; the rest is frozen.

Active neurons come first in every tensor here: of n rows of a weight the first k are trained, and of those the first j
columns. The backward of a layer with weights is

    dW[:k, :j] = dy[:, :k]^T x[:, :j],   db[:k] = sum dy[:, :k],   dx = dy W        x[:, :j] is all it keeps
    dx[:, :j] = dy W[:, :j]                                                         in the layer above the lowest
    dx[:, :j] = dy[:, :k] W[:k, :j]                                                 the error signal detached

so that the error signal also passes through frozen neurons, or not. Below the second layer with weights nobody asks for
that of frozen neurons, since it would go no further: there it is of active ones alone, and no gradient changes.
Gradients of slices are never dearer than those of whole weights with a mask, whatever the shape: 0.1 of them at
p = 0.25, 0.7 at 0.8, the same at 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.errors import ConfigError
from shared.tensors.tree import Tree

Kept: TypeAlias = tuple[Tensor, ...]
"""What a layer's backward needs of its forward."""

_ATEN = torch.ops.aten
_IMAGES = 4
"""Axes of a batch of images."""


class Step(Protocol):
    """One layer; `note` is what is no tensor of what a forward keeps."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        """Return outputs, and what to keep."""
        ...

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        """Return the gradient of the inputs if it is asked for, and those of the layer's parameters by name.

        `upstream` may be used up. Of a detached or narrow step it has the channels of active neurons alone.

        Args:
            upstream: Gradient of the outputs, (B, n, ...); it may be used up.
            kept: Tensors that `forward` kept.
            note: What `forward` noted beside them.
            further: Whether the gradient of the inputs is asked for.
        """
        ...


@dataclass(frozen=True)
class Weighty:
    """A convolution or a linear layer.

    Attributes:
        weight: Of all neurons, shape (n, m, ...).
        bias: Of shape (n,), if there is one.
        rows: Active neurons, k of n.
        columns: Active columns, j of m.
        detached: Whether the error signal of frozen neurons counts for nothing.
        narrow: Whether the layers below want it of active columns alone.
        geometry: Stride, padding, dilation; None for a linear layer.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    detached: bool
    narrow: bool
    geometry: tuple[list[int], list[int], list[int]] | None = None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        kept = (first_channels(inputs, self.columns),)
        if not self.geometry:
            return functional.linear(inputs, self.weight, self.bias), kept, inputs.shape
        none = [0] * len(self.geometry[0])
        return (
            torch.convolution(inputs, self.weight, self.bias, *self.geometry, False, none, 1),
            kept,
            inputs.shape,
        )

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert isinstance(note, torch.Size)
        active, weight = upstream[:, : self.rows], self.weight[: self.rows, : self.columns]
        gradient = self._of_weight(active, kept[0], weight)
        grown = {f"{self.name}.weight": gradient}
        if self.bias is not None:
            grown[f"{self.name}.bias"] = active.sum([axis for axis in range(active.ndim) if axis != 1])
        if not further:
            return None, grown
        if self.detached:
            return self._of_inputs(active, kept[0].shape, weight), grown
        if self.narrow:
            return self._of_inputs(upstream, kept[0].shape, self.weight[:, : self.columns]), grown
        return self._of_inputs(upstream, note, self.weight), grown

    def _of_weight(self, upstream: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        if not self.geometry:
            return upstream.contiguous().t() @ inputs  # a small copy, for a faster product
        return self._convolved(upstream, inputs, weight, [False, True, False])[1]

    def _of_inputs(self, upstream: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
        if not self.geometry:
            return upstream @ weight
        return self._convolved(upstream, upstream.new_empty(1).expand(shape), weight, [True, False, False])[0]

    def _convolved(self, upstream: Tensor, inputs: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        assert self.geometry
        none = [0] * len(self.geometry[0])
        found: tuple[Tensor, ...] = _ATEN.convolution_backward(
            upstream, inputs, weight, None, *self.geometry, False, none, 1, mask
        )
        return found


@dataclass(frozen=True)
class Norm:
    """BatchNorm as it trains: by the batch's own mean and variance, of frozen neurons too.

    Attributes:
        name: Of the layer.
        scale, shift, mean, variance: Of all neurons, shape (n,); the last two move. None where it has none.
        rows: Active neurons, k of n.
        narrow: Whether the error signal is that of active neurons alone.
        momentum, eps: Of the layer.
    """

    name: str
    scale: Tensor | None
    shift: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    rows: int
    narrow: bool
    momentum: float
    eps: float

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        if inputs.numel() == inputs.shape[1]:
            raise ValueError(f"layer {self.name}: BatchNorm cannot train on one value a channel")
        stats = self.mean, self.variance
        outputs, mean, spread = torch.native_batch_norm(
            inputs, self.scale, self.shift, *stats, True, self.momentum, self.eps
        )
        if self.narrow:
            return outputs, (first_channels(inputs, self.rows), mean[: self.rows], spread[: self.rows]), None
        return outputs, (inputs, mean, spread), None

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert note is None
        inputs, mean, spread = kept
        scale = self.scale if self.scale is None or not self.narrow else self.scale[: self.rows]
        affine = scale is not None
        below, *grown = _ATEN.native_batch_norm_backward(
            upstream, inputs, scale, None, None, mean, spread, True, self.eps, [further, affine, affine]
        )
        if not affine:
            return below, {}
        # a slice of its own: it would keep the rest, and a gradient of another shape than the leaf's is copied anyway
        return below, {
            f"{self.name}.{kind}": leaf[: self.rows].clone()
            for kind, leaf in zip(("weight", "bias"), grown, strict=True)
        }


def first_channels(inputs: Tensor, count: int) -> Tensor:
    """Return the first channels, in memory of their own if there are others."""
    if count == inputs.shape[1]:
        return inputs
    return inputs[:, :count].clone(memory_format=memory_layout(inputs))


def convolution_geometry(layer: nn.Conv1d | nn.Conv2d) -> tuple[list[int], list[int], list[int]]:
    """Return stride, padding and dilation of a convolution.

    Raises:
        ConfigError: It pads by other than zeros, or not alike on both sides.
    """
    spans = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding_mode != "zeros" or (layer.padding == "same" and any(span % 2 for span in spans)):
        raise ConfigError(f"a convolution pads by {layer.padding_mode!r}, {layer.padding!r}; pad evenly by zeros")
    match layer.padding:
        case "same":
            padding = [span // 2 for span in spans]
        case "valid":
            padding = [0] * len(spans)
        case given:
            padding = [int(margin) for margin in given]
    return list(layer.stride), padding, list(layer.dilation)


def memory_layout(inputs: Tensor) -> torch.memory_format:
    """Tell whether channels lie side by side."""
    if inputs.ndim == _IMAGES and inputs.stride(1) == 1 and not inputs.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
