"""Packages of the agent as gateways and roots read them, and what agent and updater tell each other by."""

from __future__ import annotations

import lzma
import re
from functools import cache
from pathlib import PurePosixPath
from random import Random

import msgspec

from device_agent.upgrade.package_file import unpack_package
from device_agent.upgrade.record import HealthProof, UpgradeRecord, UpgradeTarget
from edge_server.gateway.packages.deb import read_facts
from shared.errors import ConfigError, CorruptFile
from shared.runtime.state_formats import decode_small
from shared.runtime.support.deb_file import BLOCK
from tests.device_agent.upgrade.packages import INTERPRETER, deb, package, tree_of
from tests.edge_server.gateway.sites import deb as offered_deb
from tests.fuzz.damages import Damages
from tests.fuzz.trees import cut_and_spliced

FOLDER = "opt/fieldfleet/2"
RECORDS = (UpgradeRecord, UpgradeTarget, HealthProof)


@cache
def package_seeds() -> list[bytes]:
    """Return packages."""
    return [package("2", {"agent.sh": b"#!/bin/sh\n", "lib/module.py": b"X = 1\n" * 40}), package("2", tree_of("2"))]


def read_package(data: bytes) -> str:
    """A folder of which nothing leads out, or the one error."""
    try:
        found = list(unpack_package(data, FOLDER, INTERPRETER))
    except CorruptFile as error:
        return f"refused: {error}"
    folders = {one.path for one in found if one.kind == "folder"}
    for one in found:
        path = PurePosixPath(one.path)
        assert not path.is_absolute()
        assert ".." not in path.parts
        assert not one.path or str(path.parent).replace(".", "", 1) in folders or str(path.parent) in folders
        assert one.kind != "link" or one.content.decode() == INTERPRETER or not one.content.startswith(b"/")
        assert one.kind != "link" or ".." not in re.sub(r"^(\.\./)*(\.\.$)?", "", one.content.decode()).split("/")
    return "accepted"


def mutate_package(data: bytes, random: Random) -> bytes:
    """Damage the bytes, or what is packed in them, with the checksums as they should be then."""
    if random.random() < 0.3:
        return cut_and_spliced(data, random)
    try:
        control, files = (bytearray(lzma.decompress(one)) for one in _archives(data))
    except (lzma.LZMAError, ValueError):
        return cut_and_spliced(data, random)
    tar = random.choice((control, files))
    for _ in range(random.randint(1, 3)):
        _damage_tar(tar, random)
    return deb(*(lzma.compress(bytes(one), preset=0) for one in (files, control)))


def _archives(data: bytes) -> list[bytes]:
    parts = list(re.finditer(rb"(control|data)\.tar\.xz .{32}(\d+) *`\n", data, re.DOTALL))
    return [data[one.end() : one.end() + int(one[2])] for one in parts[:2]]


ODD = (
    b"FORMATS = 3\n",
    b"FORMATS = {3: []}\n",
    b"FORMATS = {[]: 1}\n",
    b"-" * 200,
    b"(" * 200,
    b"Package: x\n",
    b"\xff",
)


def _damage_tar(tar: bytearray, random: Random) -> None:
    """Change a field of a header, with its sum; or a content, in its place."""
    block = random.randrange(max(len(tar) // BLOCK, 1)) * BLOCK
    head = tar[block : block + BLOCK]
    if head[257:262] != b"ustar":
        told = random.choice(ODD)
        tar[block : block + len(told)] = told
        return
    begin, length = random.choice(((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (345, 155)))
    told = random.choice(
        (b"2", b"L", b"K", b"1", b"x", b"g", b"S", b"./control", b"..", b"a/..", b"777777777777", b"-1")
    )
    head[begin : begin + length] = told[:length].ljust(length, b"\0")
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(b" " * 8) + sum(head[156:]))
    tar[block : block + BLOCK] = head


@cache
def offered_seeds() -> list[bytes]:
    """Return packages that a gateway would take."""
    return [offered_deb(), offered_deb("0.4.1", "amd64", "3.13", formats="")]


def read_offered(data: bytes) -> str:
    """What a package says of itself, or one of two errors."""
    try:
        found = read_facts(data, "x.deb")
    except (CorruptFile, ConfigError) as error:
        return f"refused: {error}" if str(error).isprintable() else "accepted: words that drive the terminal"
    assert found.arch in ("amd64", "arm64")
    assert all(type(name) is str and type(form) is int for name, form in found.formats.items())
    return "accepted"


def package_damages() -> Damages:
    """Return packages cut or changed at places that matter."""
    [data, _] = package_seeds()
    return {
        "no package": (b"!<arch>\n", "refused: "),
        "half of it": (data[: len(data) // 2], "refused: "),
        "an archive of zeros": (data[:-100] + bytes(100), "refused: "),
        "a part that is longer than all": (data.replace(b"4         `\n", b"9999999999`\n", 1), "refused: "),
    }


def record_seeds() -> list[bytes]:
    """Return one of each kind, which its first byte names."""
    said = (
        UpgradeRecord(state="trial", to="2", from_="1", nonce="ab"),
        UpgradeTarget(version="2"),
        HealthProof(version="2", nonce="a"),
    )
    return [bytes([number]) + msgspec.json.encode(one) for number, one in enumerate(said)]


def read_record(data: bytes) -> str:
    """What such a file says, or the one error."""
    kind = RECORDS[(data[0] if data else 0) % len(RECORDS)]
    try:
        found = decode_small(data[1:], kind, "file")
    except CorruptFile as error:
        return f"refused: {error}"
    assert decode_small(msgspec.json.encode(found), kind, "file") == found
    return "accepted"
