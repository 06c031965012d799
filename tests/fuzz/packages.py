"""Packages of the agent as root unpacks them, and the records and wishes that agent and updater tell each other by."""

from __future__ import annotations

from functools import cache
from pathlib import PurePosixPath

import msgspec

from device_agent.upgrade.package_file import unpack_package
from device_agent.upgrade.record import Proof, UpgradeRecord, Wanted
from shared.errors import CorruptFile
from shared.runtime.state_formats import decode_small
from tests.device_agent.upgrade.packages import INTERPRETER, package, tree_of
from tests.fuzz.damages import Damages

FOLDER = "opt/fieldfleet/2"
RECORDS = (UpgradeRecord, Wanted, Proof)


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
    return "accepted"


def package_damages() -> Damages:
    """Return packages cut or changed at places that matter."""
    [data, _] = package_seeds()
    return {
        "no package": (b"!<arch>\n", "refused: the package is damaged"),
        "half of it": (data[: len(data) // 2], "refused: the package is damaged"),
        "an archive of zeros": (data[:-100] + bytes(100), "refused: the package is damaged"),
        "a part that is longer than all": (data.replace(b"4         `\n", b"9999999999`\n", 1), "refused: the package"),
    }


def record_seeds() -> list[bytes]:
    """Return one of each kind, which its first byte names."""
    said = (
        UpgradeRecord(state="trial", to="2", from_="1", nonce="ab"),
        Wanted(version="2"),
        Proof(version="2", nonce="a"),
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
