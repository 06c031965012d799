"""How examples are prepared is told from headers, and is what the reader really does."""

from __future__ import annotations

import gzip
import struct

import msgspec
import numpy as np
import pytest
from PIL import Image

from shared.data.inputs import read_preparation
from shared.data.sources.read import read_share
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.inputs import Inputs, differences

KIND = np.random.default_rng(7)
ARRAYS = {
    "grey": KIND.integers(0, 256, (4, 5, 6), dtype=np.uint8),
    "colour": KIND.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8),
    "channels first": KIND.integers(0, 256, (4, 3, 5, 6), dtype=np.uint8),
    "rows of bytes": KIND.integers(0, 256, (4, 7), dtype=np.uint8),
    "floats": KIND.normal(size=(4, 7)).astype(np.float32),
    "windows": KIND.normal(size=(4, 3, 9)),
    "whole numbers": KIND.integers(0, 4096, (4, 1, 5, 5), dtype=np.uint16),
}


def require_as_read(spec: Data, stored: np.ndarray) -> Inputs:
    """Compare what is told with what the reader makes of stored values; return what is told."""
    told, read = read_preparation(spec), read_share(spec).inputs
    assert told.shape == read.shape[1:]
    assert told.scale is not None
    assert read.max() == pytest.approx(stored.max() / told.scale, rel=1e-6)
    return told


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train")])
def test_npz(tmp_path, name, names):
    stored = ARRAYS[name]
    np.savez_compressed(tmp_path / "d.npz", **dict(zip(names, (stored, np.arange(4)), strict=True)))
    told = require_as_read(Data(source="npz", path=str(tmp_path / "d.npz")), stored)
    assert told.scale == (255 if stored.dtype == np.uint8 else 1)


@pytest.mark.parametrize("opened", [open, gzip.open])
def test_idx(tmp_path, opened):
    pictures = ARRAYS["grey"]
    end = ".gz" if opened is gzip.open else ""
    with opened(tmp_path / f"train-images-idx3-ubyte{end}", "wb") as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, *pictures.shape) + pictures.tobytes())
    with opened(tmp_path / f"train-labels-idx1-ubyte{end}", "wb") as file:
        file.write(struct.pack(">HBBI", 0, 8, 1, 4) + bytes(range(4)))
    require_as_read(Data(source="idx", path=str(tmp_path)), pictures)


def test_table(tmp_path):
    (tmp_path / "d.csv").write_text("when;b;label;a\n0;1;x;2\n1;3;y;4\n")
    spec = Data(source="csv", path=str(tmp_path / "d.csv"), separator=";", skip_columns=("when",), mean=(2.0,))
    assert read_preparation(spec) == Inputs(scale=1.0, shape=(2,), features=("b", "a"), mean=(2.0,))
    assert read_share(spec).inputs.tolist() == [[-1, 0], [1, 2]]


def test_digits_and_pictures_in_folders(tmp_path):
    digits = Data(source="digits")
    assert require_as_read(digits, np.array(16)).scale == 16
    assert msgspec.structs.replace(digits, std=(0.5,)).std == read_preparation(Data(source="digits", std=(0.5,))).std
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((4, 4), 255, dtype=np.uint8)).save(tmp_path / "cat" / "1.png")
    spec = Data(source="folder", path=str(tmp_path))
    assert read_preparation(spec) == Inputs(scale=255.0)
    assert read_share(spec).inputs.max() == 1


def test_grey_pictures_that_become_coloured(tmp_path):
    np.savez(tmp_path / "d.npz", x=ARRAYS["grey"], y=np.arange(4))
    require_as_read(Data(source="npz", path=str(tmp_path / "d.npz"), channels=3), ARRAYS["grey"])


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"no zip at all" * 9])
def test_files_that_cannot_be_read_are_named(tmp_path, content):
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"d\.npz"):
        read_preparation(Data(source="npz", path=str(tmp_path / "d.npz")))


ONE = Inputs(scale=255.0, mean=(0.5,), std=(0.25,), shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Inputs(scale=1.0, mean=(0.5,), std=(0.25,)), "stored values divided by 255 | not bytes, undivided"),
        (Inputs(std=(0.25,)), "mean 0.5 | mean none"),
        (Inputs(mean=(0.5,), std=(0.25, 0.25, 0.3)), "std 0.25 | std 0.25, 0.25, 0.3"),
        (Inputs(mean=(0.5,), std=(0.25,), shape=(1, 8, 8)), "shape 3 x 8 x 8 | shape 1 x 8 x 8"),
        (Inputs(mean=(0.5, 0.5, 0.5), std=(0.25,) * 3, scale=255.0, shape=(3, 8, 8)), ""),
        (Inputs(mean=(0.5 + 1e-9,), std=(0.25,)), ""),
    ],
)
def test_differences_are_told_in_words(other, words):
    told = [" | ".join(pair) for pair in differences(ONE, other)]
    assert bool(told) == bool(words)
    assert not words or told[0].startswith(words)


def test_neutral_numbers_are_as_good_as_none():
    assert not list(differences(Inputs(mean=(0.0, 0.0), std=(1.0,)), Inputs()))


def test_columns_in_another_order():
    one, other = (Inputs(shape=(3,), features=names) for names in (("a", "b", "c"), ("a", "c", "b")))
    assert list(differences(one, other)) == [("columns 'a', 'b', 'c'", "columns 'a', 'c', 'b'")]
    long = tuple(f"column-{number}" for number in range(40))
    swapped = (*long[:30], long[31], long[30], *long[32:])
    [(ours, theirs)] = differences(Inputs(shape=(40,), features=long), Inputs(shape=(40,), features=swapped))
    assert ours.startswith("columns … 'column-30', 'column-31'")
    assert theirs.startswith("columns … 'column-31', 'column-30'")


@pytest.mark.parametrize(
    "field", [{"std": (0.0,)}, {"mean": (float("nan"),)}, {"scale": 0.0}, {"shape": (0,)}, {"features": ("x" * 40000,)}]
)
def test_inputs_of_no_data_set_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        Inputs(**field)
