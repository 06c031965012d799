"""Standardised and augmented pictures: what changes, what does not, and that a seed tells it all."""

from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from shared.data.augment import MARGIN, crop_flip
from shared.data.examples import Examples, batches, split_holdout
from shared.data.load import AUGMENTS, load
from shared.data.spec import Data, Even
from tests.naming import names_all

SEEDS = st.integers(0, 2**63 - 1)


def pictures(count: int, channels: int = 3, height: int = 6, width: int = 9) -> torch.Tensor:
    """No two numbers are alike, and none is zero."""
    size = count * channels * height * width
    return torch.arange(1, size + 1, dtype=torch.float32).reshape(count, channels, height, width)


def test_every_augment_that_may_be_written_is_registered():
    assert {"none", *AUGMENTS} == set(get_args(get_type_hints(Data)["augment"]))


@given(SEEDS, st.integers(1, 5), st.sampled_from([1, 3]))
def test_a_picture_is_moved_and_perhaps_mirrored_and_nothing_else(seed, count, channels):
    """Each is one of the 9 x 9 x 2 that there are, all its channels alike, whatever happens to the others."""
    given_pictures = pictures(count, channels)
    before = given_pictures.clone()
    got = crop_flip(given_pictures, torch.Generator().manual_seed(seed))
    assert torch.equal(given_pictures, before)
    assert got.shape == before.shape
    for one, source in zip(got, before, strict=True):
        padded = functional.pad(source, (MARGIN,) * 4)
        windows = (
            padded[:, top : top + 6, left : left + 9] for top in range(2 * MARGIN + 1) for left in range(2 * MARGIN + 1)
        )
        assert any(torch.equal(one, window) or torch.equal(one, window.flip(2)) for window in windows)


def test_all_moves_come_about_as_often():
    """Of 16,200 pictures each of 162 ways takes 100 on average; chi squared of 161 degrees within six deviations."""
    count, ways = 16_200, 162
    marked = torch.zeros(count, 1, 9, 9)
    marked[:, 0, 4, 4], marked[:, 0, 4, 3] = 1, 2  # the centre, which stays in sight, and what lies left of it
    got = crop_flip(functional.pad(marked, (1, 1)), torch.Generator().manual_seed(4))[:, 0]
    place = (got == 1).flatten(1).int().argmax(1)
    is_mirrored = ((got == 2).flatten(1).int().argmax(1) > place).long()
    times = (place * 2 + is_mirrored).bincount()
    times = times[times > 0]
    assert len(times) == ways
    chi = ((times - 100) ** 2 / 100).sum().item()
    assert abs(chi - 161) < 6 * (2 * 161) ** 0.5


def examples(count: int = 7) -> Examples:
    return Examples(pictures(count), torch.arange(count), augment=crop_flip)


@given(SEEDS)
def test_a_tasks_batches_are_a_function_of_its_seed(seed):
    """Also augmented; order and labels are those without it, and the examples stay as they were."""
    own = examples()
    first = list(batches(own, batch_size=3, epochs=2, seed=seed))
    again = list(batches(own, batch_size=3, epochs=2, seed=seed))
    plain = list(batches(Examples(own.inputs, own.labels), batch_size=3, epochs=2, seed=seed))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert [labels.tolist() for _, labels in first] == [labels.tolist() for _, labels in plain]
    assert torch.equal(own.inputs, pictures(7))


def test_another_seed_and_another_epoch_change_pictures_otherwise():
    """Seen on seven times the same picture, whose order cannot tell."""
    own = Examples(pictures(1).repeat(7, 1, 1, 1), torch.arange(7), augment=crop_flip)
    (first, second), (other, _) = (
        [inputs for inputs, _ in batches(own, batch_size=7, epochs=2, seed=seed)] for seed in (1, 2)
    )
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_parts_of_augmented_examples_are_augmented():
    train, held = split_holdout(examples(), 0.3, 1)
    assert train.augment is held.augment is crop_flip


@pytest.fixture
def path(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=pixels, y=np.arange(12) % 3)
    return str(tmp_path / "x.npz")


def test_inputs_are_standardised_channel_by_channel(path):
    """(x - mean) / std, with one number a channel or one for all; a device's share is part of the whole's."""
    raw = load(Data(source="npz", path=path)).inputs
    mean, std = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)
    got = load(Data(source="npz", path=path, mean=mean, std=std)).inputs
    for channel in range(3):
        expected = (raw[:, channel] - mean[channel]) / std[channel]
        assert torch.equal(got[:, channel], expected)
    assert torch.equal(load(Data(source="npz", path=path, mean=(0.5,))).inputs, raw - 0.5)
    assert torch.equal(load(Data(source="npz", path=path, std=(0.5,))).inputs, raw / 0.5)
    share = load(Data(source="npz", path=path, mean=mean, std=std, partition=Even(parts=3, index=1))).inputs
    assert all(any(torch.equal(one, whole) for whole in got) for one in share)


def test_a_device_augments_its_share(path):
    share = load(Data(source="npz", path=path, augment="crop-flip", partition=Even(parts=3, index=1)))
    assert share.augment is crop_flip
    assert load(Data(source="npz", path=path)).augment is None


def test_what_cannot_be_done_is_refused(path, refused, tmp_path):
    assert names_all(refused(source="npz", path=path, mean=(0.1, 0.2)), path, "mean", 2, 3)
    assert names_all(refused(source="npz", path=path, std=(1.0,) * 4), path, "std", 4, 3)
    np.savez(tmp_path / "rows.npz", x=np.arange(12.0).reshape(4, 3), y=np.arange(4))
    assert "'crop-flip'" in refused(source="npz", path=str(tmp_path / "rows.npz"), augment="crop-flip")
    for fields in ({"mean": (float("nan"),)}, {"std": (0.0,)}, {"std": (float("inf"),)}, {"std": (-1.0,)}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Data(source="npz", path=path, **fields)


def test_the_real_cifar10_with_its_own_mean_and_deviation(recorded):
    """The well-known figures of its colours make means of 0 and deviations of 1, on images it has never seen too."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    got = load(Data(source="npz", path=recorded("cifar10/cifar10_20k.npz"), split="test", mean=mean, std=std)).inputs
    assert got.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=0.05)
    assert got.std(dim=(0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.03)
    truck = np.load(recorded("cifar10/cifar10_20k.npz"))["x_test"][17, 5, 30]  # row 5, column 30: red, green, blue
    expected = [(value / 255 - m) / s for value, m, s in zip(truck.tolist(), mean, std, strict=True)]
    assert got[17, :, 5, 30].tolist() == pytest.approx(expected, abs=1e-5)
