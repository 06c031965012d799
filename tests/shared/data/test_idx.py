"""IDX files: the published ones, every number type, and headers that lie."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from shared.data.load import load
from shared.data.sources import idx
from shared.data.spec import Client, Data
from shared.errors import ConfigError
from tests.naming import names_all, naming

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def encode(array, code="u1"):
    array = np.asarray(array)
    header = struct.pack(f">4B{array.ndim}I", 0, 0, CODES[code], array.ndim, *array.shape)
    return header + array.astype(f">{code}").tobytes()


PICTURES = np.arange(3 * 2 * 4).reshape(3, 2, 4)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / IMAGES).write_bytes(encode(PICTURES))
    (tmp_path / LABELS).write_bytes(encode([2, 0, 1]))
    return tmp_path


def test_pictures_are_scaled_and_have_a_channel(folder):
    got = load(Data(source="idx", path=str(folder)))
    assert got.inputs.shape == (3, 1, 2, 4)
    assert (got.inputs[:, 0] * 255).round().int().tolist() == PICTURES.tolist()
    assert got.labels.tolist() == [2, 0, 1]
    assert got.clients is None


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_type_is_read_in_this_machines_byte_order(tmp_path, code, suffix):
    path = tmp_path / f"numbers-idx2{suffix}"
    content = encode([[1, 2, 100], [3, -4 if code != "u1" else 4, 5]], code)
    path.write_bytes(gzip.compress(content, mtime=0) if suffix else content)
    got = idx.parse(path)
    assert got.dtype == np.dtype(code)
    assert got.dtype.isnative
    assert got.tolist() == [[1, 2, 100], [3, -4 if code != "u1" else 4, 5]]


def test_gzip_dots_and_the_test_split(tmp_path):
    (tmp_path / "t10k-images.idx3-ubyte.gz").write_bytes(gzip.compress(encode(PICTURES), mtime=0))
    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(encode([1, 1, 0], "i4"))
    assert load(Data(source="idx", path=str(tmp_path), split="test")).labels.tolist() == [1, 1, 0]


GOOD = encode(PICTURES)
HOSTILE = {
    "no IDX file": (b"", []),
    "half a magic number": (GOOD[:3], ["000008"]),
    "another magic number": (b"\x0b" + GOOD[1:], ["0b000803"]),
    "an unknown type": (GOOD[:2] + b"\x0a" + GOOD[3:], ["00000a03"]),
    "no dimensions": (struct.pack(">4B", 0, 0, 8, 0), [0]),
    "too many dimensions": (struct.pack(">4B", 0, 0, 8, 255) + bytes(1020), [255]),
    "half a header": (GOOD[:14], []),
    "no pictures": (struct.pack(">4B3I", 0, 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), []),
    "vast dimensions": (struct.pack(">4B3I", 0, 0, 14, 3, *[2**32 - 1] * 3) + bytes(9), [8 * (2**32 - 1) ** 3]),
    "a row": (encode([1, 2, 3]), [1, 3]),
    "more labels than pictures": (encode(PICTURES[:2]), [3, 2]),
    "more than its header says": (GOOD + b"\0", [24]),
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("content", "named"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers(folder, refused, content, named, compress):
    (folder / IMAGES).unlink()
    name = IMAGES + ".gz" * compress
    (folder / name).write_bytes(gzip.compress(content, mtime=0) if compress else content)
    assert names_all(refused(source="idx", path=str(folder)), folder, *named)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (gzip.compress(GOOD[:-1], mtime=0), "1 bytes"),
        (gzip.compress(GOOD, mtime=0)[:-9], "end-of-stream"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "CRC"),
        (GOOD, "gzipped"),
    ],
)
def test_damaged_gzip(folder, refused, content, problem):
    (folder / IMAGES).unlink()
    (folder / f"{IMAGES}.gz").write_bytes(content)
    assert problem in refused(source="idx", path=str(folder))


def test_a_truncated_file_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(GOOD[:-1])
    with pytest.raises(ConfigError, match=naming(path)):
        idx.parse(path)


def test_absent_files(tmp_path, refused):
    assert "train-images" in refused(source="idx", path=str(tmp_path / "nowhere"))
    (tmp_path / IMAGES).write_bytes(GOOD)
    assert "train-labels" in refused(source="idx", path=str(tmp_path))


def test_labels_must_be_a_row_of_integers_from_0(folder, refused):
    for labels, code, named in (([[1, 2, 3]], "u1", LABELS), ([1, 2, 3], "f4", LABELS), ([1, -2, 3], "i4", "label -2")):
        (folder / LABELS).write_bytes(encode(labels, code))
        assert names_all(refused(source="idx", path=str(folder)), named)


def test_pixels_that_are_no_numbers(folder, refused):
    (folder / IMAGES).write_bytes(encode(np.where(PICTURES == 9, np.nan, PICTURES), "f8"))
    assert names_all(refused(source="idx", path=str(folder)), folder, "example 1", "NaN")


def test_writers_from_a_qmnist_table(folder, refused):
    table = folder / "qmnist-train-labels-idx2-int"
    rows = [[2, 0, 70], [0, 0, 71], [1, 4, 70], [9, 9, 9]]
    table.write_bytes(encode(rows, "i4"))
    fields = {"source": "idx", "path": str(folder)}
    mine = load(Data(**fields, client_column="writer", partition=Client(client="70")))
    assert mine.labels.tolist() == [2, 1]
    assert load(Data(**fields, client_column="series")).clients == ("0", "0", "4")
    assert names_all(refused(**fields, client_column="who"), "'who'", "series, writer")
    for wrong in (rows[:2], rows[::-1], [row[:2] for row in rows], [2, 0, 1]):
        table.write_bytes(encode(wrong, "i4"))
        assert "qmnist-train-labels" in refused(**fields, client_column="writer")
    table.unlink()
    assert names_all(refused(**fields, client_column="writer"), folder, "qmnist-train-labels")


def test_the_real_mnist_has_its_published_counts(recorded):
    got = load(Data(source="idx", path=recorded("mnist"), split="test", client_column="writer"))
    assert got.inputs.shape == (10000, 1, 28, 28)
    assert got.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert len(set(got.clients)) == 297


def test_the_real_fashion_mnist(recorded):
    got = load(Data(source="idx", path=recorded("fashion-mnist"), split="test"))
    assert got.labels.bincount().tolist() == [1000] * 10
    assert float(got.inputs.mean()) == pytest.approx(0.2868, abs=1e-3)
