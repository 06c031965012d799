"""Sparse codec: a bitmap of nonzero values, and these values unchanged.

Floating leaves of two or more dimensions (option `dims`), the weights of convolutions and linear layers, are treated as
sparse: those are what pruning touches, and the bytes depend on the counts alone. All others, biases, BatchNorm's
parameters and statistics, integers, travel unchanged. With n values in sparse leaves, nnz of them nonzero, and n_other
in the others, a payload of 32-bit floats has

    4 nnz + ⌈n / 8⌉ + 4 n_other bytes

(for other dtypes, their value size in place of 4). One bitmap spans the sparse leaves in order, without gaps, lowest
bit of a byte first. Missing values decode to zero; -0.0 counts as zero and loses its sign. With the coverage `holders`
decoding also returns which values were sent, for a mean over the devices that hold a weight.

Entries: `bitmap`, u8, and the values of the sparse leaves as a tree of one-dimensional leaves of the same names, as
another codec encodes it (`dense`, unless chained), whose entries have its name and a slash as prefix. Decoding takes at
most 80 bytes of memory for each byte of a payload; its outline is checked before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.codecs import masked_entries
from shared.codecs.base import Codec, Coded, Memory
from shared.codecs.dense import DTYPES, dense, to_blob
from shared.codecs.masked_entries import Entries, Outline
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.bits import pack, unpack
from shared.tensors.tree import Tree

_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 16
"""Values per chunk when scattering: positions take twice the memory of the values."""


def masked(*, dims: int = 2, coverage: str = "all") -> Codec:
    """Build the codec; for its options see `build_masked`."""
    return build_masked("dense", dense(), dims=dims, coverage=coverage)


def build_masked(name: str, inner: Codec, *, dims: int = 2, coverage: str = "all") -> Codec:
    """Build the codec with another codec for the values.

    Args:
        dims: Leaves of fewer dimensions travel unchanged.
        coverage: Devices in a mean: `all`, zeros included, or the `holders` of a value.

    Raises:
        ValueError: An option is out of range.
    """
    if coverage not in {"all", "holders"}:
        raise ValueError(f"coverage must be all or holders, not {coverage!r}")
    if dims < 0:
        raise ValueError("dims must be >= 0")
    prefix = f"{name}/"

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        sparse = masked_entries.divisible_leaves(tree, dims)
        masks = {key: (leaf != 0).flatten() for key, leaf in sparse.items()}
        values, memory = inner.encode({key: _gather(leaf, masks[key]) for key, leaf in sparse.items()}, memory)
        bitmap = pack(np.concatenate([np.empty(0, bool), *(mask.numpy() for mask in masks.values())]), 1)
        blobs = masked_entries.outline_leaves(tree, sparse.keys()) | {"bitmap": to_blob(torch.from_numpy(bitmap))}
        return Payload(codec="masked", blobs=blobs | {prefix + key: blob for key, blob in values.blobs.items()}), memory

    def decode(payload: Payload) -> Coded:
        below, entries = masked_entries.select_prefix(masked_entries.read_entries(payload, "masked"), prefix)
        masks = _read_masks(entries)
        values = _decode_values(inner, Payload(codec=name, blobs=below), entries.outlines, masks)
        filled = {key: _scatter(outline, masks[key], values[key]) for key, outline in entries.outlines.items()}
        coverage_masks = {key: torch.from_numpy(masks[key]).view(leaf.shape) for key, leaf in filled.items()}
        return Coded(entries.tree(filled), coverage_masks if coverage == "holders" else {})

    return Codec(encode, decode, lambda payload: masked_entries.read_entries(payload, "masked").hollow())


def _gather(leaf: Tensor, mask: Tensor) -> Tensor:
    """Return the selected values; copied as integers of the same size, since numpy lacks bfloat16."""
    bits = leaf.detach().flatten().view(_INTS[leaf.itemsize]).numpy()
    return torch.from_numpy(np.compress(mask.numpy(), bits)).view(leaf.dtype)


def _read_masks(entries: Entries) -> dict[str, NDArray[np.bool_]]:
    outlines = entries.outlines
    bitmap = masked_entries.read_codec_blobs(entries, {"bitmap": ("u8", 1)})["bitmap"]
    counts = [outline.count for outline in outlines.values()]
    bits = unpack(bitmap.numpy(), sum(counts), 1).view(bool)
    return dict(zip(outlines, np.split(bits, np.cumsum(counts)[:-1]), strict=True)) if outlines else {}


def _decode_values(
    inner: Codec, payload: Payload, outlines: dict[str, Outline], masks: dict[str, NDArray[np.bool_]]
) -> Tree:
    """Return the sent values, checked against the masks and the leaves' dtypes."""
    values = inner.outline(payload)
    if values.keys() != outlines.keys():
        raise WireError(f"values of {sorted(values)[:8]}, bits of {sorted(outlines)[:8]}", reason="unknown-tensor")
    for key, leaf in values.items():
        if leaf.dtype != DTYPES[outlines[key].dtype]:
            raise WireError(f"{key!r} of {outlines[key].dtype} has values of {leaf.dtype}", reason="dtype")
        if leaf.shape != (int(np.count_nonzero(masks[key])),):
            raise WireError(f"{key!r} has values of shape {tuple(leaf.shape)}, not one a bit", reason="shape")
    return inner.decode(payload).tree


def _scatter(outline: Outline, mask: NDArray[np.bool_], values: Tensor) -> Tensor:
    bits = values.contiguous().view(_INTS[values.itemsize])
    flat = torch.zeros(len(mask), dtype=bits.dtype)
    written = 0
    for start in range(0, len(mask), _CHUNK):
        places = np.flatnonzero(mask[start : start + _CHUNK])
        flat.numpy()[start + places] = bits.numpy()[written : written + len(places)]
        written += len(places)
    return outline.fill_leaf(flat.view(values.dtype))
