"""Fuzz inputs: upgrade manifests, and paths with ranges requested of a gateway."""

from __future__ import annotations

from functools import cache

import msgspec

from edge_server.gateway.packages.download import find_range
from shared.errors import ConfigError, WireError
from shared.protocol.packages import (
    AGENT,
    Build,
    PackageManifest,
    SignedManifest,
    canonical_bytes,
    decode_manifest,
    decode_signed_manifest,
    encode_signed_manifest,
)

WHOLE = 1 << 20


@cache
def manifest_seeds() -> list[bytes]:
    """Return a signed manifest; who signed is not looked at here."""
    build = Build(file="fieldfleet-agent_1_arm64.deb", arch="arm64", python="3.11", sha256="ab" * 32, size=9)
    manifest = PackageManifest(
        name=AGENT,
        version="1",
        serial=1,
        site="roof",
        created="20261123T000000Z",
        builds=(build,),
        formats={"state": 1},
    )
    return [
        encode_signed_manifest(SignedManifest(manifest=canonical_bytes(manifest), signature=b"s", certificates="c"))
    ]


def read_offer(data: bytes) -> str:
    """A manifest whose names lead nowhere, or one of two errors."""
    try:
        found = decode_manifest(decode_signed_manifest(data).manifest)
    except (WireError, ConfigError) as error:
        return f"refused: {error}"
    assert "/" not in found.version
    assert all("/" not in one.file and not one.file.startswith(".") for one in found.builds)
    assert decode_manifest(canonical_bytes(found)).serial == found.serial
    assert msgspec.json.encode(found)
    return "accepted"


def range_seeds() -> list[bytes]:
    """Return ranges of a file."""
    return [b"bytes=0-99", b"bytes=100-", b"bytes=-7"]


def read_range(data: bytes) -> str:
    """A part within the file, all of it, or nothing."""
    part = find_range(data.decode("latin-1"), WHOLE)
    if part is None:
        return "refused: none of it"
    assert 0 <= part[0] < part[0] + part[1] <= WHOLE
    return "accepted"
