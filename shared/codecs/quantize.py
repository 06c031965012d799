"""Stochastic quantization codec: a sign and q bits of magnitude per value.

M values take ⌈M (q + 1) / 8⌉ + 8 bytes, including the least and the greatest magnitude as 32-bit floats. With scope
`leaf`, M counts one leaf's values, and each leaf has its own range and bytes; with `tree`, it counts those of all
floating leaves together, as in the paper's formula. Integers travel unchanged, and so do scalars, such as a loss beside
gradients, unless `dims` is 0. To leave BatchNorm's statistics untouched, `dims = 2` quantizes only kernels and
matrices. float64 leaves lose precision beyond float32.

Random draws depend on the tree's content: on the XXH3-128 of the quantized leaves, and on the option `seed`. So
encoding is pure: a repeated task, after a crash or in a replay, gives the same bytes, without any state. Values are not
chosen to fit their digest, so over trees that differ in any bit, of several devices, rounds or steps, the draws are
independent and uniform, and the error has zero mean. Only encoding the same tree again makes the same error again. A
test measures the bias over trees that differ in one bit.

A payload describes itself; options are the encoder's. Entries beside the leaves': `bits`, of shape (0, q) and no bytes;
`range`, f32 of shape (ranges, 2); `codes`, u8, range by range as `shared.tensors.bits` packs them, of q bits of
magnitude below a sign. Decoding takes at most 64 bytes of memory for each byte of a payload.
"""

from __future__ import annotations

import math
from operator import index

import numpy as np
import torch
from torch import Generator, Tensor

from shared.codecs import masked_entries
from shared.codecs.base import Codec, Coded, Memory
from shared.codecs.content_draws import read_seed, seed_from_content
from shared.codecs.dense import DTYPES, to_blob
from shared.codecs.masked_entries import Outline
from shared.errors import WireError
from shared.protocol.messages import Blob, Payload
from shared.tensors import quantizer
from shared.tensors.bits import Numbers, pack, packed_bytes, unpack
from shared.tensors.tree import Tree

MAX_BITS = 16


def quantize(*, bits: int = 8, scope: str = "leaf", dims: int = 1, seed: int = 0, exact: str = "") -> Codec:
    """Build the codec.

    Args:
        bits: q, bits of a magnitude, 1 to 16.
        scope: Values that share a range of magnitudes: those of each `leaf`, or of the whole `tree`.
        dims: Leaves of fewer dimensions travel unchanged.
        seed: Additional seed of the random draws.
        exact: Names of leaves that travel unchanged, separated by commas, such as `gradient` at the cut of a network.

    Raises:
        ValueError: An option is out of range.
    """
    if not 1 <= bits <= MAX_BITS or dims < 0:
        raise ValueError(f"bits must be 1 to {MAX_BITS}, dims >= 0; they are {bits} and {dims}")
    if scope not in {"leaf", "tree"}:
        raise ValueError(f"scope must be leaf or tree, not {scope!r}")
    bits, seed, names = index(bits), read_seed(seed), masked_entries.read_names(exact)

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        divisible = masked_entries.divisible_leaves(tree, dims, names)
        leaves = [*divisible.values()]
        groups = [[leaf] for leaf in leaves] if scope == "leaf" else [leaves] if leaves else []
        generator = seed_from_content(leaves, seed)
        ranges, packed = torch.empty(len(groups), 2), [np.empty(0, np.uint8)]
        for place, group in enumerate(groups):
            ranges[place] = _magnitude_range(group)
            packed.append(pack(_quantize_values(group, bits, ranges[place], generator), bits + 1))
        blobs = masked_entries.outline_leaves(tree, divisible.keys())
        blobs["bits"] = Blob("u8", (0, bits), memoryview(b""))
        blobs["range"] = to_blob(ranges)
        blobs["codes"] = to_blob(torch.from_numpy(np.concatenate(packed)))
        return Payload(codec="quantize", blobs=blobs), memory

    return Codec(encode, _decode, lambda payload: masked_entries.read_entries(payload, "quantize").hollow())


def _magnitude_range(leaves: list[Tensor]) -> Tensor:
    """Return the least and the greatest magnitude of several leaves; NaN if any value is."""
    spans = torch.tensor([quantizer.magnitude_range(leaf) for leaf in leaves if leaf.numel()] or [(0.0, 0.0)])
    return torch.stack([spans[:, 0].amin(), spans[:, 1].amax()])


def _quantize_values(leaves: list[Tensor], bits: int, limits: Tensor, generator: Generator) -> Numbers:
    """Return the codes of all values in order; zeros if the range is not finite."""
    low, high = limits.tolist()
    if not math.isfinite(high):
        return np.zeros(sum(leaf.numel() for leaf in leaves), np.uint8)
    codes = [quantizer.quantize_codes(leaf.flatten(), bits, low, high, generator).numpy() for leaf in leaves]
    return codes[0] if len(codes) == 1 else np.concatenate(codes)


def _decode(payload: Payload) -> Coded:
    entries = masked_entries.read_entries(payload, "quantize")
    blobs = masked_entries.read_codec_blobs(entries, {"bits": ("u8", 2), "range": ("f32", 2), "codes": ("u8", 1)})
    (none, bits), outlines = blobs["bits"].shape, entries.outlines
    if none or not 1 <= bits <= MAX_BITS:
        raise WireError(f"{bits} bits per magnitude, at most {MAX_BITS} are allowed")
    groups = _group_leaves(outlines, blobs["range"])
    counts = [sum(outline.count for outline in group.values()) for group in groups]
    sizes = [packed_bytes(count, bits + 1) for count in counts]
    if sum(sizes) != len(blobs["codes"]):
        raise WireError(f"{len(blobs['codes'])} bytes of codes for {sum(counts)} values of {bits} bits", reason="shape")
    filled: Tree = {}
    packed = blobs["codes"].split(sizes)
    for group, count, part, limits in zip(groups, counts, packed, blobs["range"].tolist(), strict=True):
        low, high = _check_range(limits, group)
        codes = torch.from_numpy(unpack(part.numpy(), count, bits + 1))
        parts = codes.split([outline.count for outline in group.values()])
        for (key, outline), leaf_codes in zip(group.items(), parts, strict=True):
            values = quantizer.dequantize(leaf_codes, bits, low, high)
            filled[key] = outline.fill_leaf(values.to(DTYPES[outline.dtype]))
    return Coded(entries.tree(filled), {})


def _group_leaves(outlines: dict[str, Outline], ranges: Tensor) -> list[dict[str, Outline]]:
    if ranges.shape == (len(outlines), 2):
        return [{key: outline} for key, outline in outlines.items()]
    if ranges.shape == (1, 2) and outlines:
        return [outlines]
    raise WireError(f"ranges of shape {tuple(ranges.shape)} for {len(outlines)} tensors", reason="shape")


def _check_range(limits: list[float], group: dict[str, Outline]) -> tuple[float, float]:
    low, high = limits
    largest = min(torch.finfo(DTYPES[outline.dtype]).max for outline in group.values())
    if not (math.isfinite(low) and high <= largest):
        raise WireError(f"magnitudes of {low} to {high}", reason="not-finite")
    if not 0 <= low <= high:
        raise WireError(f"magnitudes of {low} to {high}")
    return low, high
