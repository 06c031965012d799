"""Pictures resized to one size, and masks as targets."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shared.data.inputs import read_preparation
from shared.data.load import load
from shared.data.spec import Data
from shared.data.summary import summarise
from tests.naming import names_all, naming

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")


def save(path, array, **keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array, dtype=np.uint8)).save(path, **keys)


def half(width, height, value):
    """Return a picture whose right half has the value."""
    array = np.zeros((height, width))
    array[:, width // 2 :] = value
    return array


def test_pictures_of_several_sizes_are_resized(tmp_path):
    save(tmp_path / "a" / "1.png", half(16, 8, 255))
    save(tmp_path / "b" / "2.png", half(8, 4, 255))
    spec = Data(source="folder", path=str(tmp_path), size=(4, 8), channels=1)
    examples = load(spec)
    assert examples.inputs.shape == (2, 1, 4, 8)
    assert read_preparation(spec).shape == (1, 4, 8)
    np.testing.assert_array_equal(examples.inputs[1, 0].numpy(), half(8, 4, 1))
    np.testing.assert_allclose(examples.inputs[0, 0].numpy(), half(8, 4, 1), atol=0.2)


def test_a_picture_is_turned_before_it_is_resized(tmp_path):
    turned = Image.fromarray(np.uint8(half(8, 4, 255)))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    path = tmp_path / "a" / "1.png"
    path.parent.mkdir()
    turned.save(path, exif=exif)
    examples = load(Data(source="folder", path=str(tmp_path), size=(4, 2)))
    np.testing.assert_allclose(examples.inputs[0, 0].numpy(), [[0, 0], [0, 0], [1, 1], [1, 1]], atol=0.2)


@pytest.mark.parametrize("layout", [("", ""), ("images/", ""), ("images/day/", "images/day/")])
def test_masks_are_found_by_name_and_resized_by_the_nearest_pixel(tmp_path, layout):
    pictures, masks = layout
    save(tmp_path / f"{pictures}1.jpg", half(16, 8, 200))
    save(tmp_path / f"{pictures}2.png", half(8, 4, 100))
    save(tmp_path / f"masks/{masks}1.png", half(16, 8, 2))
    save(tmp_path / f"masks/{masks}2.png", half(8, 4, 1))
    spec = Data(source="folder", path=str(tmp_path), masks="masks", size=(4, 8))
    examples = load(spec)
    np.testing.assert_array_equal(examples.labels.numpy(), [half(8, 4, 2), half(8, 4, 1)])
    assert len(examples.inputs) == 2
    assert names_all(summarise(spec).finding, "3 classes of pixels", "0: 50.0%", "2: 25.0%")


def test_black_and_white_masks_are_two_classes(tmp_path):
    save(tmp_path / "1.png", half(4, 2, 9))
    save(tmp_path / "masks" / "1.png", half(4, 2, 255))
    examples = load(Data(source="folder", path=str(tmp_path), masks="masks"))
    np.testing.assert_array_equal(examples.labels[0].numpy(), half(4, 2, 1))


def test_masks_that_do_not_fit(tmp_path, refused):
    keys = {"source": "folder", "path": str(tmp_path), "masks": "masks"}
    save(tmp_path / "1.png", half(4, 2, 9))
    assert names_all(refused(**keys), tmp_path / "masks", "data.masks")
    (tmp_path / "masks").mkdir()
    assert names_all(refused(**keys), tmp_path / "masks", "1.png")
    save(tmp_path / "masks" / "1.png", half(6, 2, 1))
    for size in (None, (8, 8)):
        sized = keys | ({"size": size} if size else {})
        assert names_all(refused(**sized), tmp_path / "masks/1.png", "6x2", "4x2")
    save(tmp_path / "masks" / "1.png", np.zeros((2, 4, 3)))
    assert names_all(refused(**keys), tmp_path / "masks/1.png", "RGB")
    (tmp_path / "masks" / "1.png").unlink()
    save(tmp_path / "masks" / "1.jpg", half(4, 2, 1))
    assert names_all(refused(**keys), tmp_path / "masks/1.jpg", "JPEG", "PNG")
    with pytest.raises(ValueError, match=naming("augment", "masks")):
        Data(**keys, augment="crop-flip")


def test_the_newest_pictures_and_those_not_finished(tmp_path):
    for number in range(6):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        save(path, half(4, 2, number))
        os.utime(path, (number, number))
    (tmp_path / "a" / "6.png").write_bytes(b"\x89PNG")
    keys = {"source": "folder", "path": str(tmp_path), "growing": True, "holdout": 0.5}
    newest = load(Data(**keys, recent=4))
    assert sorted((newest.inputs.amax(dim=(1, 2, 3)) * 255).round().int().tolist()) == [3, 4, 5]
    everything = load(Data(**keys))
    assert (len(everything), everything.labels.tolist()) == (6, [0, 0, 0, 1, 1, 1])
    sides = dict(zip(everything.identities.tolist(), everything.inputs.amax(dim=(1, 2, 3)).tolist(), strict=True))
    assert all(
        sides[name] == value
        for name, value in zip(newest.identities.tolist(), newest.inputs.amax(dim=(1, 2, 3)).tolist(), strict=True)
    )
