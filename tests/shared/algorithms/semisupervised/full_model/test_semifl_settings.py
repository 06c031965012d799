"""SemiFL's batches, clipped steps and options: torch's own optimizer and clipping say what they must come to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.algorithms.semisupervised.full_model.network_steps import StepLoss
from shared.algorithms.semisupervised.full_model.semifl import semifl
from shared.algorithms.semisupervised.full_model.semifl_settings import SemiflSettings, draw_epoch_batches
from shared.protocol.messages import Hyper
from shared.tensors.training_step import clip_gradients

SEEDS = st.integers(0, 2**32)


@given(count=st.integers(1, 300), size=st.integers(1, 64), seed=SEEDS)
def test_an_epoch_is_every_example_once_in_as_few_batches_of_about_one_size(count, size, seed):
    """None is of one example where another has three: BatchNorm has no variance of one."""
    batches = draw_epoch_batches(count, size, torch.Generator().manual_seed(seed))
    sizes = [len(one) for one in batches]
    assert torch.cat(batches).sort().values.tolist() == list(range(count))
    assert len(sizes) == math.ceil(count / size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def weights(seed: int, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", ())):
        leaf = torch.randn(shape, generator=generator).requires_grad_()
        leaf.grad = scale * torch.randn(shape, generator=generator)
        made.append((name, leaf))
    return made


@given(seed=SEEDS, scale=st.floats(1e-3, 1e3), most=st.floats(1e-2, 1e2))
def test_gradients_are_clipped_as_torch_clips_them(seed, scale, most):
    ours, theirs = weights(seed, scale), weights(seed, scale)
    clip_gradients(ours, most)
    torch.nn.utils.clip_grad_norm_([leaf for _, leaf in theirs], most)
    for (_, leaf), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)
    norm = math.hypot(*(float(leaf.grad.norm()) for _, leaf in ours))
    assert norm <= most * (1 + 1e-5)


def test_what_is_short_is_left_and_weights_without_a_gradient_do_not_matter():
    own = weights(1)
    before = [leaf.grad.clone() for _, leaf in own]
    clip_gradients([*own, ("frozen", torch.ones(2))], math.inf)
    assert all(torch.equal(leaf.grad, other) for (_, leaf), other in zip(own, before, strict=True))
    clip_gradients([("frozen", torch.ones(2))], 1.0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_torchs_after_clipping(nesterov):
    hyper = Hyper(learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    ours, theirs = weights(2), weights(2)
    descent = SemiflSettings(clip=0.5, nesterov=nesterov).descent([*ours, ("frozen", torch.ones(2))], hyper)
    leaves = [leaf for _, leaf in theirs]
    reference = torch.optim.SGD(leaves, 0.1, 0.9, weight_decay=0.01, nesterov=nesterov)
    for leaf in (*[one for _, one in ours], *leaves):
        leaf.grad = None
    factors = (1.0, 0.1, 3.0)
    objectives = (StepLoss(factor * sum(leaf.square().sum() for _, leaf in ours), 4) for factor in factors)
    assert descent.take(objectives).steps == 3
    for factor in factors:
        (factor * sum(leaf.square().sum() for leaf in leaves)).backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        reference.step()
        reference.zero_grad()
    for (_, leaf), other in zip(ours, leaves, strict=True):
        torch.testing.assert_close(leaf, other)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"epochs": 0}, "epochs"),
        ({"server_epochs": 0}, "server_epochs"),
        ({"warmup_epochs": -1}, "warmup_epochs"),
        ({"server_batch": -1}, "server_batch"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"mixing": 0.0}, "mixing"),
        ({"mixing": math.inf}, "mixing"),
        ({"server_momentum": 1.0}, "server_momentum"),
        ({"server_momentum": -0.1}, "server_momentum"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"least_rate": -1.0}, "least_rate"),
        ({"schedule": "linear"}, "schedule"),
    ],
)
def test_options_that_make_no_sense_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        semifl(**options)


def test_the_step_size_is_the_plans_and_falls_over_the_run_if_it_is_told_to():
    hyper = Hyper(learning_rate=0.3)
    falling, constant = SemiflSettings(least_rate=0.1), SemiflSettings(schedule="constant", least_rate=0.1)
    rates = [falling.hyper_of(hyper, number, 100).learning_rate for number in (1, 51, 100)]
    assert rates == pytest.approx([0.3, 0.2, 0.1], abs=1e-3)
    assert {constant.hyper_of(hyper, number, 100).learning_rate for number in (1, 51, 100)} == {0.3}
