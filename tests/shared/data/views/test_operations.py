"""The operations of RandAugment against Pillow, picture by picture, to the bit; affine ones against a loop as well."""

from __future__ import annotations

import math

import pytest
import torch

from shared.data.views import operations as ours

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
from PIL import ImageEnhance, ImageOps  # noqa: E402 - after it is known to be there

SHARES = (-1.0, -1 / 3, 0.0, 1 / 3, 1.0)


def draw(seed: int, channels: int = 3, side: tuple[int, int] = (16, 20)) -> torch.Tensor:
    """Return pictures that use a part of the levels, one of them a single colour and one of two."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(5, channels, *side, generator=generator)
    pictures = (40 + 150 * noise * torch.linspace(0.2, 1, side[1])).to(torch.uint8)
    pictures[1] = 77
    pictures[2] = torch.where(noise[2] < 0.9, 3, 250)
    return pictures


def to_image(picture):
    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels if len(picture) == 3 else pixels[..., 0])


def from_image(image):
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, -1)
    return pixels.permute(2, 0, 1)


PILLOWS = {
    "identity": lambda image, _: image,
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "posterize": lambda image, share: ImageOps.posterize(image, 8 - round(4 * abs(share))),
    "solarize": lambda image, share: ImageOps.solarize(image, 255 * (1 - abs(share))),
    "colour": lambda image, share: ImageEnhance.Color(image).enhance(1 + 0.9 * share),
    "contrast": lambda image, share: ImageEnhance.Contrast(image).enhance(1 + 0.9 * share),
    "brightness": lambda image, share: ImageEnhance.Brightness(image).enhance(1 + 0.9 * share),
    "sharpness": lambda image, share: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * share),
}


def matrix(name: str, share: float, height: int, width: int) -> tuple[float, ...]:
    """Return where a pixel comes from, counted from the middle, row by row."""
    turn = math.radians(30) * share
    return {
        "shear_x": (1, 0.3 * share, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * share, 1, 0),
        "translate_x": (1, 0, int(150 / 331 * width * share), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, int(150 / 331 * height * share)),
        "rotate": (math.cos(turn), -math.sin(turn), 0, math.sin(turn), math.cos(turn), 0),
    }[name]


AFFINE = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


def move(picture, m):
    """Return the nearest pixel for every place, one after the other; black where there is none."""
    _, height, width = picture.shape
    moved = torch.zeros_like(picture)
    for y in range(height):
        for x in range(width):
            u, v = x + 0.5 - width / 2, y + 0.5 - height / 2
            at = math.floor(m[0] * u + m[1] * v + m[2] + width / 2), math.floor(m[3] * u + m[4] * v + m[5] + height / 2)
            if 0 <= at[0] < width and 0 <= at[1] < height:
                moved[:, y, x] = picture[:, at[1], at[0]]
    return moved


def test_there_are_fourteen_and_each_is_compared():
    assert len(ours.OPERATIONS) == 14
    assert set(PILLOWS) | set(AFFINE) == set(ours.OPERATIONS)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PILLOWS)
def test_each_does_what_pillow_does(name, channels):
    """Signs of magnitudes differ within a batch. Half a level of rounding is Pillow's own: its floats are single."""
    pictures = draw(3, channels)
    shares = torch.tensor(SHARES)
    found = ours.OPERATIONS[name](pictures, shares)
    assert found.dtype == torch.uint8
    for picture, share, one in zip(pictures, SHARES, found, strict=True):
        assert torch.equal(one, from_image(PILLOWS[name](to_image(picture), share))), share


@pytest.mark.parametrize("name", AFFINE)
def test_affine_ones_take_the_nearest_pixel(name):
    pictures, shares = draw(4), torch.tensor(SHARES, dtype=torch.float64)
    found = ours.OPERATIONS[name](pictures, shares)
    for picture, share, one in zip(pictures, SHARES, found, strict=True):
        assert torch.equal(one, move(picture, matrix(name, share, 16, 20))), share


@pytest.mark.parametrize("name", ours.OPERATIONS)
def test_a_picture_is_changed_alone(name):
    """Whatever is in the batch with it; and what is given stays as it was."""
    pictures, shares = draw(5), torch.full((5,), 1 / 3)
    before = pictures.clone()
    whole = ours.OPERATIONS[name](pictures, shares)
    assert torch.equal(pictures, before)
    for index in range(5):
        assert torch.equal(ours.OPERATIONS[name](pictures[index : index + 1], shares[:1])[0], whole[index])
