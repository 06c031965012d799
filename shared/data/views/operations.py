"""RandAugment's fourteen operations on batches of uint8 pictures, pixel-equal to Pillow.

E. D. Cubuk et al., RandAugment, 2019, https://arxiv.org/abs/1909.13719. Pictures are uint8 of shape (B, C, height,
width). A magnitude M of 30 is the largest; most operations go either way, by the sign of M / 30. Affine operations
are about the centre and fill with black.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

Operation = Callable[[Tensor, Tensor], Tensor]
"""(pictures, share of the largest magnitude of each, in [-1, 1], of shape (B,)) -> pictures."""

BRIGHTEST, LEVELS = 255, 256
LUMINANCE = (19595, 38470, 7471)
"""Weights of red, green and blue, in parts of 65,536: ITU-R 601-2 as Pillow rounds it."""
COLOURS = 3
MOST_ENHANCED, MOST_SHEARED, MOST_MOVED, MOST_TURNED, MOST_BITS = 0.9, 0.3, 150 / 331, math.radians(30), 4
CENTRE_WEIGHT, SMOOTHING = 5, 13


def apply_lookup(pictures: Tensor, table: Tensor) -> Tensor:
    """Map every level by a table of shape (B, C, 256), or one that broadcasts to it."""
    shape = pictures.shape
    tables = table.expand(*shape[:2], LEVELS).flatten(0, 1)
    return tables.gather(1, pictures.flatten(2).flatten(0, 1).long()).view(shape)


def histograms(pictures: Tensor) -> Tensor:
    """Count the levels of each channel, int64 of shape (B, C, 256)."""
    rows = pictures.flatten(2).flatten(0, 1).long()
    at = rows + LEVELS * torch.arange(len(rows))[:, None]
    return at.flatten().bincount(minlength=LEVELS * len(rows)).view(*pictures.shape[:2], LEVELS)


def identity(pictures: Tensor, _share: Tensor) -> Tensor:
    """Return pictures unchanged."""
    return pictures


def autocontrast(pictures: Tensor, _share: Tensor) -> Tensor:
    """Stretch each channel to all levels."""
    flat = pictures.flatten(2)
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    scale = torch.full_like(low, BRIGHTEST) / (high - low).clamp_min(1)  # a number / tensor is rounded twice
    table = (torch.arange(LEVELS) * scale - low * scale).trunc().clamp(0, BRIGHTEST)
    return apply_lookup(pictures, torch.where(high > low, table, torch.arange(LEVELS).double()).to(torch.uint8))


def equalize(pictures: Tensor, _share: Tensor) -> Tensor:
    """Spread each channel's levels so that each occurs about as often."""
    counts = histograms(pictures)
    last = counts.gather(2, ((counts > 0) * torch.arange(LEVELS)).argmax(2, keepdim=True))
    step = (counts.sum(2, keepdim=True) - last) // BRIGHTEST
    before = counts.cumsum(2) - counts
    table = ((step // 2 + before) // step.clamp_min(1)).clamp_max(BRIGHTEST)
    return apply_lookup(pictures, torch.where(step > 0, table, torch.arange(LEVELS)).to(torch.uint8))


def solarize(pictures: Tensor, share: Tensor) -> Tensor:
    """Invert levels from a threshold on, which falls as the share grows."""
    threshold = (BRIGHTEST * (1 - share.abs())).view(-1, 1, 1, 1)
    return torch.where(pictures < threshold, pictures, BRIGHTEST - pictures)


def posterize(pictures: Tensor, share: Tensor) -> Tensor:
    """Reduce levels to their upper bits, at least four."""
    lost = (MOST_BITS * share.abs()).round().long().view(-1, 1, 1, 1)
    return ((pictures.long() >> lost) << lost).to(torch.uint8)


def _grey(pictures: Tensor) -> Tensor:
    """Compute the luminance, uint8 of shape (B, 1, height, width)."""
    if pictures.shape[1] != COLOURS:
        return pictures[:, :1]
    weighted = pictures.long() * torch.tensor(LUMINANCE).view(1, -1, 1, 1)
    return ((weighted.sum(1, keepdim=True) + (1 << 15)) >> 16).to(torch.uint8)


def _blend(degenerate: Tensor, pictures: Tensor, share: Tensor) -> Tensor:
    """Extrapolate from a degenerate picture through the original, by 1 + share times the largest change."""
    factor = (1 + MOST_ENHANCED * share).view(-1, 1, 1, 1)
    low = degenerate.float()
    return (low + factor * (pictures.float() - low)).clamp(0, BRIGHTEST).to(torch.uint8)


def colour(pictures: Tensor, share: Tensor) -> Tensor:
    """Change the saturation; grey pictures stay."""
    return _blend(_grey(pictures), pictures, share) if pictures.shape[1] == COLOURS else pictures


def contrast(pictures: Tensor, share: Tensor) -> Tensor:
    """Change the distance of all levels from the mean luminance."""
    mean = (_grey(pictures).double().mean((1, 2, 3), keepdim=True) + 0.5).trunc()
    return _blend(mean, pictures, share)


def brightness(pictures: Tensor, share: Tensor) -> Tensor:
    """Change the distance of all levels from black."""
    return _blend(torch.zeros((), dtype=torch.uint8), pictures, share)


def sharpness(pictures: Tensor, share: Tensor) -> Tensor:
    """Change the distance of all pixels from their neighbourhood's mean; those at the edge stay."""
    count, channels = pictures.shape[:2]
    rows = pictures.float().flatten(0, 1)[:, None]
    kernel = torch.ones(1, 1, 3, 3)
    kernel[..., 1, 1] = CENTRE_WEIGHT
    inner = (functional.conv2d(rows, kernel) / SMOOTHING + 0.5).trunc()
    smooth = rows.clone()
    smooth[..., 1:-1, 1:-1] = inner
    return _blend(smooth.view(count, channels, *pictures.shape[2:]), pictures, share)


def transform(pictures: Tensor, matrices: Tensor) -> Tensor:
    """Sample each pixel p from M p, both relative to the centre: nearest neighbour, black outside.

    Args:
        pictures: uint8 of shape (B, C, height, width).
        matrices: Of shape (B, 2, 3), the last column in pixels; x comes first.
    """
    height, width = pictures.shape[2:]
    middle = torch.tensor([width / 2, height / 2], dtype=torch.float64)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    places = torch.stack([x.flatten() - middle[0], y.flatten() - middle[1], torch.ones(height * width)]).double()
    source = (matrices.double() @ places + middle[:, None]).floor().long()  # (B, 2, height * width)
    inside = (source >= 0).all(1) & (source[:, 0] < width) & (source[:, 1] < height)
    at = (source[:, 1] * width + source[:, 0]).clamp(0, height * width - 1)
    gathered = pictures.flatten(2).gather(2, at[:, None].expand(-1, pictures.shape[1], -1))
    return torch.where(inside[:, None], gathered, 0).view(pictures.shape)


def _affine(pictures: Tensor, share: Tensor, place: tuple[int, int], most: float) -> Tensor:
    matrices = torch.eye(2, 3, dtype=torch.float64).repeat(len(pictures), 1, 1)
    matrices[:, place[0], place[1]] += most * share
    return transform(pictures, matrices)


def shear_x(pictures: Tensor, share: Tensor) -> Tensor:
    """Shift each row in proportion to its distance from the centre."""
    return _affine(pictures, share, (0, 1), MOST_SHEARED)


def shear_y(pictures: Tensor, share: Tensor) -> Tensor:
    """Shift each column in proportion to its distance from the centre."""
    return _affine(pictures, share, (1, 0), MOST_SHEARED)


def translate_x(pictures: Tensor, share: Tensor) -> Tensor:
    """Shift sideways by whole pixels."""
    return _affine(pictures, (MOST_MOVED * pictures.shape[3] * share).trunc(), (0, 2), 1.0)


def translate_y(pictures: Tensor, share: Tensor) -> Tensor:
    """Shift up or down by whole pixels."""
    return _affine(pictures, (MOST_MOVED * pictures.shape[2] * share).trunc(), (1, 2), 1.0)


def rotate(pictures: Tensor, share: Tensor) -> Tensor:
    """Rotate about the centre."""
    angle = MOST_TURNED * share.double()
    cosine, sine, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return transform(pictures, torch.stack([cosine, -sine, none, sine, cosine, none], 1).view(-1, 2, 3))


OPERATIONS: Mapping[str, Operation] = {
    "autocontrast": autocontrast,
    "brightness": brightness,
    "colour": colour,
    "contrast": contrast,
    "equalize": equalize,
    "identity": identity,
    "posterize": posterize,
    "rotate": rotate,
    "sharpness": sharpness,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "solarize": solarize,
    "translate_x": translate_x,
    "translate_y": translate_y,
}
"""Operations by name, in alphabetical order; a random draw is an index into it."""
