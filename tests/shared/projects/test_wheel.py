"""Wheels of projects: what is written is read, and an archive with anything else is refused as a whole."""

from __future__ import annotations

import io
import stat
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import CorruptFile
from shared.projects import wheel
from shared.projects.wheel import read_wheel, write_wheel
from tests.naming import naming

FILES = {"air/__init__.py": b"", "air/nets/deep.py": b"x = 1\n", "air/data.csv": b"1,2\n"}


def archive(*entries: tuple[str, bytes], mode: int = 0o100644, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for path, data in entries:
            entry = zipfile.ZipInfo(path)
            entry.external_attr, entry.compress_type = mode << 16, method
            file.writestr(entry, data)
    return out.getvalue()


def refusal(data: bytes) -> str:
    with pytest.raises(CorruptFile) as caught:
        read_wheel(data, "air", "0.1.0")
    return str(caught.value)


def test_what_is_written_is_read_after_its_folders():
    data = write_wheel("air", "0.1.0", FILES)
    assert data == write_wheel("air", "0.1.0", dict(reversed(FILES.items())))
    entries = {entry.path: entry for entry in read_wheel(data, "air", "0.1.0")}
    assert list(entries)[:4] == ["", "air", "air-0.1.0.dist-info", "air/nets"]
    assert {path: entries[path].content for path in FILES} == FILES
    assert {"METADATA", "WHEEL", "RECORD"} == {
        path.partition("/")[2] for path in entries if path.startswith("air-0.1.0.dist-info/")
    }
    assert not any(entry.is_program for entry in entries.values())


@pytest.mark.parametrize(
    "path",
    [
        *("../air/x.py", "air/../../x.py", "/etc/passwd", "air//x.py", "air/./x.py", "C:/x.py", "air\\x.py"),
        *(
            "x.py",
            "air.py",
            "numpy/__init__.py",
            "air.pth",
            "air-0.2.0.dist-info/METADATA",
            "air-0.1.0.data/x",
            "air",
            "air/",
        ),
        *("air/\x00x.py", "air/a\nb.py", f"air/{'a' * 300}.py", f"air/{'ä' * 130}.py", "air/\u202ex.py"),
        *("air/x.cpython-311-x86_64-linux-gnu.so", "air/__pycache__/x.cpython-311.pyc", "air/x.pyc"),
    ],
)
def test_a_path_out_of_its_own_folders_and_compiled_code_are_refused(path):
    data = archive(("air/__init__.py", b""), (path.replace("\x00", "X"), b""))
    assert "air" in refusal(data.replace(b"air/Xx.py", b"air/\x00x.py"))


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o644, stat.S_IFCHR | 0o644])
def test_links_and_devices_are_refused(mode):
    assert "'air/x.py'" in refusal(archive(("air/x.py", b"/etc/passwd"), mode=mode))


def test_two_files_of_one_name_are_refused(recwarn):
    for first, second in (("x", "X"), ("straße", "STRASSE"), ("é", "e\u0301")):
        assert "twice" in refusal(archive((f"air/{first}.py", b"1"), (f"air/{second}.py", b"2")))


METADATA = "air-0.1.0.dist-info/METADATA"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({METADATA: b"Name: torch\nVersion: 0.1.0\n"}, "METADATA"),
        ({METADATA: b"Name: air\nVersion: 9.9\n"}, "METADATA"),
        ({METADATA: b"name: torch\nName: air\nVersion: 0.1.0\n"}, "METADATA"),
        ({"air/__init__.py": None}, "air/__init__.py"),
        ({METADATA: None}, "METADATA"),
    ],
)
def test_metadata_of_another_distribution_and_a_missing_package_are_refused(files, named):
    """Python would find the wheel under that name and version."""
    whole = {METADATA: b"Name: air\nVersion: 0.1.0\n", "air/__init__.py": b"", "air/x.py": b""}
    assert read_wheel(archive(*whole.items()), "air", "0.1.0")
    assert named in refusal(archive(*((path, data) for path, data in (whole | files).items() if data is not None)))


def test_a_file_that_is_a_folder_too_is_refused():
    refusal(archive(("air/x", b"1"), ("air/x/y.py", b"2")))


def test_bombs_are_refused_before_they_are_unpacked(monkeypatch):
    """Whatever sizes the archive itself names."""
    monkeypatch.setattr(wheel, "MOST_UNPACKED", 1 << 20)
    bomb = archive(*((f"air/{number}.py", bytes(300 << 10)) for number in range(4)))
    assert len(bomb) < 8 << 10
    assert "MiB" in refusal(bomb)
    monkeypatch.setattr(wheel, "MOST_ENTRIES", 3)
    assert "4 entries" in refusal(archive(*((f"air/{number}.py", b"") for number in range(4))))


def test_a_wheel_of_another_version_is_refused():
    data = write_wheel("air", "0.1.0", FILES)
    with pytest.raises(CorruptFile, match=naming("air-0.1.0.dist-info")):
        read_wheel(data, "air", "0.2.0")


def test_packing_that_wheels_do_not_use_is_refused():
    assert "'air/x.py'" in refusal(archive(("air/x.py", b"1"), method=zipfile.ZIP_BZIP2))


@given(st.data())
def test_damaged_archives_are_refused_and_nothing_else(data):
    whole = bytearray(write_wheel("air", "0.1.0", FILES))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        entries = read_wheel(cut, "air", "0.1.0")
    except CorruptFile:
        return
    assert all(entry.path.split("/")[0] in ("", "air", "air-0.1.0.dist-info") for entry in entries)
