"""Doctor's data check: what a task cannot read is bad, with the task's message."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from device_agent.commands.diagnosis.checks import Check
from device_agent.commands.diagnosis.data_check import check_examples
from device_agent.commands.diagnosis.data_reader import read_examples
from shared.data import summary
from shared.data.load import load
from shared.data.spec import Data, Even
from shared.errors import ConfigError
from tests.naming import names_all

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")

NOISE = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)


def picture(kind: str = "PNG", pixels: object = NOISE) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def zipped(**arrays: object) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


JPEG = picture("JPEG")
WAV = b"RIFF\x24\0\0\0WAVEfmt " + bytes(28)
X, Y = np.ones((4, 3), np.float32), np.arange(4) % 2
UNREADABLE: dict[str, tuple[str, Mapping[str, bytes], str]] = {
    "semicolons": ("csv", {"t.csv": b"a;b;label\n1,5;2;x\n"}, 'separator = ";"'),
    "an empty cell": ("csv", {"t.csv": b"a,b,label\n1,2,x\n1,,y\n"}, "column 'b'"),
    "UTF-16": ("csv", {"t.csv": "a,label\n1,x\n".encode("utf-16")}, "UTF-8"),
    "float labels": ("csv", {"t.csv": b"a,label\n1,0.0\n2,1.0\n"}, "'0.0'"),
    "an index": ("csv", {"t.csv": b",a,label\n0,1,x\n"}, "index=False"),
    "a cut JPEG": ("folder", {"cat/0.jpg": JPEG, "dog/0.jpg": JPEG[: len(JPEG) // 2]}, "dog/0.jpg"),
    "a JPEG with zeros": ("folder", {"cat/0.jpg": JPEG[:3000] + bytes(len(JPEG) - 3000)}, "cat/0.jpg"),
    "an empty file": ("folder", {"cat/0.jpg": b""}, "cat/0.jpg"),
    "16 bits": ("folder", {"cat/0.png": picture(pixels=np.ones((8, 8), np.uint16))}, "I;16"),
    "two sizes": ("folder", {"a/0.png": picture(), "b/0.png": picture(pixels=NOISE[:9])}, "64x9"),
    "one level too deep": ("folder", {"all/cat/0.png": picture(), "all/dog/0.png": picture()}, "all/cat"),
    "no class folder": ("folder", {"0.png": picture()}, ""),
    "sounds": ("folder", {"cat/0.wav": WAV, "dog/0.wav": WAV}, ".wav"),
    "one-hot labels": ("npz", {"t.npz": zipped(x=X, y=np.eye(4, dtype=int))}, "argmax"),
    "floats for labels": ("npz", {"t.npz": zipped(x=X, y=Y.astype(float))}, "float64"),
    "NaN": ("npz", {"t.npz": zipped(x=np.where(X > 0, np.nan, X), y=Y)}, "NaN"),
    "too few labels": ("npz", {"t.npz": zipped(x=X, y=Y[:3])}, "3 y"),
    "a cut file": ("npz", {"t.npz": zipped(x=X, y=Y)[:-40]}, "t.npz"),
    "no digits": ("idx", {"train-images-idx3-ubyte": b"\0\0\x08\x03"}, "train-images-idx3-ubyte"),
}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def numbers_of(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def checked(spec: Data, memory_mb: int = 0) -> list[Check]:
    return list(check_examples(spec, memory_mb))


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_no_task_can_read_is_refused_with_the_words_of_the_task(tmp_path, case) -> None:
    source, files, words = UNREADABLE[case]
    write(tmp_path, files)
    path = tmp_path if source in ("folder", "idx") else tmp_path / next(iter(files))
    spec = Data(source=source, path=str(path))
    refusal = read_examples(spec, complete=False).refusal
    with pytest.raises(ConfigError) as caught:
        load(spec)
    assert refusal == str(caught.value)
    assert words in refusal
    if case in ("semicolons", "no class folder"):  # the child process passes on what it reads
        [check] = checked(spec)
        said = f"{check.finding}; {check.remedy}" if check.remedy else check.finding
        assert (check.name, check.state, said) == ("data", "bad", refusal)


def test_what_can_be_read_is_counted(tmp_path) -> None:
    files = {f"{name}/{number}.png": picture() for name, count in (("cat", 3), ("dog", 1)) for number in range(count)}
    write(tmp_path, files | {"cat/x.heic": b"x", "notes.txt": b"x", "lost+found/x": b"x"})
    (tmp_path / "eel").mkdir()
    ok, *warned = checked(Data(source="folder", path=str(tmp_path), holdout=0.25))
    assert ok.state == "ok"
    assert numbers_of(ok.finding.removeprefix(str(tmp_path))) == [4, 2, 3, 1, 3, 64, 64, 0, 1, 3, 1]
    assert names_all(ok.finding, "cat: 3", "dog: 1", "3x64x64")
    assert {check.state for check in warned} == {"warn"}
    skipped, empty, absent = (check.finding for check in warned)
    assert names_all(skipped, ".heic", ".txt", "lost+found")
    assert "eel" in empty
    assert "eel" in absent
    assert empty != absent


@pytest.mark.parametrize("source", ["csv", "npz", "folder", "idx"])
def test_of_much_a_part_is_read(tmp_path, monkeypatch, source) -> None:
    """And so far the trainer's reader has it; of what is counted without reading it all is told."""
    x, y = np.random.RandomState(0).randint(0, 256, (50, 4, 4)).astype(np.uint8), np.arange(50) % 5
    if source == "folder":
        write(tmp_path, {f"{label}/{at}.png": picture(pixels=x[at]) for at, label in enumerate(y.tolist())})
    elif source == "npz":
        (tmp_path / "t.npz").write_bytes(zipped(x=x, y=y))
    elif source == "idx":
        head = b"\0\0\x08\x03" + b"".join(count.to_bytes(4, "big") for count in x.shape)
        labels = b"\0\0\x08\x01" + (50).to_bytes(4, "big") + y.astype(np.uint8).tobytes()
        write(tmp_path, {"train-images-idx3-ubyte": head + x.tobytes(), "train-labels-idx1-ubyte": labels})
    else:
        lines = [",".join(map(str, [*row.flatten().tolist(), label])) for row, label in zip(x, y.tolist(), strict=True)]
        header = ",".join([*(f"p{at}" for at in range(16)), "label"])
        (tmp_path / "t.csv").write_text("\n".join([header, *lines]))
    path = tmp_path / f"t.{source}" if source in ("csv", "npz") else tmp_path
    whole = summary.summarise(Data(source=source, path=str(path))).finding
    assert numbers_of(whole)[:2] == [50, 5]
    monkeypatch.setattr(summary, "MOST_VALUES", 160)
    monkeypatch.setattr(summary, "MOST_CELLS", 160)
    part = summary.summarise(Data(source=source, path=str(path))).finding
    assert numbers_of(part)[0] == (10 if source == "csv" else 50)
    assert numbers_of(part)[1] == 10, "that were read"


def test_a_share_is_told(tmp_path) -> None:
    (tmp_path / "t.npz").write_bytes(zipped(x=X, y=Y))
    spec = Data(source="npz", path=str(tmp_path / "t.npz"), partition=Even(parts=2, index=0))
    assert numbers_of(checked(spec)[0].finding.removeprefix(spec.path))[:2] == [2, 4]
    (tmp_path / "t.npz").write_bytes(zipped(x=X[:1], y=Y[:1]))
    assert checked(Data(source="npz", path=str(tmp_path / "t.npz"), partition=Even(parts=9, index=0)))[0].state == "bad"


def test_a_class_folder_whose_name_is_not_utf8_is_bad(tmp_path) -> None:
    write(tmp_path, {"cat/0.png": picture(), "dog/0.png": picture()})
    os.rename(os.fsencode(tmp_path / "dog"), os.fsencode(tmp_path) + b"/M\xfcll")  # noqa: PTH104 - bytes
    [check] = checked(Data(source="folder", path=str(tmp_path)))
    assert (check.state, "M\\udcfcll" in check.finding, bool(check.remedy)) == ("bad", True, True)


def test_where_memory_is_too_small_it_says_so(tmp_path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((20_000_000, 1), np.float32), y=np.zeros(20_000_000, np.int8))
    [check] = checked(Data(source="npz", path=str(tmp_path / "t.npz")), memory_mb=100)
    assert (check.state, "trainer.memory_mb" in check.remedy) == ("bad", True)
