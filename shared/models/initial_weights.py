"""Initial weights with the same bits on every machine, from Philox.

torch's draws differ: `normal_` uses the logarithm and cosine of a vector unit, and so gives other bits on a board than
on the server, from which a model that never travels would start.

Here every parameter has a stream, named by the seed and the parameter. Its 32-bit words k become numbers
q = (k + 1/2) / 2^32 - 1/2, and these become normal ones by the quantile function. All of it is +, -, *, / and the
square root, which IEEE 754 rounds in one way only, in 64 bits, one operation at a time (a processor that fuses two
would round once less).

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

from shared.models.kaiming import WEIGHTED, last_weighted

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint32]

BLOCK = 1 << 14
"""Numbers per chunk: with all intermediate results they fit into the processor's cache."""

CENTRE, CENTRE_SQUARE, TAIL = 0.425, 0.180625, 1.6
"""AS 241: limit of the central region, its square, and the centre of the expansion in the tails."""
CENTRE_OVER = (3.3871327179, 5.0434271938e1, 1.5929113202e2, 5.9109374720e1)
CENTRE_UNDER = (1.0, 1.7895169469e1, 7.8757757664e1, 6.7187563600e1)
TAIL_OVER = (1.4234372777, 2.7568153900, 1.3067284816, 1.7023821103e-1)
TAIL_UNDER = (1.0, 7.3700164250e-1, 1.2021132975e-1)
"""Coefficients in ascending order. The third region, below e^-25, is not needed: no probability is below 2^-33."""

LOG_2, LOG_MIDDLE, MIDDLE = 0.6931471805599453, -0.2876820724517809, 0.75
"""ln 2 and ln 3/4, correct to the last bit."""
ATANH = (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11)
"""atanh(s) / s in powers of s^2, for |s| <= 1/5."""


def fill(layers: nn.Module, seed: int, *, he_normal: bool) -> None:
    """Write initial weights into a network's parameters and buffers.

    Args:
        layers: Convolutions, linear layers, GRUs, batch normalisation, and layers without parameters. A GRU's
            parameters are uniform within 1 / sqrt(hidden size), as torch's are.
        he_normal: Whether weights are normal with variance 2 / fan_in, 1 / fan_in in the last layer, and biases zero
            (`shared.models.kaiming`); or both uniform within 1 / sqrt(fan_in), as torch's are.

    Raises:
        TypeError: The initialisation of a layer with parameters is unknown.
    """
    last = last_weighted(layers)
    for prefix, layer in layers.named_modules():
        if isinstance(layer, WEIGHTED):
            gain = (1.0 if layer is last else 2.0) if he_normal else 0.0
            _draw_weighted(layer, seed, prefix, gain)
        elif isinstance(layer, nn.GRU):
            for name, leaf in layer.named_parameters():
                stream = word_stream(seed, f"{prefix}.{name}".removeprefix("."))
                _write(leaf, stream, uniform, 2.0 / math.sqrt(layer.hidden_size))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros
        elif layer._parameters or layer._buffers:  # noqa: SLF001 - without those of nested layers
            raise TypeError(f"the initial weights of a {type(layer).__name__} are not defined")


def _draw_weighted(layer: nn.Module, seed: int, prefix: str, gain: float) -> None:
    """Write weights of variance gain / fan_in and zero biases; with a gain of 0, uniform ones as torch's."""
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")  # noqa: SLF001
    fan_in = _fan_in(layer)
    draw, scale = (normal, math.sqrt(gain / fan_in)) if gain else (uniform, 2.0 / math.sqrt(fan_in))
    _write(weight, word_stream(seed, f"{prefix}.weight"), draw, scale)
    if bias is not None and gain:
        bias.detach().zero_()
    elif bias is not None:
        _write(bias, word_stream(seed, f"{prefix}.bias"), uniform, scale)


def write_uniform(leaf: Tensor, seed: int, name: str, fan_in: int) -> None:
    """Write uniform numbers within 1 / sqrt(fan_in); nothing into a tensor without storage."""
    if not leaf.is_meta:
        _write(leaf, word_stream(seed, name), uniform, 2.0 / math.sqrt(fan_in))


def _fan_in(layer: nn.Module) -> int:
    """Return the inputs of one output; of a transposed convolution, whose kernels are assumed not to overlap."""
    weight = layer.get_parameter("weight")
    return weight.shape[0] if isinstance(layer, nn.ConvTranspose2d) else weight[0].numel()


def word_stream(seed: int, name: str) -> Callable[[int], Words]:
    """Return a stream of 32-bit words: a function from a count to the next words.

    Args:
        seed: Its lower 64 bits are used.
        name: Name of the stream, such as a parameter's.
    """
    generator = np.random.Philox(key=np.array([seed % 2**64, xxhash.xxh3_64_intdigest(name.encode())], np.uint64))

    def next_words(count: int) -> Words:
        drawn: NDArray[np.uint64] = generator.random_raw(-(-count // 2))
        return drawn.astype("<u8", copy=False).view("<u4")[:count]

    return next_words


def uniform(drawn: Words) -> Floats:
    """Return numbers between -1/2 and 1/2, both excluded, evenly spaced."""
    numbers = drawn.astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-32
    numbers -= 0.5
    return numbers


def normal(drawn: Words) -> Floats:
    """Return standard normal numbers: the quantiles of `uniform`'s numbers."""
    quantiles = uniform(drawn)
    result = quantiles * quantiles
    np.subtract(CENTRE_SQUARE, result, out=result)
    result = _ratio(result, CENTRE_OVER, CENTRE_UNDER)
    result *= quantiles
    tails = np.flatnonzero(np.abs(quantiles) > CENTRE)
    result[tails] = _tail(quantiles[tails])
    return result


def _tail(quantiles: Floats) -> Floats:
    distance = logarithm(0.5 - np.abs(quantiles))
    np.negative(distance, out=distance)
    np.sqrt(distance, out=distance)
    distance -= TAIL
    return np.copysign(_ratio(distance, TAIL_OVER, TAIL_UNDER), quantiles)


def logarithm(numbers: Floats) -> Floats:
    """Return natural logarithms to 10 digits: 2^e m has e ln 2 + ln 3/4 + 2 atanh((m - 3/4) / (m + 3/4)).

    A mathematical library has other bits on another processor.
    """
    mantissa, exponent = np.frexp(numbers)
    ratio = mantissa - MIDDLE
    mantissa += MIDDLE
    ratio /= mantissa
    result = _polynomial(ratio * ratio, ATANH)
    result *= ratio
    result *= 2.0
    result += LOG_MIDDLE
    return result + exponent * LOG_2


def _ratio(argument: Floats, over: Sequence[float], under: Sequence[float]) -> Floats:
    result = _polynomial(argument, over)
    result /= _polynomial(argument, under)
    return result


def _polynomial(argument: Floats, coefficients: Sequence[float]) -> Floats:
    result = argument * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        result += coefficient
        result *= argument
    result += coefficients[0]
    return result


def _write(parameter: Tensor, stream: Callable[[int], Words], draw: Callable[[Words], Floats], scale: float) -> None:
    flat = parameter.detach().view(-1).numpy()
    for start in range(0, len(flat), BLOCK):
        part = flat[start : start + BLOCK]
        part[:] = draw(stream(len(part))) * scale
