"""Dropout of features: its mean and variance, what travels, and its gradient against autograd."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tensors.feature_dropout import Granularity, draw_delta, drop, gather, spread, undrop

GRANULARITIES = get_args(Granularity)
SHAPE = (3, 4, 2, 5)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(features, delta, p):
    """Return A~ as the server sees it: with zeros for what did not travel."""
    rows = drop(features, delta, p)
    return rows if delta.shape == features.shape else spread(rows, delta, tuple(features.shape))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_mean_and_variance_are_the_formulas(granularity, p):
    """E a~ = a and Var a~ = p / (1 - p) a^2, over 20 000 draws, within 5 standard errors and 5 %.

    A call draws for a thousand times as many channels, each of which is drawn for itself.
    """
    features = torch.randn(2, 3, 2, generator=seeded()).double()
    generator, calls, copies = seeded(2), 20, 1000
    draws, tiled = calls * copies, features.repeat(1, copies, 1)
    deltas = (draw_delta(tuple(tiled.shape), p, granularity, generator) for _ in range(calls))
    found = torch.cat([dense(tiled, delta, p).view(2, copies, 3, 2).transpose(0, 1) for delta in deltas])
    variance = p / (1 - p) * features.square()
    assert ((found.mean(0) - features).abs() <= 5 * (variance / draws).sqrt()).all()
    torch.testing.assert_close(found.var(0), variance, rtol=0.05, atol=0)


def test_what_shares_a_delta():
    """A column is the same for all examples, a channel for all its columns as well, an element for itself."""
    ones = torch.ones(SHAPE)
    column = dense(ones, draw_delta(SHAPE, 0.5, "column", seeded()), 0.5)
    assert (column == column[:1]).all()
    channel = dense(ones, draw_delta(SHAPE, 0.5, "channel", seeded()), 0.5)
    assert (channel == channel[:1, :, :1, :1]).all()
    element = dense(ones, draw_delta(SHAPE, 0.5, "element", seeded()), 0.5)
    assert set(element.unique().tolist()) == {0.0, 2.0}
    assert not (element == element[:1]).all()
    assert len(column[0].unique()) == len(channel[0, :, 0, 0].unique()) == 2


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_without_dropout_everything_travels_as_it_is(granularity):
    """p = 0 keeps every unit, and scales by one."""
    features = torch.randn(SHAPE, generator=seeded())
    delta = draw_delta(SHAPE, 0.0, granularity, seeded())
    assert delta.all()
    assert torch.equal(dense(features, delta, 0.0), features)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_gradient_is_autograds(granularity, seed, p):
    """dF/dA of A~ = A delta / (1 - p), from the gradient of what travelled alone, to 1e-12."""
    generator = seeded(seed)
    features = torch.randn(SHAPE, generator=generator, dtype=torch.float64, requires_grad=True)
    delta = draw_delta(SHAPE, p, granularity, generator)
    shaped = {"column": (1, *SHAPE[1:]), "channel": (1, SHAPE[1], 1, 1), "element": SHAPE}[granularity]
    whole = features * delta.view(shaped) / (1 - p)
    upstream = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(whole, features, upstream)
    torch.testing.assert_close(dense(features.detach(), delta, p), whole.detach(), rtol=1e-12, atol=1e-12)
    down = upstream if granularity == "element" else gather(upstream, delta)
    torch.testing.assert_close(undrop(down, delta, p, SHAPE), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("granularity", ["column", "channel"])
def test_what_is_gathered_comes_back_in_its_place(granularity):
    """Kept units side by side in order; dropped ones take no room, and are zero afterwards. None may be left at all."""
    features = torch.arange(1.0, 121.0).view(SHAPE)
    delta = draw_delta(SHAPE, 0.5, granularity, seeded())
    rows = gather(features, delta)
    assert rows.shape == (3, int(delta.sum()) * (1 if granularity == "column" else 10))
    back = spread(rows, delta, SHAPE)
    assert torch.equal(back[back != 0], rows.flatten())
    nothing = torch.zeros_like(delta)
    assert gather(features, nothing).shape == (3, 0)
    assert not spread(gather(features, nothing), nothing, SHAPE).any()


def test_the_seed_decides():
    assert torch.equal(draw_delta(SHAPE, 0.5, "column", seeded(3)), draw_delta(SHAPE, 0.5, "column", seeded(3)))
    assert not torch.equal(draw_delta(SHAPE, 0.5, "column", seeded(3)), draw_delta(SHAPE, 0.5, "column", seeded(4)))
