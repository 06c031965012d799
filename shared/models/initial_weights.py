"""Initial weights whose bits are the same on every machine: Philox streams, and a normal distribution of exact steps.

torch's own draws are not: `normal_` takes a vector unit's logarithm and cosine, and so gives other bits on a board than
on the server, which a model that never travels would begin with.

Here every parameter has a stream of its own, named by the seed and the parameter. Its 32-bit words k become numbers
q = (k + 1/2) / 2^32 - 1/2, and these normal ones by their quantiles. All of it is +, -, *, / and the square root, which
IEEE 754 rounds in one way only, in 64 bits, one operation at a time (a processor that fuses two would round once less).

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw. Parallel Random Numbers: As Easy as 1, 2, 3. SC 2011.
https://doi.org/10.1145/2063384.2063405
M. J. Wichura. Algorithm AS 241: The Percentage Points of the Normal Distribution. Applied Statistics 37(3), 1988.
https://doi.org/10.2307/2347330, its PPND7: 7 digits, as many as a weight of 32 bits has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint32]

BLOCK = 1 << 14
"""Numbers that are computed at once: as many as a processor's cache holds with all that comes of them in between."""

CENTRE, CENTRE_SQUARE, TAIL = 0.425, 0.180625, 1.6
"""AS 241: where its middle part ends, that squared, and where its outer part is developed."""
CENTRE_OVER = (3.3871327179, 5.0434271938e1, 1.5929113202e2, 5.9109374720e1)
CENTRE_UNDER = (1.0, 1.7895169469e1, 7.8757757664e1, 6.7187563600e1)
TAIL_OVER = (1.4234372777, 2.7568153900, 1.3067284816, 1.7023821103e-1)
TAIL_UNDER = (1.0, 7.3700164250e-1, 1.2021132975e-1)
"""Coefficients from the constant one up. A third part is for probabilities below e^-25, and none is below 2^-33."""

LOG_2, LOG_MIDDLE, MIDDLE = 0.6931471805599453, -0.2876820724517809, 0.75
"""ln 2 and ln 3/4, to the bit."""
ATANH = (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11)
"""atanh(s) / s in powers of s^2, for |s| <= 1/5."""


def fill(layers: nn.Sequential, seed: int, *, he_normal: bool) -> None:
    """Write the first weights into a network's parameters and buffers, whatever is in them.

    Args:
        layers: Of convolutions, linear layers, normalisation over a batch, and layers without parameters.
        seed: Other seeds give other weights.
        he_normal: Whether weights are normal with a variance of 2 / fan_in, 1 / fan_in in the last layer, and biases
            zero (`shared.models.kaiming`); or both uniform within 1 / sqrt(fan_in), as torch's are.

    Raises:
        TypeError: A layer has parameters, and nothing here says how they begin.
    """
    for prefix, layer in layers.named_modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            variance = (1.0 if layer is layers[-1] else 2.0) / fan_in
            draw, scale = (normal, math.sqrt(variance)) if he_normal else (uniform, 2.0 / math.sqrt(fan_in))
            _write(layer.weight, words(seed, f"{prefix}.weight"), draw, scale)
            if layer.bias is not None and he_normal:
                layer.bias.detach().zero_()
            elif layer.bias is not None:
                _write(layer.bias, words(seed, f"{prefix}.bias"), uniform, scale)
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros
        elif layer._parameters or layer._buffers:  # noqa: SLF001 - its own, not those of layers inside it
            raise TypeError(f"no first weights are known for a {type(layer).__name__}")


def words(seed: int, name: str) -> Callable[[int], Words]:
    """Return a stream of 32-bit words: called with a number of them, it gives the next so many.

    Args:
        seed: Its lower 64 bits count.
        name: Of the stream, such as a parameter's.
    """
    generator = np.random.Philox(key=np.array([seed % 2**64, xxhash.xxh3_64_intdigest(name.encode())], np.uint64))

    def following(count: int) -> Words:
        drawn: NDArray[np.uint64] = generator.random_raw(-(-count // 2))
        return drawn.astype("<u8", copy=False).view("<u4")[:count]

    return following


def uniform(drawn: Words) -> Floats:
    """Return numbers between -1/2 and 1/2, neither included, evenly spaced."""
    found = drawn.astype(np.float64)
    found += 0.5
    found *= 2.0**-32
    found -= 0.5
    return found


def normal(drawn: Words) -> Floats:
    """Return numbers of the normal distribution with mean 0 and variance 1: the quantiles of `uniform`'s numbers."""
    place = uniform(drawn)
    found = place * place
    np.subtract(CENTRE_SQUARE, found, out=found)
    found = _ratio(found, CENTRE_OVER, CENTRE_UNDER)
    found *= place
    outer = np.flatnonzero(np.abs(place) > CENTRE)
    found[outer] = _tail(place[outer])
    return found


def _tail(place: Floats) -> Floats:
    distance = logarithm(0.5 - np.abs(place))
    np.negative(distance, out=distance)
    np.sqrt(distance, out=distance)
    distance -= TAIL
    return np.copysign(_ratio(distance, TAIL_OVER, TAIL_UNDER), place)


def logarithm(numbers: Floats) -> Floats:
    """Return natural logarithms to 10 digits: 2^e m has e ln 2 + ln 3/4 + 2 atanh((m - 3/4) / (m + 3/4)).

    A mathematical library's own would have other bits on another processor.
    """
    mantissa, exponent = np.frexp(numbers)
    ratio = mantissa - MIDDLE
    mantissa += MIDDLE
    ratio /= mantissa
    found = _polynomial(ratio * ratio, ATANH)
    found *= ratio
    found *= 2.0
    found += LOG_MIDDLE
    return found + exponent * LOG_2


def _ratio(at: Floats, over: Sequence[float], under: Sequence[float]) -> Floats:
    found = _polynomial(at, over)
    found /= _polynomial(at, under)
    return found


def _polynomial(at: Floats, coefficients: Sequence[float]) -> Floats:
    found = at * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        found += coefficient
        found *= at
    found += coefficients[0]
    return found


def _write(parameter: Tensor, following: Callable[[int], Words], draw: Callable[[Words], Floats], scale: float) -> None:
    flat = parameter.detach().view(-1).numpy()
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        part[:] = draw(following(len(part))) * scale
