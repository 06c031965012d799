"""What one version encodes the other decodes: every message, every codec's payload, frames, and the golden bytes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import msgspec
import pytest

from tests.compat.exchange import CODECS, shown, tree
from tests.compat.sides import PACKAGES, ROOT, Side, lacking

SCRIPT = Path(__file__).with_name("exchange.py")
HEADER, LONG = 3, 16
"""Bytes before the MessagePack of a message."""


def golden(side: Side) -> dict[str, bytes]:
    """Return the golden bytes of a side by name."""
    [path] = (side.root / "tests").rglob("golden_wire.txt")
    found: dict[str, bytes] = {}
    name = ""
    for line in path.read_text().splitlines():
        if line.startswith("    "):
            found[name] = found.get(name, b"") + ast.literal_eval(line.strip())
        elif not line.startswith("#"):
            name = line.removesuffix(":")
    return found


def narrow(message: bytes) -> bytes:
    """Return a message with the short header of its map; a struct of more than 15 fields is written with a long one."""
    is_long = message[:2] == b"FM" and message[HEADER : HEADER + 2] == b"\xde\x00" and message[HEADER + 2] < LONG
    return message[:HEADER] + bytes([0x80 + message[HEADER + 2]]) + message[HEADER + 3 :] if is_long else message


def fields(message: bytes) -> object:
    """Return a message as it is on the wire, without a struct's help."""
    return msgspec.msgpack.decode(message[HEADER:])


@pytest.fixture(scope="module")
def encoded(old, new, tmp_path_factory) -> dict[str, Path]:
    """Return a folder of each side's encodings."""
    folders = {}
    for side in (old, new):
        folders[side.name] = tmp_path_factory.mktemp(side.name)
        side.output(SCRIPT, "encode", folders[side.name])
    return folders


@pytest.fixture(scope="module")
def decoded(old, new, encoded, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Return, by reader and writer, a folder of what one side makes of the other's encodings."""
    folders = {}
    for reader, writer in ((old, new), (new, old)):
        folders[reader.name, writer.name] = tmp_path_factory.mktemp("decoded")
        reader.output(SCRIPT, "decode", encoded[writer.name], folders[reader.name, writer.name])
    return folders


def names(folder: Path, suffix: str) -> set[str]:
    return {path.name for path in folder.glob(f"*.{suffix}")}


def test_each_side_runs_its_own_sources(old, new):
    """Every package comes from the side's root, whichever environment lends the rest; else nothing here is shown."""
    script = f"import json; print(json.dumps([__import__(name).__file__ for name in {PACKAGES}]))"
    for side in (old, new):
        found = [Path(path).parent for path in json.loads(side.output("-c", script))]
        assert found == [side.root / package for package in PACKAGES]
    assert old.root != new.root == ROOT


def test_golden_bytes_are_unchanged(old, new, tmp_path):
    """Every entry of before stands byte for byte in the file of after, and both sides write again what they read."""
    past, present = golden(old), golden(new)
    assert past
    expected = {name: narrow(data) for name, data in past.items()}
    assert {name: narrow(present.get(name, b"")) for name in past} == expected
    messages = {name: data for name, data in past.items() if data[:2] == b"FM"}
    (given := tmp_path / "given").mkdir()
    for name, data in messages.items():
        (given / f"{name}.message").write_bytes(data)
    for side in (old, new):
        (again := tmp_path / side.name).mkdir()
        side.output(SCRIPT, "decode", given, again)
        written = {name: narrow((again / f"{name}.message").read_bytes()) for name in messages}
        assert written == {name: expected[name] for name in messages}


def test_after_has_every_message_of_before_with_every_field(encoded):
    """Full and bare: nothing that before may wait for is left out, and its value has the same form."""
    past = names(encoded["before"], "message")
    assert {name.partition(".")[0] for name in past} >= {"Status", "Report", "Task", "Update", "Want", "Ack"}
    assert past <= names(encoded["after"], "message")
    for name in past:
        one, other = (fields((encoded[side] / name).read_bytes()) for side in ("before", "after"))
        assert lacking(one, other) == [], name


@pytest.mark.parametrize("reader", ["before", "after"])
def test_messages_are_read_by_the_other_side(encoded, decoded, reader):
    """What before read of after is a part of it (it drops what is newer); what after read of before is all of it."""
    writer = "after" if reader == "before" else "before"
    for name in names(encoded["before"], "message"):
        sent = fields((encoded[writer] / name).read_bytes())
        read = fields((decoded[reader, writer] / name).read_bytes())
        assert (lacking(read, sent) if reader == "before" else lacking(sent, read)) == [], name


@pytest.mark.parametrize("kind", ["payload", "frame"])
def test_payloads_and_frames_are_the_same_bytes(encoded, decoded, kind):
    """Both sides write the same, of every codec, and read the same of each other."""
    found = names(encoded["before"], kind)
    assert found == names(encoded["after"], kind)
    assert len(found) >= len(CODECS) - 1
    for name in found:
        assert (encoded["before"] / name).read_bytes() == (encoded["after"] / name).read_bytes(), name
        one, other = (json.loads((folder / name).read_text()) for folder in decoded.values())
        assert one == other, name
    if kind == "payload":
        dense = json.loads((decoded["before", "after"] / "dense.payload").read_text())
        assert dense["tree"] == shown(tree())
