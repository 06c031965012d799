"""Views of batches: functions of their seed, one example as much as another, within what the settings allow."""

from __future__ import annotations

import itertools

import pytest
import torch

from shared.data.views import pictures, windows
from shared.data.views.pair import make_views
from shared.errors import ConfigError
from tests.naming import naming

SHAPES = [(6, 3, 32, 32), (6, 1, 8, 8), (6, 9, 128), (6, 12)]


def draw(shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_views_are_a_function_of_the_seed(shape):
    """Whatever torch's own generator does; another seed gives others, and the two views differ."""
    inputs = draw(shape)
    before = inputs.clone()
    first = make_views(inputs, ("weak", "strong"), 5)
    torch.rand(3)
    again, other = make_views(inputs, ("weak", "strong"), 5), make_views(inputs, ("weak", "strong"), 6)
    for a, b, c in zip(first, again, other, strict=True):
        assert (a.shape, a.dtype) == (shape, torch.float32)
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert not torch.equal(*first)
    assert torch.equal(inputs, before)


def test_a_picture_of_bytes_comes_back_as_bytes():
    """A weak view holds no level that the picture has not: it is not resampled."""
    inputs = (draw((8, 3, 32, 32)) * 255).round() / 255
    (weak,) = make_views(inputs, ("weak",), 3)
    assert set(weak.flatten().tolist()) <= set(inputs.flatten().tolist())


def test_a_weak_view_is_a_crop_of_the_mirrored_edge_perhaps_mirrored():
    """Against every crop of the picture padded by Pillow's rule: an eighth of the side, reflected."""
    inputs = (draw((40, 1, 16, 16)) * 255).to(torch.uint8)
    found = pictures.weak(inputs, torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(inputs.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    seen = set()
    for picture, one in zip(padded, found, strict=True):
        places = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(one, _crop(picture, top, left, mirrored))
        ]
        assert len(places) == 1
        seen.update(places)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(5))
    assert {mirrored for *_, mirrored in seen} == {False, True}
    plain = pictures.weak(inputs, torch.Generator().manual_seed(2), mirrors=False)
    assert all(
        any(torch.equal(one, _crop(picture, top, left, False)) for top in range(5) for left in range(5))
        for picture, one in zip(padded, plain, strict=True)
    )


def _crop(picture, top, left, mirrored):
    crop = picture[:, top : top + 16, left : left + 16]
    return crop.flip(-1) if mirrored else crop


def test_a_cutout_takes_half_a_side_and_less_at_an_edge():
    white = torch.full((3, 3, 32, 32), 255, dtype=torch.uint8)
    cut = pictures.cut_out(white, torch.tensor([[0.5, 0.0, 0.99], [0.5, 0.0, 0.5]]))
    assert (cut == 127).flatten(1).sum(1).tolist() == [3 * 16 * 16, 3 * 8 * 8, 3 * 9 * 16]


def test_pictures_that_were_standardised_are_refused():
    with pytest.raises(ConfigError, match=naming("mean", "std")):
        make_views(draw((2, 3, 8, 8)) - 0.5, ("weak",), 1)


def test_a_strong_window_has_its_segments_in_another_order_and_an_eighth_masked(monkeypatch):
    monkeypatch.setattr(windows, "weak", lambda inputs, _generator: inputs)
    inputs = torch.arange(1.0, 65.0).expand(20, 2, 64)
    for window in windows.strong(inputs, torch.Generator().manual_seed(3)):
        assert torch.equal(window[0], window[1]), "channels stay together"
        assert int((window[0] == 0).sum()) == 8
        left = [int(value) - 1 for value in window[0] if value]
        segments = [moment // 16 for moment in left]
        runs = [b for a, b in zip([-1, *segments], segments, strict=False) if a != b]
        assert len(runs) == len(set(runs)), "a segment stays whole"
        assert all(b > a for a, b in itertools.pairwise(left) if a // 16 == b // 16)


def test_noise_follows_a_channels_own_deviation():
    """In whatever unit: a channel a thousand times as large has a thousand times the noise."""
    inputs = torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(4))
    both = torch.cat([inputs, 1000 * inputs], 1)
    changed = windows.weak(both, torch.Generator().manual_seed(5)) - both
    ratio = changed[:, 1].std() / changed[:, 0].std()
    assert 800 < ratio < 1250
