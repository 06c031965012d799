"""Few bytes that stand for many: refused by what their headers say, before memory is taken."""

from __future__ import annotations

import gzip
import resource
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.data.sources.csv_lines import MAX_ROW_CHARS
from shared.runtime import memory
from shared.runtime.memory import MAX_EXPANSION
from tests.naming import names_all

MIB = 1 << 20
LEFT = 64 * MIB


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Leave this process 64 MiB."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        while not 0 < memory.available_bytes() <= LEFT:  # a thread that another test left behind may end meanwhile
            leave(LEFT)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def leave(count: int) -> None:
    """Leave this process so many bytes."""
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (count + taken, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.fixture
def bomb(refused):
    """Return what checks that a spec is refused for its size, and took next to nothing."""

    def check(**fields: object) -> None:
        before = peak()
        message = refused(**fields)
        assert names_all(message, "MiB", "trainer.memory_mb")
        assert peak() - before < LEFT // 2

    return check


def test_pictures(tmp_path, bomb):
    """Six of 4 KiB on the disk, 120 MB as numbers."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    (tmp_path / "a").mkdir()
    image.new("L", (2000, 2000)).save(tmp_path / "a" / "0.png")
    for number in range(1, 6):
        shutil.copy(tmp_path / "a" / "0.png", tmp_path / "a" / f"{number}.png")
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < MIB
    bomb(source="folder", path=str(tmp_path))


def test_arrays(tmp_path, bomb):
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros((20, 1000, 1000), np.uint8), y=np.zeros(20, np.int64))
    assert path.stat().st_size < MIB
    bomb(source="npz", path=str(path))


def test_many_windows_of_one_stream(tmp_path, bomb):
    path = tmp_path / "stream.npz"
    start = np.zeros(200_000, np.int32)
    arrays = {"signal": np.zeros((3, 200), np.float32), "start": start, "label": start, "subject": start}
    np.savez_compressed(path, **arrays, test_subjects=np.ones(1, np.int32))
    bomb(source="npz", path=str(path))


def test_a_zip_that_holds_no_array_is_not_read(tmp_path, refused):
    path = tmp_path / "bytes.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", bytes(100 * MIB // 2))
        file.writestr("y", bytes(8))
    before = peak()
    assert names_all(refused(source="npz", path=str(path)), path, "x")
    assert peak() - before < LEFT // 2


def test_zipped_idx(tmp_path, bomb):
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (20, 1000, 1000)))
        for _ in range(20):
            file.write(bytes(1_000_000))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + (20).to_bytes(4, "big") + bytes(20))
    bomb(source="idx", path=str(tmp_path))


def test_a_line_without_an_end(refused, tmp_path):
    path, before = tmp_path / "zeros.csv", peak()
    with path.open("wb") as file:
        file.truncate(8 * LEFT)
    assert names_all(refused(source="csv", path=str(path)), path, MAX_ROW_CHARS)
    assert peak() - before < 2 * LEFT


def write_lines(path: Path, first: str, lines: str) -> None:
    """Write a table of 128 MiB."""
    with path.open("w") as file:
        file.write(first)
        file.writelines(lines for _ in range(2 * LEFT // len(lines)))


def test_a_row_that_quotes_spread_over_many_lines(refused, tmp_path):
    """Every line of it is short."""
    path = tmp_path / "quotes.csv"
    write_lines(path, 'label,a\n"x\n', '","\n' + "x" * 1000 + "\n")
    assert names_all(refused(source="csv", path=str(path)), path, MAX_ROW_CHARS)


@pytest.mark.parametrize("label", ["label", '"label"'])
def test_more_lines_than_there_is_room_for(refused, tmp_path, label):
    """No line is long; one with quotes is read without numpy."""
    path, columns = tmp_path / "long.csv", 2000
    write_lines(
        path, f"{label}," + ",".join(f"a{number}" for number in range(columns)) + "\n", "1" + ",0" * columns + "\n"
    )
    leave(LEFT // 4)
    before = peak()
    assert names_all(refused(source="csv", path=str(path)), "MiB", "trainer.memory_mb")
    assert peak() - before < 2 * LEFT


@pytest.fixture
def much_memory():
    """As a gateway has it: there is room for the bomb."""
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.usefixtures("much_memory")
def test_little_that_stands_for_much_is_not_unpacked_where_there_is_room_for_it(tmp_path, refused):
    path, other = tmp_path / "zeros.npz", tmp_path / "other.npz"
    np.savez_compressed(path, x=np.zeros((400, 1000, 1000), np.uint8), y=np.zeros(400, np.int64))
    np.savez_compressed(other, x=np.zeros((200, 1000, 1000), np.uint8), y=np.zeros(7, np.int64))
    image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    (tmp_path / "a").mkdir()
    image.new("RGB", (5000, 5000)).save(tmp_path / "a" / "0.png")
    for number in range(1, 6):
        shutil.copy(tmp_path / "a" / "0.png", tmp_path / "a" / f"{number}.png")
    before = peak()
    assert names_all(refused(source="npz", path=str(path)), path, MAX_EXPANSION)
    assert names_all(refused(source="npz", path=str(other)), other, "200 x", "7 y")
    assert names_all(refused(source="folder", path=str(tmp_path)), MAX_EXPANSION)
    assert peak() - before < LEFT // 2
