"""Pictures as cameras and power cuts leave them: turned by EXIF, with lost parts, in other formats."""

from __future__ import annotations

import io

import numpy as np
import pytest

from shared.data.load import load
from shared.data.sources.picture_file import find_lost_data
from shared.data.spec import Data
from tests.naming import names_all

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")

ORIENTATION = 0x0112
NOISE = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
STORED = {
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: np.rot90(upright.T, 2),
    8: lambda upright: np.rot90(upright, -1),
}
"""What a camera stores of an upright picture, by the orientation that it notes."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    return tmp_path


def spec_of(folder, **fields):
    return Data(source="folder", path=str(folder), **fields)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_picture_is_turned_upright(folder, suffix, orientation):
    """Beside one that was stored upright, of the same size then."""
    upright = np.zeros((8, 16), np.uint8)
    upright[:4, :8] = 255
    Image.fromarray(upright).save(folder / "a" / "0.png")
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    more = {"quality": 95} if suffix == "jpg" else {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).save(
        folder / "a" / f"1.{suffix}", exif=exif, **more
    )
    first, second = load(spec_of(folder, channels=1)).inputs
    assert (first - second).abs().max() < 0.05


def test_damaged_exif_is_no_orientation(folder):
    Image.fromarray(NOISE).save(folder / "a" / "0.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert load(spec_of(folder)).inputs.shape == (1, 3, 64, 64)


def saved(kind, pixels=NOISE, **options):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"optimize": True}),
        ("WEBP", {}),
        ("PNG", {}),
        ("GIF", {}),
    ],
)
@pytest.mark.parametrize("start", [0.3, 0.5, 0.8])
def test_a_picture_that_ends_in_zeros_is_refused(folder, refused, kind, options, start):
    data = saved(kind, **options)
    cut = int(len(data) * start)
    (folder / "a" / "0.jpg").write_bytes(data[:cut] + bytes(len(data) - cut))
    assert str(folder / "a" / "0.jpg") in refused(source="folder", path=str(folder))


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("JPEG", {"quality": 95}), ("WEBP", {"lossless": True})])
def test_a_picture_with_zeros_in_the_middle_is_refused(folder, refused, kind, options):
    data = saved(kind, **options)
    cut = len(data) // 2
    (folder / "a" / "0.jpg").write_bytes(data[:cut] + bytes(512) + data[cut + 512 :])
    assert str(folder / "a" / "0.jpg") in refused(source="folder", path=str(folder))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_blocks": 2}])
@pytest.mark.parametrize("pixels", [NOISE, np.zeros((512, 512, 3), np.uint8), np.full((512, 512), 255, np.uint8)])
def test_a_whole_jpeg_is_read_whatever_follows_it(pixels, options):
    """Plain ones, whose compressed data may be all zeros, and those with a thumbnail, a padding, a second picture."""
    exif = Image.Exif()
    exif[0x927C] = bytes(4096)
    data = saved("JPEG", pixels, exif=exif, icc_profile=bytes(3000), **options)
    for tail in (b"", bytes(4096), data, b"trailer"):
        assert find_lost_data(data + tail) == ""
    assert find_lost_data(data[:-2]) != ""
    assert find_lost_data(saved("WEBP", pixels, exif=exif)) == ""
    assert find_lost_data(saved("WEBP", pixels, lossless=True)) == ""


@pytest.mark.parametrize("suffix", ["jfif", "JPE", "JFIF"])
def test_jpeg_by_its_other_names_is_read(folder, suffix):
    (folder / "a" / f"0.{suffix}").write_bytes(saved("JPEG"))
    assert len(load(spec_of(folder))) == 1


def test_grey_boards_take_part_in_a_run_in_colour(folder):
    Image.new("L", (4, 2), 51).save(folder / "a" / "0.png")
    assert load(spec_of(folder)).inputs.shape == (1, 1, 2, 4)
    assert load(spec_of(folder, channels=3)).inputs.flatten().tolist() == pytest.approx([0.2] * 24)
    Image.new("RGB", (4, 2), (51, 51, 51)).save(folder / "a" / "1.png")
    assert load(spec_of(folder, channels=1)).inputs.flatten().tolist() == pytest.approx([0.2] * 16)


def test_channels_of_arrays(tmp_path, refused):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.full((2, 4, 4), 51, np.uint8), y=np.arange(2))
    assert load(Data(source="npz", path=str(path), channels=3)).inputs.shape == (2, 3, 4, 4)
    np.savez(path, x=np.ones((2, 5)), y=np.arange(2))
    assert names_all(refused(source="npz", path=str(path), channels=3), path, "channels", 3)


def test_a_picture_beyond_all_measure_is_refused_by_its_header(folder, refused):
    Image.new("1", (8000, 8000)).save(folder / "a" / "0.png")
    assert "8000x8000" in refused(source="folder", path=str(folder))
