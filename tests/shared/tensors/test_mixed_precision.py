"""Mixed precision: torch's own autocast, a scale for float16, and 32 bits where the processor has no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.protocol.messages import StepOptions
from shared.tensors import mixed_precision
from shared.tensors.mixed_precision import FIRST_SCALE, MixedPrecision, computes_in

CPU = torch.device("cpu")


@pytest.fixture
def every_precision(monkeypatch):
    """Let this CPU compute in everything, if slowly."""
    monkeypatch.setattr(mixed_precision, "computes_in", lambda _precision, _device: True)


def gradients(precision: MixedPrecision, factor: float = 1.0) -> tuple[bool, list[torch.Tensor]]:
    torch.manual_seed(5)
    layers, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(8, 16)
    with precision.forward:
        loss = layers(inputs).square().mean() * factor
    done = precision.backward(loss, list(layers.named_parameters()))
    return done, [weight.grad for weight in layers.parameters()]


def test_32_bits_are_what_they_were():
    """No context, no scale, whatever the processor has."""
    precision = MixedPrecision.of(StepOptions(), CPU)
    done, found = gradients(precision)
    torch.manual_seed(5)
    layers, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(8, 16)
    layers(inputs).square().mean().backward()
    assert done
    assert all(torch.equal(one, weight.grad) for one, weight in zip(found, layers.parameters(), strict=True))


@pytest.mark.usefixtures("every_precision")
def test_bfloat16_is_torchs_autocast():
    done, found = gradients(MixedPrecision.of(StepOptions(precision="bfloat16"), CPU))
    torch.manual_seed(5)
    layers, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layers(inputs).square().mean()
    loss.backward()
    assert done
    assert all(torch.equal(one, weight.grad) for one, weight in zip(found, layers.parameters(), strict=True))
    assert all(one.dtype == torch.float32 for one in found)
    _, full = gradients(MixedPrecision.of(StepOptions(), CPU))
    assert not torch.equal(found[0], full[0])
    assert torch.dist(found[0], full[0]) < 0.2 * full[0].norm()


@pytest.mark.usefixtures("every_precision")
def test_float16_keeps_gradients_that_would_vanish():
    """Of a loss of 1e-7, gradients are below the least number of float16 without the scale."""
    scaled = MixedPrecision.of(StepOptions(precision="float16"), CPU)
    assert scaled.scale == FIRST_SCALE
    _, found = gradients(scaled, 1e-7)
    _, full = gradients(MixedPrecision.of(StepOptions(), CPU), 1e-7)
    unscaled = MixedPrecision("cpu", torch.float16, 1.0)
    _, lost = gradients(unscaled, 1e-7)
    assert not lost[0].any()
    torch.testing.assert_close(found[0] * 1e7, full[0] * 1e7, rtol=0.1, atol=0.02)


@pytest.mark.usefixtures("every_precision")
def test_a_step_of_float16_that_overflows_is_left_out_and_halves_the_scale():
    precision = MixedPrecision.of(StepOptions(precision="float16"), CPU)
    done, found = gradients(precision, 1e5)
    assert (done, precision.scale) == (False, FIRST_SCALE / 2)
    assert found == [None] * 4
    done, found = gradients(precision, 1.0)
    assert (done, precision.scale) == (True, FIRST_SCALE / 2)
    assert all(one.isfinite().all() for one in found)


def test_a_processor_that_lacks_a_precision_computes_in_32_bits(monkeypatch):
    """float16 is for GPUs; bfloat16 for processors that say that they multiply in it."""
    assert not computes_in("float16", CPU)
    for has in (True, False):
        monkeypatch.setattr(mixed_precision, "cpu_multiplies_bfloat16", lambda has=has: has)
        dtype = MixedPrecision.of(StepOptions(precision="bfloat16"), CPU).dtype
        assert dtype == (torch.bfloat16 if has else None)
