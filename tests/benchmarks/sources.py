"""Rate of each data source, as a share of that of numpy, Pillow, soundfile, sqlite3 or pyarrow alone.

Both read the same files of a temporary folder into float32 arrays, in turns, in CPU seconds of one thread. Sound is
compared twice: decoding alone, and with log-mel features by a plain numpy expression of the same size.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import soundfile
from measure import Figure
from PIL import Image

from shared.data.formats import Mel
from shared.data.sources.audio import read_samples
from shared.data.sources.mel import fft_size, filterbank
from shared.data.sources.read import read_part
from shared.data.spec import Data

TURNS = 7  # the first one imports libraries
ROWS, COLUMNS, FILES = 100_000, 10, 400
QUICK_SHARE = 20
LARGER = 5
"""Times the rows of an archive, which is read faster than a table."""
RATE = 16000
TARGET = ">= 0.7"


def run(*, quick: bool = False) -> list[Figure]:
    """Measure every source."""
    rows, files = (ROWS // QUICK_SHARE, FILES // QUICK_SHARE) if quick else (ROWS, FILES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [*_tables(folder, rows), *_pictures(folder, files), *_sounds(folder, files)]
        return [_compare(what, ours, theirs) for what, ours, theirs in pairs]


Pair = tuple[str, Callable[[], object], Callable[[], object]]


def _compare(what: str, ours: Callable[[], object], theirs: Callable[[], object]) -> Figure:
    """Return the rate of ours as a share of theirs; the least of several turns each, one after the other."""
    spent: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(TURNS):
        for name, call in (("ours", ours), ("theirs", theirs)):
            began = time.process_time()
            call()
            spent[name].append(time.process_time() - began)
    return Figure(f"rate of {what}", min(spent["theirs"]) / min(spent["ours"]), "of it alone", TARGET)


def _read(source: str, path: Path, **keys: object) -> Callable[[], object]:
    spec = Data(source=source, path=str(path), **keys)  # type: ignore[arg-type]  # keys of one source each
    return lambda: read_part(spec)


def _tables(folder: Path, rows: int) -> Iterator[Pair]:
    random = np.random.default_rng(1)
    values, labels = random.standard_normal((rows, COLUMNS)).round(5), random.integers(0, 7, rows)
    names = [*(f"c{at}" for at in range(COLUMNS)), "label"]
    table = np.column_stack([values, labels])
    path = folder / "a.csv"
    np.savetxt(path, table, fmt=["%.5f"] * COLUMNS + ["%d"], delimiter=",", header=",".join(names), comments="")
    by_numpy = lambda: np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)  # noqa: E731 - one expression
    yield "csv with classes, by numpy.loadtxt", _read("csv", path), by_numpy
    yield "csv with a target, by numpy.loadtxt", _read("csv", path, target_columns=("label",)), by_numpy
    growing = _read("csv", path, target_columns=("label",), growing=True)
    yield "growing csv with a target, by numpy.loadtxt", growing, by_numpy

    gaps, commas, lines = folder / "gaps.csv", folder / "commas.csv", path.read_text().splitlines()
    lines[50::50] = [line.replace(line.split(",")[3], "", 1) for line in lines[50::50]]
    gaps.write_text("\n".join(lines))
    by_genfromtxt = lambda: np.genfromtxt(gaps, delimiter=",", skip_header=1, dtype=np.float32)  # noqa: E731 - as above
    yield "csv with missing numbers, by numpy.genfromtxt", _read("csv", gaps, drop_missing=("", "NA")), by_genfromtxt
    commas.write_text(path.read_text().replace(",", ";").replace(".", ","))

    def replace_commas() -> object:
        points = commas.read_text().replace(",", ".").splitlines()
        return np.loadtxt(points, delimiter=";", skiprows=1, dtype=np.float32)

    decimal = _read("csv", commas, target_columns=("label",), separator=";", decimal=",")
    yield "csv with decimal commas and a target, by numpy.loadtxt", decimal, replace_commas

    archive = folder / "a.npz"
    np.savez(archive, x=np.tile(values, (LARGER, 1)), y=np.tile(labels, LARGER))

    def load() -> object:
        with np.load(archive) as file:
            return file["x"].astype(np.float32), file["y"]

    yield "npz, by numpy.load", _read("npz", archive), load

    database = folder / "a.sqlite"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"CREATE TABLE a ({', '.join(names)})")
        connection.executemany(f"INSERT INTO a VALUES ({', '.join('?' * len(names))})", table.tolist())  # noqa: S608 - ours

    def select() -> object:
        with closing(sqlite3.connect(database)) as connection:
            return np.array(connection.execute("SELECT * FROM a").fetchall()).astype(np.float32)

    yield "sqlite with a target, by sqlite3", _read("sqlite", database, target_columns=("label",)), select
    yield from _parquet(folder, names, table)


def _parquet(folder: Path, names: list[str], table: np.ndarray) -> Iterator[Pair]:
    import pyarrow as pa  # noqa: PLC0415 - after the others, whose memory it would touch
    from pyarrow import parquet  # noqa: PLC0415 - as above

    path = folder / "a.parquet"
    parquet.write_table(pa.table(list(table.T), names=names), path)

    def load() -> object:
        read = parquet.read_table(path, use_threads=False)
        return np.column_stack([column.to_numpy() for column in read.columns]).astype(np.float32)

    yield "parquet with a target, by pyarrow", _read("parquet", path, target_columns=("label",)), load


def _pictures(folder: Path, files: int) -> Iterator[Pair]:
    random = np.random.default_rng(2)
    for suffix, side in (("png", 32), ("jpg", 256)):
        for number in range(files):
            path = folder / suffix / "ab"[number % 2] / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            coarse.resize((side, side), Image.Resampling.BICUBIC).save(path)

    def decode(suffix: str, size: int | None) -> object:
        pictures = []
        for path in sorted((folder / suffix).rglob(f"*.{suffix}")):
            with Image.open(path) as picture:
                picture = picture.convert("RGB")  # noqa: PLW2901 - as its users write it
                pictures.append(
                    np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR) if size else picture)
                )
        return np.stack(pictures).transpose(0, 3, 1, 2).astype(np.float32) / 255

    yield "folder of PNG, by Pillow", _read("folder", folder / "png"), lambda: decode("png", None)
    resized = _read("folder", folder / "jpg", size=(64, 64))
    yield "folder of JPEG resized, by Pillow", resized, lambda: decode("jpg", 64)


def _sounds(folder: Path, files: int) -> Iterator[Pair]:
    random, mel = np.random.default_rng(3), Mel()
    for number in range(files):
        path = folder / "sounds" / "ab"[number % 2] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, random.uniform(-0.5, 0.5, RATE), RATE)
    paths = sorted((folder / "sounds").rglob("*.wav"))
    weights, hann = filterbank(mel).T, np.hanning(mel.samples_per_frame).astype(np.float32)

    def features() -> object:
        found = []
        for path in paths:
            samples, _ = soundfile.read(path, dtype="float32")
            windows = np.lib.stride_tricks.sliding_window_view(samples, mel.samples_per_frame)[:: mel.samples_per_hop]
            power = np.abs(np.fft.rfft(windows * hann, n=fft_size(mel))) ** 2
            found.append(np.log(power @ weights + 1e-6).T)
        return np.stack(found).astype(np.float32)

    decoded = lambda: [read_samples(soundfile, path, mel) for path in paths]  # noqa: E731 - one expression
    alone = lambda: [soundfile.read(path, dtype="float32") for path in paths]  # noqa: E731 - one expression
    yield "decoding of WAV, by soundfile", decoded, alone
    yield "WAV with mel features, by soundfile and numpy", _read("audio", folder / "sounds"), features
