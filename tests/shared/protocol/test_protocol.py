"""PROTOCOL.md says what the code does, where a machine can tell."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import get_args

from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, Verdict
from shared.protocol.topics import ROOT
from shared.transfer import frames
from tests.naming import names_all

SHARED = Path(__file__).parents[3] / "shared"
PAGE = (SHARED / "protocol" / "PROTOCOL.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@cache
def reasons() -> set[str]:
    """Return every word that stands as the reason of a WireError in the sources."""
    found = {"malformed"}
    for package in ("shared", "device_agent", "edge_server"):
        texts = (path.read_text() for path in (SHARED.parent / package).rglob("*.py"))
        for text in (text for text in texts if "WireError" in text):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "WireError":
                    for keyword in node.keywords:
                        found |= {leaf.value for leaf in ast.walk(keyword.value) if isinstance(leaf, ast.Constant)}
    return {reason for reason in found if isinstance(reason, str)}


def test_every_reason_is_on_the_page():
    """An operator who reads a counter looks it up there; a reason nobody gives any more is not there either."""
    listed = set(re.findall(r"`([a-z-]+)`", section("Refusals")))
    assert reasons() - listed == set()
    assert {"checksum", "digest", "truncated", "not-finite"} <= reasons()


def test_every_verdict_is_on_the_page():
    assert set(re.findall(r"^\| `([a-z]+)` \|", section("A round"), re.MULTILINE)) == set(get_args(Verdict))


def test_dtypes_and_limits():
    """Numbers that a second implementation would copy from the page."""
    listed = re.search(r"dtypes: ([a-z0-9 ]+)\.", section("Payloads"))
    assert listed
    assert listed[1].split() == list(payload.ITEM_BYTES)
    assert names_all(section("Payloads"), f"{payload.ALIGN} bytes")
    assert names_all(PAGE, f"{payload.MAX_HEADER_BYTES >> 20} MiB", f"{payload.MAX_DIMENSIONS} dimensions")
    assert names_all(section("Messages"), f"{wire.MAX_MESSAGE_BYTES >> 20} MiB")
    assert (BLOCK_BYTES, frames.MAX_FRAME_BYTES, frames.FRAME_BYTES) == (1 << 10, 4 << 20, 256 << 10)
    assert names_all(section("Frames"), "1 KiB", "4 MiB", "256 KiB")
    assert f"{ROOT}/<site>/<device>/<channel>" in section("Topics")
    assert {wire.MAJOR, frames.MAJOR, payload.MAJOR} == {1}
