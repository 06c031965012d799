"""Folders of pictures: classes by name, one size, and damage that names its file."""

from __future__ import annotations

import errno
import os
import sys

import numpy as np
import pytest

from shared.data.load import load
from shared.data.spec import Data
from shared.runtime.extras import install_command
from tests.naming import names_all

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")


def draw(path, value, *, mode="L", size=(4, 2)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_classes_are_numbered_by_name_and_empty_ones_count(tmp_path, refused):
    draw(tmp_path / "cat" / "b.png", 51)
    draw(tmp_path / "cat" / "a.BMP", 0)
    draw(tmp_path / "eel" / "c.png", 255)
    (tmp_path / "dog").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "eel" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "eel" / ".c.png").write_bytes(b"x")
    got = load(Data(source="folder", path=str(tmp_path)))
    assert got.inputs.shape == (3, 1, 2, 4)
    assert got.inputs.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0, 0.2, 1])
    assert got.labels.tolist() == [0, 0, 2]
    assert names_all(
        refused(source="folder", path=str(tmp_path), split="test"), tmp_path, "train", "test", "evaluation.on_device"
    )


def test_both_splits_number_classes_alike(tmp_path):
    draw(tmp_path / "train" / "cat" / "a.png", 1)
    draw(tmp_path / "train" / "dog" / "a.png", 1)
    draw(tmp_path / "test" / "dog" / "b.png", 1)
    draw(tmp_path / "test" / "ant" / "b.png", 1)
    assert load(Data(source="folder", path=str(tmp_path))).labels.tolist() == [1, 2]
    assert load(Data(source="folder", path=str(tmp_path), split="test")).labels.tolist() == [0, 2]


def test_one_colour_picture_makes_three_channels(tmp_path):
    draw(tmp_path / "a" / "1.png", (255, 0, 51), mode="RGB")
    draw(tmp_path / "a" / "2.png", 102)
    draw(tmp_path / "a" / "3.png", (0, 255, 0, 9), mode="RGBA")
    got = load(Data(source="folder", path=str(tmp_path)))
    assert got.inputs[:, :, 0, 0].numpy() == pytest.approx(np.array([[1, 0, 0.2], [0.4, 0.4, 0.4], [0, 1, 0]]))


def test_pictures_that_do_not_fit(tmp_path, refused):
    draw(tmp_path / "a" / "1.png", 1)
    draw(tmp_path / "b" / "2.png", 1, size=(5, 2))
    message = refused(source="folder", path=str(tmp_path))
    assert names_all(message, tmp_path / "b/2.png", "5x2", "4x2", "1.png")
    draw(tmp_path / "b" / "2.png", 1, mode="I;16")
    assert names_all(refused(source="folder", path=str(tmp_path)), tmp_path / "b/2.png", "I;16")


def test_loops_and_pipes_do_not_stop_a_reader(tmp_path, refused):
    draw(tmp_path / "a" / "1.png", 1)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a" / "2.png")
    assert len(load(Data(source="folder", path=str(tmp_path)))) == 1
    (tmp_path / "a" / "3.png").symlink_to(tmp_path / "a" / "3.png")
    assert names_all(refused(source="folder", path=str(tmp_path)), tmp_path / "a/3.png", os.strerror(errno.ELOOP))


def test_damaged_pictures(tmp_path, refused):
    path = tmp_path / "a" / "1.png"
    draw(path, 1, size=(64, 64))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert names_all(refused(source="folder", path=str(tmp_path)), path)
    path.write_bytes(b"GIF, no")
    assert names_all(refused(source="folder", path=str(tmp_path)), path, "Pillow")


def test_a_damaged_picture_whose_name_is_not_utf8_can_be_told_to_the_server(tmp_path, refused):
    path = tmp_path / "a" / "1.png"
    draw(path, 1)
    path.write_bytes(b"no picture")
    path.rename(os.fsdecode(os.fsencode(tmp_path / "a") + b"/bild\xe4.png"))
    message = refused(source="folder", path=str(tmp_path))
    assert "bild\\udce4.png" in message
    assert message.encode()


def test_a_picture_that_claims_to_be_huge(tmp_path, refused):
    """The header of a PNG, 100,000 pixels wide and high."""
    path = tmp_path / "a" / "1.png"
    draw(path, 1)
    content = bytearray(path.read_bytes())
    content[16:24] = (100_000).to_bytes(4, "big") * 2
    path.write_bytes(content)
    assert names_all(refused(source="folder", path=str(tmp_path)), path)


def test_absent_folders(tmp_path, refused):
    assert names_all(refused(source="folder", path=str(tmp_path / "nowhere")), tmp_path / "nowhere")
    assert names_all(refused(source="folder", path=str(tmp_path)), tmp_path)
    draw(tmp_path / "train" / "a" / "1.png", 1)
    assert names_all(refused(source="folder", path=str(tmp_path), split="test"), tmp_path / "test", "train")


def test_without_pillow(tmp_path, monkeypatch, refused):
    draw(tmp_path / "a" / "1.png", 1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert install_command("images") in refused(source="folder", path=str(tmp_path))


def test_postscript_by_the_name_of_a_picture_runs_nothing(tmp_path, monkeypatch, refused):
    """Pillow goes by what is in a file, and would have Ghostscript draw this."""
    (tmp_path / "bin").mkdir()
    ghostscript, mark = tmp_path / "bin" / "gs", tmp_path / "ran"
    ghostscript.write_text(f"#!/bin/sh\necho 10.0\ntouch {mark}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "1.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 2\n%%EndComments\nshowpage\n"
    )
    assert names_all(refused(source="folder", path=str(tmp_path / "set")), tmp_path / "set/a/1.png", "Pillow")
    assert not mark.exists()


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "pgm", "png", "ppm", "tif", "webp"])
def test_each_kind_of_picture_is_read(tmp_path, suffix):
    draw(tmp_path / "a" / f"1.{suffix}", (9, 9, 9) if suffix == "ppm" else 9, mode="RGB" if suffix == "ppm" else "L")
    assert load(Data(source="folder", path=str(tmp_path))).labels.tolist() == [0]


@pytest.mark.parametrize("suffix", ["heic", "avif", "wav", "docx"])
def test_files_of_other_formats_are_told(tmp_path, caplog, refused, suffix):
    (tmp_path / "a").mkdir()
    for number in range(3):
        (tmp_path / "a" / f"{number}.{suffix.upper()}").write_bytes(b"x")
    message = refused(source="folder", path=str(tmp_path))
    assert names_all(message, tmp_path, f".{suffix}", 3, ".bmp, .gif")
    draw(tmp_path / "a" / "3.png", 1)
    assert len(load(Data(source="folder", path=str(tmp_path)))) == 1
    assert names_all(caplog.text, f".{suffix}", 3, ".bmp, .gif")


def test_a_class_folder_without_pictures_is_told(tmp_path, caplog):
    draw(tmp_path / "cat" / "0.png", 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "lost+found").mkdir()
    load(Data(source="folder", path=str(tmp_path)))
    told = [record.getMessage() for record in caplog.records]
    assert sum(names_all(line, "notes") for line in told) == 1
    assert sum(names_all(line, "lost+found", 1) for line in told) == 1


@pytest.mark.parametrize(
    ("picture", "folder", "right"),
    [
        ("archive/cat/0.png", "archive/cat", "archive"),
        ("archive/data/train/cat/0.png", "archive/data/train/cat", "archive/data"),
        ("0.png", "", ""),
    ],
)
def test_pictures_elsewhere_are_found_for_the_message(tmp_path, refused, picture, folder, right):
    """With the folder that `path` must name; where each picture must be moved there is none."""
    draw(tmp_path / picture, 1)
    message = refused(source="folder", path=str(tmp_path))
    assert names_all(message, tmp_path / folder, tmp_path / right)
    assert ("path" in message.rpartition("; ")[2]) == bool(right)


def test_unsorted_pictures_are_found_in_any_folder_but_those_of_the_system(tmp_path):
    for name in ("0.png", "x/y/1.png", "@eaDir/2.png", ".hidden/3.png", "x/.trash/4.png"):
        draw(tmp_path / name, 1)
    assert len(load(Data(source="folder", path=str(tmp_path), labels="none"))) == 2
