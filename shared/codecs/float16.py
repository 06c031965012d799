"""Half-precision codec: 16-bit values, scaled by a power of two per leaf.

M values of a leaf take 2 M + 1 bytes. Scaled by its own power of two a leaf's largest magnitude is 2^14 to 2^15, so
that nothing overflows, and magnitudes of at least 2^-28 of the largest keep 11 bits: gradients at a cut, millionths
each, would lose half of theirs without. Rounding is to nearest, ties to even: no randomness, no memory. Integers,
scalars and leaves of 16 bits travel unchanged; float64 leaves lose precision beyond float32.

Entries beside the leaves' outlines: `exponents`, i8, one per leaf: values were multiplied by two to that power; and
`values`, f16, leaf by leaf. NaN and infinity are preserved, for the receiver to reject.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.codecs import masked_entries
from shared.codecs.base import Codec, Coded, Memory
from shared.codecs.dense import DTYPES, to_blob
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors import quantizer
from shared.tensors.tree import Tree

BYTES = 2
"""Bytes per value."""
_HIGHEST = 15
"""Power of two above all scaled magnitudes; float16 ends just below the sixteenth."""
_MOST_EXPONENT = 126
"""Largest power of two of which the power and its inverse are normal float32."""


def float16(*, dims: int = 1, exact: str = "") -> Codec:
    """Build the codec.

    Args:
        dims: Leaves of fewer dimensions travel unchanged.
        exact: Names of leaves that travel unchanged, separated by commas, such as `gradient` at the cut of a network.

    Raises:
        ValueError: `dims` is negative.
    """
    if dims < 0:
        raise ValueError(f"dims must be >= 0; it is {dims}")
    names = masked_entries.read_names(exact)

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        leaves = masked_entries.divisible_leaves(tree, dims, names)
        leaves = {key: leaf for key, leaf in leaves.items() if leaf.itemsize > BYTES}
        exponents = [_exponent(leaf) for leaf in leaves.values()]
        scaled = [_scale(leaf, exponent) for leaf, exponent in zip(leaves.values(), exponents, strict=True)]
        blobs = masked_entries.outline_leaves(tree, leaves.keys())
        blobs["exponents"] = to_blob(torch.tensor(exponents, dtype=torch.int8))
        blobs["values"] = to_blob(torch.cat([torch.empty(0, dtype=torch.float16), *scaled]))
        return Payload(codec="float16", blobs=blobs), memory

    return Codec(encode, _decode, lambda payload: masked_entries.read_entries(payload, "float16").hollow())


def _exponent(leaf: Tensor) -> int:
    """Return the power of two that scales the largest magnitude below 2^15; 0 where there is none."""
    _, high = quantizer.magnitude_range(leaf)
    if not high or not math.isfinite(high):
        return 0
    return max(-_MOST_EXPONENT, min(_HIGHEST - math.frexp(high)[1], _MOST_EXPONENT))


def _scale(leaf: Tensor, exponent: int) -> Tensor:
    return leaf.detach().flatten().to(torch.float32).mul(2.0**exponent).to(torch.float16)


def _decode(payload: Payload) -> Coded:
    entries = masked_entries.read_entries(payload, "float16")
    blobs = masked_entries.read_codec_blobs(entries, {"exponents": ("i8", 1), "values": ("f16", 1)})
    outlines, exponents = entries.outlines, blobs["exponents"].tolist()
    counts = [outline.count for outline in outlines.values()]
    if len(exponents) != len(counts) or sum(counts) != len(blobs["values"]):
        counted = f"{len(blobs['values'])} values and {len(exponents)} exponents"
        raise WireError(f"{counted} for {sum(counts)} values of {len(counts)} tensors", reason="shape")
    if any(abs(exponent) > _MOST_EXPONENT for exponent in exponents):
        raise WireError(f"exponents of {min(exponents)} to {max(exponents)}")
    filled: Tree = {}
    parts = blobs["values"].split(counts)
    for (key, outline), values, exponent in zip(outlines.items(), parts, exponents, strict=True):
        filled[key] = outline.fill_leaf(values.to(torch.float32).mul_(2.0**-exponent).to(DTYPES[outline.dtype]))
    return Coded(entries.tree(filled), {})
