"""The stochastic q-bit quantizer on the wire: one sign bit and q bits of magnitude a value.

M values take ⌈M (q + 1) / 8⌉ + 8 bytes, two 32-bit floats among them: the least and the greatest magnitude. With scope
`leaf`, M counts one leaf's values, and each leaf has a range and bytes of its own; with `tree`, it counts those of all
floating leaves together, which is what the paper's formula means. Integers travel as they are, and so do scalars, such
as a loss beside gradients, unless `dims` is 0. Where BatchNorm's statistics must not be touched, `dims = 2` leaves all
but kernels and matrices alone. float64 leaves lose what float32 does not hold.

What is drawn is a function of the tree's content: of the XXH3-128 of the quantized leaves, and of the option `seed`. So
encoding is pure: a task done twice, after a crash or in a replay, gives the same bytes, and nothing need be remembered.
Nobody chooses values to suit their digest, so over trees that differ in any bit, those of several devices, rounds or
steps, the draws are independent and uniform, and their mean is without bias. Only who encodes the very same tree again
makes the very same error again. A test measures the bias over trees that differ in one bit.

A payload says for itself how it is to be read; options are the encoder's. Its own entries beside the leaves': `bits`,
of shape (0, q) and no bytes; `range`, f32 of shape (ranges, 2); `codes`, u8, range by range as `shared.tensors.bits`
packs them, of q bits of magnitude below a sign. Decoding takes at most 64 bytes of memory for each byte of a payload.
"""

from __future__ import annotations

import math
from operator import index

import numpy as np
import torch
from torch import Generator, Tensor

from shared.codecs import masked_entries
from shared.codecs.base import DTYPES, Codec, Coded, Memory, to_blob
from shared.codecs.content_draws import draw_from, read_seed
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
        scope: What shares one range of magnitudes: each `leaf` for itself, or the whole `tree`.
        dims: Leaves of fewer dimensions travel as they are.
        seed: Goes into what is drawn.
        exact: Names of leaves that travel as they are, parted by commas, such as `gradient` at the cut of a network.

    Raises:
        ValueError: An option is none of these.
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
        generator = draw_from(leaves, seed)
        ranges, packed = torch.empty(len(groups), 2), [np.empty(0, np.uint8)]
        for place, group in enumerate(groups):
            ranges[place] = _span(group)
            packed.append(pack(_codes(group, bits, ranges[place], generator), bits + 1))
        blobs = masked_entries.outline_leaves(tree, divisible.keys())
        blobs["bits"] = Blob("u8", (0, bits), memoryview(b""))
        blobs["range"] = to_blob(ranges)
        blobs["codes"] = to_blob(torch.from_numpy(np.concatenate(packed)))
        return Payload(codec="quantize", blobs=blobs), memory

    return Codec(encode, _decode, lambda payload: masked_entries.read_entries(payload, "quantize").hollow())


def _span(leaves: list[Tensor]) -> Tensor:
    """Return the least and the greatest magnitude of several leaves; NaN if one is."""
    spans = torch.tensor([quantizer.magnitude_range(leaf) for leaf in leaves if leaf.numel()] or [(0.0, 0.0)])
    return torch.stack([spans[:, 0].amin(), spans[:, 1].amax()])


def _codes(leaves: list[Tensor], bits: int, limits: Tensor, generator: Generator) -> Numbers:
    """Return the codes of all values in order; where one of them is no number, zeros, as the range tells it."""
    low, high = limits.tolist()
    if not math.isfinite(high):
        return np.zeros(sum(leaf.numel() for leaf in leaves), np.uint8)
    found = [quantizer.quantize_codes(leaf.flatten(), bits, low, high, generator).numpy() for leaf in leaves]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _decode(payload: Payload) -> Coded:
    held = masked_entries.read_entries(payload, "quantize")
    mine = masked_entries.read_codec_blobs(held, {"bits": ("u8", 2), "range": ("f32", 2), "codes": ("u8", 1)})
    (none, bits), outlines = mine["bits"].shape, held.outlines
    if none or not 1 <= bits <= MAX_BITS:
        raise WireError(f"{bits} bits a magnitude, at most {MAX_BITS} may be")
    groups = _groups(outlines, mine["range"])
    counts = [sum(outline.count for outline in group.values()) for group in groups]
    sizes = [packed_bytes(count, bits + 1) for count in counts]
    if sum(sizes) != len(mine["codes"]):
        raise WireError(f"{len(mine['codes'])} bytes of codes for {sum(counts)} values of {bits} bits", reason="shape")
    filled: Tree = {}
    packed = mine["codes"].split(sizes)
    for group, count, part, limits in zip(groups, counts, packed, mine["range"].tolist(), strict=True):
        low, high = _checked(limits, group)
        codes = torch.from_numpy(unpack(part.numpy(), count, bits + 1))
        for (key, outline), own in zip(group.items(), codes.split([one.count for one in group.values()]), strict=True):
            filled[key] = outline.filled(_values(own, bits, low, high, outline.dtype))
    return Coded(held.tree(filled), {})


def _groups(outlines: dict[str, Outline], ranges: Tensor) -> list[dict[str, Outline]]:
    """Return the leaves that share a range: each its own, or all of them one."""
    if ranges.shape == (len(outlines), 2):
        return [{key: outline} for key, outline in outlines.items()]
    if ranges.shape == (1, 2) and outlines:
        return [outlines]
    raise WireError(f"ranges of shape {tuple(ranges.shape)} for {len(outlines)} tensors", reason="shape")


def _checked(limits: list[float], group: dict[str, Outline]) -> tuple[float, float]:
    low, high = limits
    largest = min(torch.finfo(DTYPES[outline.dtype]).max for outline in group.values())
    if not (math.isfinite(low) and high <= largest):
        raise WireError(f"magnitudes of {low} to {high}", reason="not-finite")
    if not 0 <= low <= high:
        raise WireError(f"magnitudes of {low} to {high}")
    return low, high


def _values(codes: Tensor, bits: int, low: float, high: float, dtype: str) -> Tensor:
    return quantizer.dequantize(codes, bits, low, high).to(DTYPES[dtype])
