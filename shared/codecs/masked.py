"""Sparse codec: a bitmap of what is not zero, and those values as they are.

Floating leaves of two or more dimensions (option `dims`), the weights of convolutions and linear layers, are taken for
sparse whatever they hold: those are what pruning touches, and the bytes are a function of the counts alone. All others,
biases, BatchNorm's parameters and statistics, integers, travel as they are. With n values in sparse leaves, nnz of them
not zero, and n_other in the others, a payload of 32-bit floats has

    4 nnz + ⌈n / 8⌉ + 4 n_other bytes

(for other dtypes, as many as a value has in place of 4). One bitmap spans the sparse leaves in order, without gaps,
from the lowest bit of a byte on. Decoding gives zeros where nothing was sent; -0.0 is a zero and loses its sign. With
the coverage `holders` it also tells which values were sent: a mean is then one over the devices that hold a weight.

Own entries: `bitmap`, u8, and the values of every sparse leaf as a tree of one-dimensional leaves of the same names, as
another codec encodes it (`dense`, unless this one is chained), whose entries have its name and a slash before theirs.
Decoding takes at most 80 bytes of memory for each byte of a payload; its outline is checked before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.codecs import masked_entries
from shared.codecs.base import DTYPES, Codec, Coded, Memory, to_blob
from shared.codecs.dense import dense
from shared.codecs.masked_entries import Entries, Outline
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.bits import pack, unpack
from shared.tensors.tree import Tree

_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 16
"""Values put in their places at a time: the places take twice the memory of the values."""


def masked(*, dims: int = 2, coverage: str = "all") -> Codec:
    """Build the codec; for its options see `build_masked`."""
    return build_masked("dense", dense(), dims=dims, coverage=coverage)


def build_masked(name: str, inner: Codec, *, dims: int = 2, coverage: str = "all") -> Codec:
    """Build the codec over another one, which encodes the values that are sent.

    Args:
        dims: Leaves of fewer dimensions travel as they are.
        coverage: Who a mean is over: `all` devices, zeros included, or the `holders` of a value.

    Raises:
        ValueError: An option is none of these.
    """
    if coverage not in {"all", "holders"}:
        raise ValueError(f"coverage must be all or holders, not {coverage!r}")
    if dims < 0:
        raise ValueError("dims must be >= 0")
    prefix = f"{name}/"

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        sparse = masked_entries.divisible_leaves(tree, dims)
        kept = {key: (leaf != 0).flatten() for key, leaf in sparse.items()}
        values, memory = inner.encode({key: _gather(leaf, kept[key]) for key, leaf in sparse.items()}, memory)
        bitmap = pack(np.concatenate([np.empty(0, bool), *(mask.numpy() for mask in kept.values())]), 1)
        blobs = masked_entries.outline_leaves(tree, sparse.keys()) | {"bitmap": to_blob(torch.from_numpy(bitmap))}
        return Payload(codec="masked", blobs=blobs | {prefix + key: blob for key, blob in values.blobs.items()}), memory

    def decode(payload: Payload) -> Coded:
        below, held = masked_entries.select_prefix(masked_entries.read_entries(payload, "masked"), prefix)
        kept = _read_masks(held)
        values = _values(inner, Payload(codec=name, blobs=below), held.outlines, kept)
        filled = {key: _scatter(outline, kept[key], values[key]) for key, outline in held.outlines.items()}
        masks = {key: torch.from_numpy(kept[key]).view(leaf.shape) for key, leaf in filled.items()}
        return Coded(held.tree(filled), masks if coverage == "holders" else {})

    return Codec(encode, decode, lambda payload: masked_entries.read_entries(payload, "masked").hollow())


def _gather(leaf: Tensor, kept: Tensor) -> Tensor:
    """Return the values that are kept; as integers of their size they are picked, since numpy knows no bfloat16."""
    bits = leaf.detach().flatten().view(_INTS[leaf.itemsize]).numpy()
    return torch.from_numpy(np.compress(kept.numpy(), bits)).view(leaf.dtype)


def _read_masks(held: Entries) -> dict[str, NDArray[np.bool_]]:
    """Return which values of each outlined leaf were sent."""
    outlines = held.outlines
    bitmap = masked_entries.read_codec_blobs(held, {"bitmap": ("u8", 1)})["bitmap"]
    counts = [outline.count for outline in outlines.values()]
    bits = unpack(bitmap.numpy(), sum(counts), 1).view(bool)
    return dict(zip(outlines, np.split(bits, np.cumsum(counts)[:-1]), strict=True)) if outlines else {}


def _values(inner: Codec, payload: Payload, outlines: dict[str, Outline], kept: dict[str, NDArray[np.bool_]]) -> Tree:
    """Return the values that were sent, as many as there are bits, of the leaves' dtypes."""
    values = inner.outline(payload)
    if values.keys() != outlines.keys():
        raise WireError(f"values of {sorted(values)[:8]}, bits of {sorted(outlines)[:8]}", reason="unknown-tensor")
    for key, found in values.items():
        if found.dtype != DTYPES[outlines[key].dtype]:
            raise WireError(f"{key!r} of {outlines[key].dtype} has values of {found.dtype}", reason="dtype")
        if found.shape != (int(np.count_nonzero(kept[key])),):
            raise WireError(f"{key!r} has values of shape {tuple(found.shape)}, not one a bit", reason="shape")
    return inner.decode(payload).tree


def _scatter(outline: Outline, kept: NDArray[np.bool_], values: Tensor) -> Tensor:
    """Return the leaf with its values in their places."""
    bits = values.contiguous().view(_INTS[values.itemsize])
    flat = torch.zeros(len(kept), dtype=bits.dtype)
    taken = 0
    for start in range(0, len(kept), _CHUNK):
        places = np.flatnonzero(kept[start : start + _CHUNK])
        flat.numpy()[start + places] = bits.numpy()[taken : taken + len(places)]
        taken += len(places)
    return outline.filled(flat.view(values.dtype))
