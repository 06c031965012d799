"""Frozen networks' layers with parameters: gradients of active neurons alone.

Active neurons come first in every tensor here: of n rows of a weight the first k are trained, and of those the first j
columns. The backward of a layer with weights is

    dW[:k, :j] = dy[:, :k]^T x[:, :j],   db[:k] = sum dy[:, :k],   dx = dy W        it saves x[:, :j] alone
    dx[:, :j] = dy W[:, :j]                                                         in the layer above the lowest
    dx[:, :j] = dy[:, :k] W[:k, :j]                                                 with a detached error signal

so the error signal also passes through frozen neurons, unless detached. Below the second layer with weights the error
signal of frozen neurons is not needed, since it would go no further: there it is computed for active ones alone, and
no gradient changes. Gradients of slices never cost more than those of whole weights with a mask, whatever the shape:
0.1 of them at p = 0.25, 0.7 at 0.8, the same at 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.errors import ConfigError
from shared.tensors.tree import Tree

Saved: TypeAlias = tuple[Tensor, ...]
"""Tensors that a layer's backward needs from its forward."""

_ATEN = torch.ops.aten
_IMAGES = 4
"""Axes of a batch of images."""


class Step(Protocol):
    """One layer; `note` is the non-tensor part of the saved state."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        """Return outputs, tensors to save, and the note."""
        ...

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        """Return the gradient of the inputs, if requested, and those of the layer's parameters by name.

        For a detached or narrow step, `upstream` has the channels of active neurons alone.

        Args:
            upstream: Gradient of the outputs, (B, n, ...); may be overwritten.
            saved: Tensors that `forward` saved.
            further: Whether the gradient of the inputs is requested.
        """
        ...


@dataclass(frozen=True)
class ConvolutionGeometry:
    """Geometry of a convolution, one number per spatial axis."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def output_padding(self) -> list[int]:
        """Zeros, since nothing here is transposed."""
        return [0] * len(self.stride)


@dataclass(frozen=True)
class WeightedStep:
    """A convolution or a linear layer.

    Attributes:
        weight: Weight of all neurons, shape (n, m, ...).
        bias: Of shape (n,), or None.
        rows: Active neurons, k of n.
        columns: Active columns, j of m.
        detached: Whether the error signal of frozen neurons is ignored.
        narrow: Whether the layers below need the gradient of active columns alone.
        geometry: Of a convolution; None for a linear layer.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    detached: bool
    narrow: bool
    geometry: ConvolutionGeometry | None = None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        saved = (first_channels(inputs, self.columns),)
        if not (shape := self.geometry):
            return functional.linear(inputs, self.weight, self.bias), saved, inputs.shape
        outputs = torch.convolution(
            *(inputs, self.weight, self.bias, shape.stride, shape.padding, shape.dilation),
            *(False, shape.output_padding, 1),
        )
        return outputs, saved, inputs.shape

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert isinstance(note, torch.Size)
        active, weight = upstream[:, : self.rows], self.weight[: self.rows, : self.columns]
        gradient = self._of_weight(active, saved[0], weight)
        gradients = {f"{self.name}.weight": gradient}
        if self.bias is not None:
            gradients[f"{self.name}.bias"] = active.sum([axis for axis in range(active.ndim) if axis != 1])
        if not further:
            return None, gradients
        if self.detached:
            return self._of_inputs(active, saved[0].shape, weight), gradients
        if self.narrow:
            return self._of_inputs(upstream, saved[0].shape, self.weight[:, : self.columns]), gradients
        return self._of_inputs(upstream, note, self.weight), gradients

    def _of_weight(self, upstream: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        if not self.geometry:
            return upstream.contiguous().t() @ inputs  # a small copy, for a faster product
        return self._convolution_gradients(upstream, inputs, weight, [False, True, False])[1]

    def _of_inputs(self, upstream: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
        if not self.geometry:
            return upstream @ weight
        inputs = upstream.new_empty(1).expand(shape)  # only their shape is read
        return self._convolution_gradients(upstream, inputs, weight, [True, False, False])[0]

    def _convolution_gradients(
        self, upstream: Tensor, inputs: Tensor, weight: Tensor, mask: list[bool]
    ) -> tuple[Tensor, ...]:
        shape = self.geometry
        assert shape
        gradients: tuple[Tensor, ...] = _ATEN.convolution_backward(
            *(upstream, inputs, weight, None, shape.stride, shape.padding, shape.dilation),
            *(False, shape.output_padding, 1, mask),
        )
        return gradients


@dataclass(frozen=True)
class NormStep:
    """BatchNorm in training mode: by the batch's mean and variance, of frozen neurons too.

    Attributes:
        scale, shift, mean, variance: Of all neurons, shape (n,), or None; mean and variance change.
        rows: Active neurons, k of n.
        narrow: Whether the error signal is that of active neurons alone.
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

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        if inputs.numel() == inputs.shape[1]:
            raise ValueError(f"layer {self.name}: BatchNorm cannot train on one value per channel")
        outputs, mean, spread = torch.native_batch_norm(
            inputs, self.scale, self.shift, self.mean, self.variance, True, self.momentum, self.eps
        )
        if self.narrow:
            return outputs, (first_channels(inputs, self.rows), mean[: self.rows], spread[: self.rows]), None
        return outputs, (inputs, mean, spread), None

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert note is None
        inputs, mean, spread = saved
        scale = self.scale if self.scale is None or not self.narrow else self.scale[: self.rows]
        affine = scale is not None
        below, *gradients = _ATEN.native_batch_norm_backward(
            upstream, inputs, scale, None, None, mean, spread, True, self.eps, [further, affine, affine]
        )
        if not affine:
            return below, {}
        # cloned: a view would retain the rest, and autograd copies a gradient of another shape anyway
        return below, {
            f"{self.name}.{kind}": leaf[: self.rows].clone()
            for kind, leaf in zip(("weight", "bias"), gradients, strict=True)
        }


def first_channels(inputs: Tensor, count: int) -> Tensor:
    """Return the first channels, copied if there are others."""
    if count == inputs.shape[1]:
        return inputs
    return inputs[:, :count].clone(memory_format=memory_layout(inputs))


def convolution_geometry(layer: nn.Conv1d | nn.Conv2d) -> ConvolutionGeometry:
    """Return the geometry of a convolution.

    Raises:
        ConfigError: It pads with other values than zeros, or asymmetrically.
    """
    spans = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding_mode != "zeros" or (layer.padding == "same" and any(span % 2 for span in spans)):
        raise ConfigError(
            f"a convolution pads by {layer.padding_mode!r}, {layer.padding!r}; pad symmetrically with zeros"
        )
    match layer.padding:
        case "same":
            padding = [span // 2 for span in spans]
        case "valid":
            padding = [0] * len(spans)
        case margins:
            padding = [int(margin) for margin in margins]
    return ConvolutionGeometry(list(layer.stride), padding, list(layer.dilation))


def memory_layout(inputs: Tensor) -> torch.memory_format:
    """Return the memory format: channels last or contiguous."""
    if inputs.ndim == _IMAGES and inputs.stride(1) == 1 and not inputs.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
