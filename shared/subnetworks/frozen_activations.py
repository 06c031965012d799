"""Frozen networks' ReLU, pooling and Flatten, with compact saved state.

A ReLU saves a bit per number, pooling a byte per window. On a GPU a ReLU saves a byte per number: bits are packed by
numpy, on the CPU alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from shared.subnetworks.frozen_layers import Saved, memory_layout
from shared.tensors.tree import Tree

_ATEN = torch.ops.aten
_SMALL = ((torch.uint8, 1 << 8), (torch.int16, 1 << 15))
"""Integer types, and the number of values from zero on that each can hold."""
_CACHED = 1 << 18
"""Windows per chunk."""


@dataclass(frozen=True)
class ReluStep:
    """ReLU; computes in place if no other layer reads its inputs again."""

    rows: int | None
    fresh: bool

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        outputs = inputs.relu_() if self.fresh else inputs.relu()
        saved_part = outputs if self.rows is None else outputs[:, : self.rows]
        layout = memory_layout(saved_part)
        if not saved_part.is_cpu:
            return outputs, (saved_part > 0,), layout
        bits = np.packbits(_flat(saved_part, layout).numpy() > 0)
        return outputs, (torch.from_numpy(bits),), layout

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert isinstance(note, torch.memory_format)
        upstream = upstream.contiguous(memory_format=note)
        if not upstream.is_cpu:
            return upstream.mul_(saved[0]), {}
        values = _flat(upstream, note).numpy()
        np.multiply(values, np.unpackbits(saved[0].numpy(), count=len(values)).view(np.bool_), out=values)
        return upstream, {}


@dataclass(frozen=True)
class Windows:
    """Pooling windows in images of one shape.

    Attributes:
        count: Rows and columns of windows.
        dtype: Integer type for the position of a number in its window or, without corners, in its channel.
        corners: Offsets of the windows' corners in the channel, of shape (1, C, rows, columns); None for zeros.
    """

    count: torch.Size
    dtype: torch.dtype
    corners: Tensor | None


@dataclass(frozen=True)
class MaxPoolStep:
    """Max pooling; saves the position of the maximum in each window."""

    rows: int | None
    size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool
    cache: dict[torch.Size, Windows] = field(default_factory=dict)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        shape, layout = inputs.shape, memory_layout(inputs)
        windows = self._windows(inputs)
        channels = shape[1] if self.rows is None else self.rows
        device = inputs.device
        outputs = torch.empty((*shape[:2], *windows.count), dtype=inputs.dtype, memory_format=layout, device=device)
        saved = torch.empty(
            (shape[0], channels, *windows.count), dtype=windows.dtype, memory_format=layout, device=device
        )
        for part in _slices(outputs):
            places = torch.empty_like(outputs[part], dtype=torch.int64)
            _ATEN.max_pool2d_with_indices(inputs[part], *self._options(), out=outputs[part], indices=places)
            saved[part] = places[:, :channels]  # modulo 2^8
        if windows.corners is not None:
            saved.sub_(windows.corners.to(windows.dtype))  # correct modulo 2^8, and cheap
        return outputs, (saved,), (torch.Size((shape[0], channels, *shape[2:])), windows)

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert isinstance(note, tuple)
        (positions,), (shape, windows), layout = saved, note, memory_layout(saved[0])
        upstream = upstream.contiguous(memory_format=layout)
        below = torch.empty(shape, dtype=upstream.dtype, memory_format=layout, device=upstream.device)
        for part in _slices(upstream):
            places = positions[part].to(torch.int64)
            if windows.corners is not None:
                places.add_(windows.corners)
            _ATEN.max_pool2d_with_indices_backward(
                upstream[part], below[part], *self._options(), places, grad_input=below[part]
            )
        return below, {}

    def _options(self) -> tuple[object, ...]:
        return self.size, self.stride, self.padding, self.dilation, self.ceil

    def _windows(self, inputs: Tensor) -> Windows:
        shape = inputs.shape[1:]
        if shape not in self.cache:
            self.cache.clear()
            self.cache[shape] = self._measure_windows(inputs)
        return self.cache[shape]

    def _measure_windows(self, inputs: Tensor) -> Windows:
        _, channels, height, width = inputs.shape
        channels = channels if self.rows is None else self.rows
        count = _ATEN.max_pool2d_with_indices(inputs[:1, :1], *self._options())[0].shape[2:]
        reach = (self.size[0] - 1) * self.dilation[0] * width + (self.size[1] - 1) * self.dilation[1]
        least = min(reach + 1, height * width)
        dtype = next((kind for kind, values in _SMALL if least <= values), torch.int32)
        if height * width == least:
            return Windows(count, dtype, None)
        down, right = (
            torch.arange(windows, device=inputs.device) * stride - margin
            for windows, stride, margin in zip(count, self.stride, self.padding, strict=True)
        )
        shape, layout = (1, channels, *count), memory_layout(inputs)
        corners = torch.empty(shape, dtype=torch.int64, memory_format=layout, device=inputs.device)
        return Windows(count, dtype, corners.copy_(down[:, None] * width + right))


@dataclass(frozen=True)
class FlattenStep:
    """Flatten: each channel becomes a block of columns."""

    rows: int | None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        channels = inputs.shape[1] if self.rows is None else self.rows
        return inputs.flatten(1), (), ((inputs.shape[0], channels, *inputs.shape[2:]), memory_layout(inputs))

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert not saved
        assert isinstance(note, tuple)
        shape, layout = note
        return upstream.reshape(shape).contiguous(memory_format=layout), {}


@dataclass(frozen=True)
class OtherStep:
    """Any layer without parameters, with torch's backward.

    Attributes:
        rows: Channels of the error signal, if it is detached.
    """

    layer: nn.Module
    rows: int | None

    def __post_init__(self) -> None:
        """Set the copied layer to training mode, and disable changes of its inputs in place."""
        self.layer.train()
        if hasattr(self.layer, "inplace"):
            setattr(self.layer, "inplace", False)  # noqa: B010 - only some layers have it

    def forward(self, inputs: Tensor) -> tuple[Tensor, Saved, object]:
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            outputs = self.layer(inputs)
        return outputs.detach(), (), (inputs, outputs)

    def backward(self, upstream: Tensor, saved: Saved, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert not saved
        assert isinstance(note, tuple)
        inputs, outputs = note
        if self.rows is not None:
            upstream = torch.cat([upstream, torch.zeros_like(outputs[:, self.rows :])], 1)
        (below,) = torch.autograd.grad(outputs, inputs, upstream)
        return below if self.rows is None else below[:, : self.rows].clone(), {}


def build_pooling(layer: nn.MaxPool2d, rows: int | None) -> MaxPoolStep:
    """Return the step of a pooling layer."""
    size, stride, padding, dilation = (
        [value, value] if isinstance(value, int) else list(value)
        for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    return MaxPoolStep(rows, size, stride, padding, dilation, layer.ceil_mode)


def build_other(layer: nn.Module, rows: int | None) -> OtherStep:
    """Return the step of a layer without parameters."""
    return OtherStep(copy.deepcopy(layer), rows)


def _slices(outputs: Tensor) -> Iterator[slice]:
    """Split a batch so that torch's eight bytes per window stay in the processor's cache.

    Not on a GPU, which smaller slices would slow down.
    """
    if not outputs.is_cpu:
        return iter([slice(None)])
    size = max(1, _CACHED // max(1, outputs[0].numel()))
    return (slice(start, start + size) for start in range(0, len(outputs), size))


def _flat(inputs: Tensor, layout: torch.memory_format) -> Tensor:
    if layout == torch.channels_last:
        inputs = inputs.permute(0, 2, 3, 1)
    return inputs.contiguous().view(math.prod(inputs.shape))
