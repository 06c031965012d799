"""Forward and backward of ReLU, pooling and Flatten: of a ReLU a bit a number is kept, of pooling a byte a window.

On a GPU a ReLU keeps a byte a number: bits are packed by numpy, on the CPU alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from shared.subnetworks.frozen_layers import Kept, memory_layout
from shared.tensors.tree import Tree

_ATEN = torch.ops.aten
_SMALL = ((torch.uint8, 1 << 8), (torch.int16, 1 << 15))
"""Kinds of numbers, and how many from zero on."""
_CACHED = 1 << 18
"""Windows that are looked into at a time."""


@dataclass(frozen=True)
class Rectified:
    """ReLU; it writes over its inputs where nobody else reads these."""

    rows: int | None
    fresh: bool

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        outputs = inputs.relu_() if self.fresh else inputs.relu()
        counted = outputs if self.rows is None else outputs[:, : self.rows]
        lying = memory_layout(counted)
        if not counted.is_cpu:
            return outputs, (counted > 0,), lying
        bits = np.packbits(_flat(counted, lying).numpy() > 0)
        return outputs, (torch.from_numpy(bits),), lying

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert isinstance(note, torch.memory_format)
        upstream = upstream.contiguous(memory_format=note)
        if not upstream.is_cpu:
            return upstream.mul_(kept[0]), {}
        values = _flat(upstream, note).numpy()
        np.multiply(values, np.unpackbits(kept[0].numpy(), count=len(values)).view(np.bool_), out=values)
        return upstream, {}


@dataclass(frozen=True)
class Windows:
    """Where the windows of pooling lie in images of one shape.

    Attributes:
        count: Rows and columns of windows.
        dtype: Holds where a number stands in its window, counted along the channel's rows, or in its channel.
        corners: What to take from its place in the channel, of shape (1, C, rows, columns); None for nothing.
    """

    count: torch.Size
    dtype: torch.dtype
    corners: Tensor | None


@dataclass(frozen=True)
class Pooled:
    """The largest number of each window; kept is where it stands in its window."""

    rows: int | None
    size: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool
    known: dict[torch.Size, Windows] = field(default_factory=dict)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        shape, lying = inputs.shape, memory_layout(inputs)
        windows = self._windows(inputs)
        channels = shape[1] if self.rows is None else self.rows
        place = inputs.device
        outputs = torch.empty((*shape[:2], *windows.count), dtype=inputs.dtype, memory_format=lying, device=place)
        kept = torch.empty((shape[0], channels, *windows.count), dtype=windows.dtype, memory_format=lying, device=place)
        for some in _slices(outputs):
            places = torch.empty_like(outputs[some], dtype=torch.int64)
            _ATEN.max_pool2d_with_indices(inputs[some], *self._options(), out=outputs[some], indices=places)
            kept[some] = places[:, :channels]  # modulo 2^8
        if windows.corners is not None:
            kept.sub_(windows.corners.to(windows.dtype))  # so that what comes out is right, and cheap
        return outputs, (kept,), (torch.Size((shape[0], channels, *shape[2:])), windows)

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert isinstance(note, tuple)
        (own,), (shape, windows), lying = kept, note, memory_layout(kept[0])
        upstream = upstream.contiguous(memory_format=lying)
        below = torch.empty(shape, dtype=upstream.dtype, memory_format=lying, device=upstream.device)
        for some in _slices(upstream):
            places = own[some].to(torch.int64)
            if windows.corners is not None:
                places.add_(windows.corners)
            _ATEN.max_pool2d_with_indices_backward(
                upstream[some], below[some], *self._options(), places, grad_input=below[some]
            )
        return below, {}

    def _options(self) -> tuple[object, ...]:
        return self.size, self.stride, self.padding, self.dilation, self.ceil

    def _windows(self, inputs: Tensor) -> Windows:
        shape = inputs.shape[1:]
        if shape not in self.known:
            self.known.clear()
            self.known[shape] = self._found(inputs)
        return self.known[shape]

    def _found(self, inputs: Tensor) -> Windows:
        _, channels, height, width = inputs.shape
        channels = channels if self.rows is None else self.rows
        count = _ATEN.max_pool2d_with_indices(inputs[:1, :1], *self._options())[0].shape[2:]
        reach = (self.size[0] - 1) * self.dilation[0] * width + (self.size[1] - 1) * self.dilation[1]
        least = min(reach + 1, height * width)
        dtype = next((kind for kind, values in _SMALL if least <= values), torch.int32)
        if height * width == least:
            return Windows(count, dtype, None)
        down, right = (
            torch.arange(many, device=inputs.device) * stride - margin
            for many, stride, margin in zip(count, self.stride, self.padding, strict=True)
        )
        shape, lying = (1, channels, *count), memory_layout(inputs)
        corners = torch.empty(shape, dtype=torch.int64, memory_format=lying, device=inputs.device)
        return Windows(count, dtype, corners.copy_(down[:, None] * width + right))


@dataclass(frozen=True)
class Flat:
    """Flatten: each channel becomes a block of columns."""

    rows: int | None

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        channels = inputs.shape[1] if self.rows is None else self.rows
        return inputs.flatten(1), (), ((inputs.shape[0], channels, *inputs.shape[2:]), memory_layout(inputs))

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert not kept
        assert isinstance(note, tuple)
        shape, lying = note
        return upstream.reshape(shape).contiguous(memory_format=lying), {}


@dataclass(frozen=True)
class Other:
    """Any layer without parameters, by torch's own backward.

    Attributes:
        rows: Channels of the error signal, if it is detached.
    """

    layer: nn.Module
    rows: int | None

    def __post_init__(self) -> None:
        """Have the layer, a copy of somebody's, train, and leave its inputs as they are."""
        self.layer.train()
        if hasattr(self.layer, "inplace"):
            setattr(self.layer, "inplace", False)  # noqa: B010  # a kind of layer that has it

    def forward(self, inputs: Tensor) -> tuple[Tensor, Kept, object]:
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            outputs = self.layer(inputs)
        return outputs.detach(), (), (inputs, outputs)

    def backward(self, upstream: Tensor, kept: Kept, note: object, *, further: bool) -> tuple[Tensor | None, Tree]:
        assert further
        assert not kept
        assert isinstance(note, tuple)
        inputs, outputs = note
        if self.rows is not None:
            upstream = torch.cat([upstream, torch.zeros_like(outputs[:, self.rows :])], 1)
        (below,) = torch.autograd.grad(outputs, inputs, upstream)
        return below if self.rows is None else below[:, : self.rows].clone(), {}


def build_pooling(layer: nn.MaxPool2d, rows: int | None) -> Pooled:
    """Return a pooling layer's step."""
    size, stride, padding, dilation = (
        [value, value] if isinstance(value, int) else list(value)
        for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    return Pooled(rows, size, stride, padding, dilation, layer.ceil_mode)


def build_other(layer: nn.Module, rows: int | None) -> Other:
    """Return the step of a layer without parameters."""
    return Other(copy.deepcopy(layer), rows)


def _slices(outputs: Tensor) -> Iterator[slice]:
    """Divide a batch: torch's eight bytes a window shall stay in the processor's cache, and not take memory.

    Not on a GPU, which would have less to do at a time than it can.
    """
    if not outputs.is_cpu:
        return iter([slice(None)])
    many = max(1, _CACHED // max(1, outputs[0].numel()))
    return (slice(start, start + many) for start in range(0, len(outputs), many))


def _flat(inputs: Tensor, lying: torch.memory_format) -> Tensor:
    """Return the numbers as they lie in memory."""
    if lying == torch.channels_last:
        inputs = inputs.permute(0, 2, 3, 1)
    return inputs.contiguous().view(math.prod(inputs.shape))
