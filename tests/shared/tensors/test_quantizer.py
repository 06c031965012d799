"""The stochastic quantizer: its mean, its variance, its knots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tensors.quantizer import dequantize, knots, magnitude_range, quantize, quantize_codes

DRAWS = 20_000
VALUES = torch.tensor([0.9, -0.7, 0.55, -0.3, 0.1, 0.25, -1.3, 2.0])
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quantized(values: torch.Tensor, bits: int, seed: int = 1) -> torch.Tensor:
    found, low, high = quantize(values, bits, seeded(seed))
    return dequantize(found, bits, low, high)


def fractions(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, float]:
    """Return where between its knots every value lies, and Δ; textbook form, in 64 bits."""
    size = values.double().abs()
    delta = ((size.max() - size.min()) / (2**bits - 1)).item()
    x = (size - size.min()) / delta
    return x - x.floor().clamp(max=2**bits - 2), delta


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 13])
def test_mean_and_variance_are_the_formulas(bits):
    """E Q(g) = g within five deviations of 20 000 draws; E (Q(g) - g)² = Δ² Σ f (1 - f) within 3 %, <= M Δ² / 4."""
    found = quantized(VALUES.repeat(DRAWS, 1), bits).double()
    fraction, delta = fractions(VALUES, bits)
    variance = delta**2 * fraction * (1 - fraction)
    assert ((found.mean(0) - VALUES).abs() <= 5 * (variance / DRAWS).sqrt() + 1e-7).all()
    error = (found - VALUES).square().sum(1).mean().item()
    assert error == pytest.approx(variance.sum().item(), rel=0.03)
    assert error <= len(VALUES) / 4 * delta**2


@pytest.mark.parametrize("bits", range(1, 17))
def test_there_is_no_bias_at_any_number_of_bits(bits):
    """Sums over 400,000 values near knots, where rounding is the largest part of the fraction: within 5 errors."""
    steps = (1 << bits) - 1
    generator = seeded(bits)
    places = torch.randint(0, steps, (400_000,), generator=generator)
    off = 0.5 * torch.rand(places.shape, generator=generator, dtype=torch.float64) ** 2
    for side, edge in ((off, 0.0), (1 - off, 1.0)):
        values = ((places + side) / steps).float()
        values[:2] = torch.tensor([0.0, 1.0])
        error = (quantized(values, bits, 3).double() - values.double()) * steps
        fraction = (values.double() * steps).frac()
        deviation = (fraction * (1 - fraction)).sum().sqrt()
        assert error.sum().abs() <= 5 * deviation + 1e-3, edge


def test_the_bound_is_met_in_the_middle():
    """Halfway between two knots the variance is Δ² / 4: 1, 2 and 998 values of 1.5 with one bit."""
    values = torch.tensor([1.0, 2.0] + [1.5] * 998)
    errors = [(quantized(values, 1, seed) - values).square().sum().item() for seed in range(20)]
    assert sum(errors) / 20 == pytest.approx(0.998 * 1000 / 4)


def test_two_bits_by_hand():
    """Magnitudes 1 to 4 and q = 2: knots 1, 2, 3, 4, all of which stay; codes have the sign on top of two bits."""
    values = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    found, low, high = quantize(values, 2, seeded())
    assert (found.tolist(), low, high) == ([[0, 4 + 1], [2, 4 + 3]], 1.0, 4.0)
    assert torch.equal(dequantize(found, 2, low, high), values)
    assert knots(2, low, high).tolist() == [1, 2, 3, 4, -1, -2, -3, -4]


@pytest.mark.parametrize("bits", [1, 2, 7, 8, 12, 13, 16, 17, 24, 32])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), seed=st.integers(0, 1 << 60))
def test_every_value_goes_to_a_neighbouring_knot(bits, values, seed):
    """Within Δ of it, in the range of magnitudes, of the same sign; the extremes and zeros stay."""
    given_ = torch.tensor(values, dtype=torch.float32)
    found = quantized(given_, bits, seed)
    size = given_.double().abs()
    delta = (size.max() - size.min()) / (2**bits - 1)
    assert ((found.double() - given_.double()).abs() <= delta + 1e-6 * size).all()
    assert torch.equal(found.signbit(), given_ < 0)
    assert size.min() <= found.abs().min()
    assert found.abs().max() == size.max()
    assert (found[given_ == 0] == 0).all()


@pytest.mark.parametrize("bits", [1, 3, 8, 12, 16])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(values=st.lists(st.floats(2**-60, 2**60, width=32), min_size=1, max_size=40), seed=st.integers(0, 1 << 60))
def test_knots_are_fixed_points(bits, values, seed):
    """Q(Q(g)) = Q(g), bit for bit, whatever is drawn, as long as least and greatest are still there."""
    size = torch.tensor(values, dtype=torch.float32)
    once = torch.cat([quantized(size, bits, seed), size.amin()[None], size.amax()[None]])
    assert torch.equal(quantized(once, bits, seed + 1), once)


@pytest.mark.parametrize("low", [0.0, 0.001, 10.0])
@pytest.mark.parametrize("bits", [10, 12, 13, 16])
def test_none_of_many_values_leaves_its_knot(bits, low):
    """Where between two knots a value lies is known to some digits only; those that lack do not move it."""
    once = quantized(torch.rand(50_000, generator=seeded()) + low, bits)
    once[:2] = torch.tensor(magnitude_range(once))
    assert torch.equal(quantized(once, bits, 2), once)


@pytest.mark.parametrize("bits", [2, 8, 17])
def test_what_is_looked_up_is_what_is_computed(bits):
    """Many codes are read from a table, few are computed: the same bits."""
    values = torch.randn(1 << (bits + 1), generator=seeded()) if bits < 17 else torch.randn(100, generator=seeded())
    found, low, high = quantize(values, bits, seeded())
    whole = dequantize(found, bits, low, high)
    assert torch.equal(whole, torch.cat([dequantize(one, bits, low, high) for one in found.split(1)]))


def test_equal_magnitudes_and_nothing_come_back():
    """g_max = g_min leaves no step to take: what is given is returned; of no value nothing is."""
    same = torch.tensor([0.3, -0.3, 0.3])
    assert torch.equal(quantized(same, 4), same)
    assert quantize(torch.empty(0, 3), 4, seeded())[1:] == (0.0, 0.0)
    assert quantized(torch.empty(0, 3), 4).shape == (0, 3)


def test_the_seed_decides():
    values = torch.randn(1000, generator=seeded())
    assert torch.equal(quantized(values, 4, 7), quantized(values, 4, 7))
    assert not torch.equal(quantized(values, 4, 7), quantized(values, 4, 8))


def test_more_bits_come_closer():
    """32 bits are the value itself, to the last place but one of a 32-bit float."""
    values = torch.randn(5000, generator=seeded())
    errors = [(quantized(values, bits) - values).square().mean().item() for bits in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert torch.allclose(quantized(values, 32), values, rtol=1e-6, atol=1e-9)


def test_small_values_are_not_lost():
    """Of values far below Δ a few become Δ and the others zero, so that their sum stays: no rounding towards zero."""
    values = torch.full((400_000,), 1e-5)
    values[0] = 1.0
    total = quantized(values, 4, 3)[1:].double().sum().item()
    assert total == pytest.approx(4.0, abs=5 * (4.0 / 15) ** 0.5)


def test_a_zero_stays_zero_though_zero_is_drawn():
    """As it is once in 16 million draws."""
    seed, values = 1233, torch.zeros(1 << 14)
    values[-1] = 1.0
    assert torch.rand(values.shape, generator=seeded(seed)).amin() == 0
    assert torch.equal(quantized(values, 8, seed), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_what_is_no_number_is_refused(bad, place):
    """Wherever it stands among many."""
    values = torch.ones(100_000)
    values[place] = bad
    with pytest.raises(ValueError, match="NaN"):
        quantize(values, 8, seeded())


@pytest.mark.parametrize("bits", [0, -1, 33])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match="bits"):
        quantize_codes(torch.ones(2), bits, 0.0, 1.0, seeded())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype):
    """Their range is that of 32-bit floats: 1e300 has none."""
    found, low, high = quantize(torch.tensor([0.5, -2.0, 1.0], dtype=dtype), 8, seeded())
    assert (low, high) == (0.5, 2.0)
    assert (dequantize(found, 8, low, high) - torch.tensor([0.5, -2.0, 1.0])).abs().max() <= 1.5 / 255
    if dtype == torch.float64:
        assert magnitude_range(torch.tensor([1e300], dtype=dtype)) == (float("inf"), float("inf"))
