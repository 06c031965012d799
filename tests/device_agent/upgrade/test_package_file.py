"""Packages as dpkg makes them are read, and what no package of ours holds is refused as a whole."""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess  # noqa: TID251 - dpkg-deb makes a package
import tarfile

import pytest

from device_agent.upgrade.package_file import unpack_package
from shared.errors import CorruptFile
from shared.runtime.support import deb_file
from tests.device_agent.upgrade.packages import (
    INTERPRETER,
    archive,
    deb,
    folder_of,
    member,
    package,
    tree_of,
)
from tests.naming import naming

FOLDER = "opt/fieldfleet/2"
HOME = [folder_of(f"./{one}") for one in ("", "opt/", "opt/fieldfleet/", f"{FOLDER}/", f"{FOLDER}/bin/")]


def unpacked(data):
    return list(unpack_package(data, FOLDER, INTERPRETER))


def test_just_the_folder_of_its_version_is_taken():
    tree = tree_of("2")
    found = unpacked(package("2", tree))
    assert {one.path: one.content for one in found if one.kind == "file"} == tree
    assert {one.path for one in found if one.is_program} == {"agent.sh"}
    assert [(one.path, one.content.decode()) for one in found if one.kind == "link"] == [("bin/python3", INTERPRETER)]
    assert {one.path for one in found if one.kind == "folder"} == {"", "bin", "lib"}


def test_a_package_of_dpkg_is_read(tmp_path):
    if not shutil.which("dpkg-deb"):
        pytest.skip("dpkg-deb is not installed here")
    long = "a" * 90
    home = tmp_path / "root" / FOLDER
    for path, content in ((f"{long}/{long}/module.py", "X = 1\n"), ("bin/tool", "#!/bin/sh\n")):
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(content)
    (home / "bin/tool").chmod(0o755)
    (home / "bin/python3").symlink_to(INTERPRETER)
    control = tmp_path / "root/DEBIAN/control"
    control.parent.mkdir()
    control.write_text("Package: x\nVersion: 2\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n")
    built = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tmp_path / "root"), str(tmp_path / "x.deb")]
    subprocess.run(built, check=True, capture_output=True)  # noqa: S603
    found = {one.path: one for one in unpacked((tmp_path / "x.deb").read_bytes())}
    assert found[f"{long}/{long}/module.py"].content == b"X = 1\n"
    assert found["bin/tool"].is_program
    assert found["bin/python3"].kind == "link"


REFUSED = {
    "a link out": (member(f"./{FOLDER}/a", type=tarfile.SYMTYPE, linkname="../../x"), "../../x"),
    "a link to the root": (member(f"./{FOLDER}/a", type=tarfile.SYMTYPE, linkname="/etc/shadow"), "/etc/shadow"),
    "another interpreter": (member(f"./{FOLDER}/bin/python3", type=tarfile.SYMTYPE, linkname="/bin/sh"), "/bin/sh"),
    "an absolute name": (member(f"/{FOLDER}/a", b"x"), f"/{FOLDER}/a"),
    "a name that climbs": (member(f"./{FOLDER}/../../../etc/x", b"x"), "../../../etc/x"),
    "a name that climbs elsewhere": (member("./usr/../../x", b"x"), "./usr/../../x"),
    "a device": (member(f"./{FOLDER}/a", type=tarfile.CHRTYPE), f"{FOLDER}/a"),
    "a pipe": (member(f"./{FOLDER}/a", type=tarfile.FIFOTYPE), f"{FOLDER}/a"),
    "a hard link": (member(f"./{FOLDER}/a", type=tarfile.LNKTYPE, linkname="/etc/shadow"), f"{FOLDER}/a"),
    "set-user-id": (member(f"./{FOLDER}/a", b"x", mode=0o4755), f"{FOLDER}/a"),
    "set-group-id": (member(f"./{FOLDER}/a", b"x", mode=0o2755), f"{FOLDER}/a"),
    "a file without its folder": (member(f"./{FOLDER}/none/a", b"x"), f"{FOLDER}/none/a"),
    "a folder twice": (folder_of(f"./{FOLDER}/bin/"), f"{FOLDER}/bin"),
    "a file as the folder": (member(f"./{FOLDER}", b"x"), FOLDER),
    "a name of two lines": (member(f"./{FOLDER}/a\nb", b"x"), "a\\nb"),
    "a name with a zero": (member(f"./{FOLDER}/a\0b", b"x"), "a\\x00b"),
    "a long name with a zero": (member(f"./{FOLDER}/{'a' * 200}\0b", b"x"), "a" * 90),
    "a name with a bell": (member(f"./{FOLDER}/a\a", b"x"), "a\\x07"),
    "a link to two lines": (member(f"./{FOLDER}/a", type=tarfile.SYMTYPE, linkname="b\nc"), "b\\nc"),
    "a header of POSIX": (member(f"./{FOLDER}/a", b"x", type=tarfile.XHDTYPE), f"{FOLDER}/a"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_package_of_ours_holds_is_refused(what):
    entry, named = REFUSED[what]
    with pytest.raises(CorruptFile, match=re.escape(named)):
        unpacked(deb(archive(*HOME, entry)))


def test_a_link_below_its_folder_is_taken_and_nothing_is_written_through_it():
    link = member(f"./{FOLDER}/bin/a", type=tarfile.SYMTYPE, linkname="../bin/b")
    assert unpacked(deb(archive(*HOME, link)))[-1].content == b"../bin/b"
    through = member(f"./{FOLDER}/bin/a/x", b"x")
    with pytest.raises(CorruptFile, match=f"{FOLDER}/bin/a/x"):
        unpacked(deb(archive(*HOME, link, through)))


def link_to(path, target):
    return member(f"./{FOLDER}/{path}", type=tarfile.SYMTYPE, linkname=target)


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ([("bin/x", ".."), ("__pycache__", "bin/x/..")], "'__pycache__'"),
        ([("__pycache__", "bin/x/.."), ("bin/x", "..")], "'__pycache__'"),
        ([("bin/x", ".."), ("__pycache__", "bin/x/bin")], "'__pycache__'"),
        ([("__pycache__", "bin/x/bin"), ("bin/x", "..")], "'__pycache__'"),
        ([("bin/y", "python3/lib"), ("bin/python3", INTERPRETER)], "'bin/y'"),
        ([("a", "bin//x")], "'a'"),
        ([("a", "")], "'a'"),
    ],
)
def test_links_that_lead_out_together_are_refused(links, named):
    """Each for itself seems to stay below the folder, counted by the words of its target."""
    with pytest.raises(CorruptFile, match=named):
        unpacked(deb(archive(*HOME, *(link_to(*one) for one in links))))


@pytest.mark.parametrize(("name", "most"), [("MOST_FILE", 10), ("MOST_UNPACKED", 9000), ("MOST_ENTRIES", 3)])
def test_what_it_claims_to_hold_is_bounded(monkeypatch, name, most):
    data = package("2", tree_of("2"))
    monkeypatch.setattr(deb_file, name, most)
    with pytest.raises(CorruptFile, match=naming(most)):
        unpacked(data)


def test_an_archive_that_stands_for_hundreds_of_times_its_size_is_not_unpacked(monkeypatch):
    """223 kB took up to 75 s: it is given up after 64 times its size, or 16 MiB."""
    bomb = archive(*HOME, *(member(f"./{FOLDER}/{number}", bytes(32 << 20)) for number in range(8)))
    assert len(bomb) < 1 << 18
    read = list[int]()
    more = deb_file.lzma.LZMADecompressor

    class Counted:
        def __init__(self, *arguments, **options):
            self._inner = more(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def decompress(self, *arguments):
            found = self._inner.decompress(*arguments)
            read.append(len(found))
            return found

    monkeypatch.setattr(deb_file.lzma, "LZMADecompressor", Counted)
    with pytest.raises(CorruptFile, match=naming(16 << 20)):
        unpacked(deb(bomb))
    assert sum(read) < 20 << 20


def test_a_file_of_the_largest_size_takes_no_memory_that_was_not_sent():
    info, _ = member(f"./{FOLDER}/a")
    info.size = deb_file.MOST_FILE
    with pytest.raises(CorruptFile):
        unpacked(deb(lzma.compress(b"".join(tarfile.TarInfo.tobuf(one[0]) for one in [*HOME, (info, b"")]))))


def test_a_package_of_another_version_is_told_so():
    with pytest.raises(CorruptFile, match=naming(FOLDER)):
        unpacked(package("3", tree_of("3")))
    data = package("2", tree_of("2"))
    with pytest.raises(CorruptFile):
        unpacked(deb(archive(*HOME) + b"\0"))
    assert unpacked(data)
