"""Stochastic quantization of magnitudes to q bits, unbiased.

Zhang, Ni, Wang, lightweight federated split learning, equations (11) and (12); the scheme is that of Alistarh et al.,
QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017,
https://arxiv.org/abs/1610.02132, with the range taken from the values. With g_min, g_max the least and the greatest
|g|, there are 2^q knots n_u = g_min + u Δ, Δ = (g_max - g_min) / (2^q - 1), and with x = (|g| - g_min) / Δ, u = ⌊x⌋

    Q(g) = sign(g) n_{u+1} with probability x - u, else sign(g) n_u

so that E Q(g) = g and E (Q(g) - g)² = Δ² (x - u)(1 - x + u). Here `bits` is q, `low` is g_min, `high` is g_max. With
few bits, a value within a few units in the last place of a knot is mapped to that knot, as x - u is only rounding
there. With more bits, those units are a considerable part of Δ: the neighbours are the knots as 32-bit floats, which
the receiver reads, and the probability is relative to these two. So E Q(g) = g at every q, and Q(Q(g)) is Q(g), unless
the numbers are so small that 32-bit floats lose digits of them.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

MAX_BITS = 32
_CHUNK = 1 << 14
"""Values per chunk: intermediate results fit into the cache, and torch does not use several threads, whose waiting
would take longer than their work."""
_NARROW_BITS = 8
"""Maximum bits for which 32-bit floats resolve the position of a value between two knots; else the knots are
compared."""
_SHORT_DRAW_BITS = 12
"""Maximum bits for which random draws are 32-bit floats; else 64-bit floats."""
_TABLE_BITS = 16
"""Maximum bits for a lookup table of the codes' values, if there are more values than knots."""


def quantize(values: Tensor, bits: int, generator: Generator) -> tuple[Tensor, float, float]:
    """Round every value to one of its two neighbouring knots, at random.

    Args:
        values: Of any shape, floating. Zeros make `low` zero, and stay zero; to exclude them from the range, pass only
            the others.
        bits: q, 1 to 32.
        generator: One number is drawn per value.

    Returns:
        Codes of the values' shape, `low` and `high`. A code is u, with 2^q added where the value is negative.

    Raises:
        ValueError: A value is NaN or infinite, or `bits` is out of range.
    """
    low, high = magnitude_range(values)
    if not math.isfinite(high):
        raise ValueError("a value to quantize is NaN or infinite")
    return quantize_codes(values, bits, low, high, generator), low, high


def magnitude_range(values: Tensor) -> tuple[float, float]:
    """Return the least and the greatest magnitude as 32-bit floats; NaN if any value is; zeros without values."""
    parts = values.detach().flatten().split(_CHUNK) if values.numel() else ()
    extremes = [torch.stack(torch.aminmax(part.abs())) for part in parts]
    if not extremes:
        return 0.0, 0.0
    low, high = torch.stack(extremes).to(torch.float32).unbind(1)
    return low.amin().item(), high.amax().item()


def quantize_codes(values: Tensor, bits: int, low: float, high: float, generator: Generator) -> Tensor:
    """Quantize values of a known range of magnitudes, at random; equations (11) and (12).

    Args:
        values: Of any shape, floating.
        bits: q, 1 to 32.
        low: The least magnitude, finite, from `magnitude_range`.
        high: The greatest magnitude, g_max.
        generator: One number is drawn per value.

    Returns:
        Codes of the values' shape, of the smallest dtype that holds them.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be 1 to {MAX_BITS}, not {bits}")
    flat = values.detach().flatten()
    codes = torch.empty(flat.shape, dtype=_code_dtype(bits))
    scale = ((1 << bits) - 1) / (high - low) if high > low else 0.0
    narrow = scale < torch.finfo(torch.float32).max and flat.dtype != torch.float64
    dtype = torch.float32 if narrow and bits <= _SHORT_DRAW_BITS else torch.float64
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].to(dtype)
        if bits <= _NARROW_BITS:
            codes[start : start + _CHUNK] = _fast_codes(part, bits, low, scale, generator)
        else:
            chance = torch.rand(part.shape, generator=generator, dtype=dtype)
            codes[start : start + _CHUNK] = _exact_codes(part.double(), bits, (low, high), chance)
    return codes.view(values.shape)


def _fast_codes(values: Tensor, bits: int, low: float, scale: float, generator: Generator) -> Tensor:
    """Return the codes as floats, which represent them exactly; `scale` is 1 / Δ."""
    magnitudes = values.abs()
    x = (magnitudes - low).mul_(scale).clamp_(0.0, float((1 << bits) - 1))
    fraction = x.frac()
    below = x.sub_(fraction)  # exact; not `floor`, for which MKL wakes all its threads at each chunk
    # Stretched around one half, a fraction within rounding of 0 or 1 becomes 0 or 1.
    rounding = magnitudes.mul_(16 * torch.finfo(torch.float32).eps * scale)
    chance = torch.addcmul(fraction, fraction - 0.5, rounding)
    # Comparisons in place give floats, four times as fast as a tensor of bools.
    below.add_(chance.gt_(torch.rand(values.shape, generator=generator, dtype=values.dtype)))
    return below.add_(rounding.copy_(values).lt_(0), alpha=1 << bits)


def _exact_codes(values: Tensor, bits: int, limits: tuple[float, float], drawn: Tensor) -> Tensor:
    """Return the codes, each a random choice of the two 32-bit knots around the value, or the knot that equals it."""
    (low, high), top = limits, (1 << bits) - 1
    magnitudes = values.abs()
    below = (magnitudes - low).mul_(top / (high - low) if high > low else 0.0).clamp_(0, top).long()
    under = _knot_magnitudes(below, bits, low, high)
    below = (below - (under > magnitudes).long()).clamp_(0, top)  # the knot was rounded up beyond the value
    below += _knot_magnitudes((below + 1).clamp_(max=top), bits, low, high) <= magnitudes
    below.clamp_(max=top)
    under, over = (_knot_magnitudes(place, bits, low, high).double() for place in (below, (below + 1).clamp_(max=top)))
    chance = torch.where(over > under, (magnitudes - under) / (over - under), 0.0)
    return below.add_(chance > drawn).clamp_(max=top).add_((values < 0).long() << bits)


def _code_dtype(bits: int) -> torch.dtype:
    sizes = ((8, torch.uint8), (15, torch.int16), (31, torch.int32))
    return next((dtype for width, dtype in sizes if bits + 1 <= width), torch.int64)


def dequantize(codes: Tensor, bits: int, low: float, high: float) -> Tensor:
    """Return the knots of codes, 32-bit floats of their shape; the outermost are `low` and `high`.

    Args:
        codes: Of any shape, from `quantize`.
        bits: q, 1 to 32.
        low: g_min, the least magnitude.
        high: g_max, the greatest magnitude.
    """
    flat = codes.flatten()
    table = knots(bits, low, high) if bits <= _TABLE_BITS and 1 << bits < len(flat) else None
    values = torch.empty(flat.shape, dtype=torch.float32)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        values[start : start + _CHUNK] = (
            _code_values(part.long(), bits, low, high) if table is None else table.index_select(0, part.int())
        )
    return values.view(codes.shape)


def _code_values(codes: Tensor, bits: int, low: float, high: float) -> Tensor:
    magnitudes = _knot_magnitudes(codes & ((1 << bits) - 1), bits, low, high)
    return torch.where(codes >> bits > 0, -magnitudes, magnitudes)


def knots(bits: int, low: float, high: float) -> Tensor:
    """Return the values of all 2^(q + 1) codes, 32-bit floats.

    Args:
        low: g_min, the least magnitude.
        high: g_max, the greatest magnitude.
    """
    magnitudes = _knot_magnitudes(torch.arange(1 << bits), bits, low, high)
    return torch.cat([magnitudes, -magnitudes])


def _knot_magnitudes(places: Tensor, bits: int, low: float, high: float) -> Tensor:
    share = places.double().div_((1 << bits) - 1)
    return share.mul_(high - low).add_(low).float()
