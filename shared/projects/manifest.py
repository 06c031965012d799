"""Signed manifests of projects; signature and chain are those of agent packages.

A manifest names one version of a project and its wheel. The site's package signer signs it, under a prefix of its own,
so that neither kind of manifest passes for the other.
"""

from __future__ import annotations

import re

import msgspec

from shared.projects.names import require_project_name, require_version
from shared.protocol.packages import SignedManifest, decode_received, require_site, sign_bytes, verify_bytes

FORMAT = 1
PREFIX = b"fieldfleet project manifest 1\n"
"""Domain separation: a signature for a package is not valid for a project."""
MOST_WHEEL = 32 << 20
"""Size limit of a project's wheel in bytes."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ProjectManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a project.

    Attributes:
        site: Site whose boards may install it; empty before it is published.
        created: Time of signing, UTC.
        sha256: Hash of the wheel, hexadecimal.
        size: Size of the wheel in bytes.
        digest: Digest of its source files, see `shared.plugins.source_digest`.
        requires: Distributions that its code imports; a board does not install them.
    """

    name: str
    version: str
    site: str = ""
    created: str = ""
    sha256: str
    size: int
    digest: str
    requires: tuple[str, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse malformed fields."""
        require_project_name(self.name)
        require_version(self.version)
        if not _SHA256.fullmatch(self.sha256) or not 0 < self.size <= MOST_WHEEL:
            raise ValueError(f"sha256 or size of the wheel is malformed; a wheel has 1 to {MOST_WHEEL} bytes")

    @property
    def file(self) -> str:
        """File name of the wheel."""
        return f"{self.name}-{self.version}-py3-none-any.whl"


def sign_project(manifest: ProjectManifest, key: bytes, certificates: bytes) -> SignedManifest:
    """Sign a manifest; arguments and errors as of `shared.protocol.packages.sign_bytes`."""
    return sign_bytes(msgspec.json.encode(manifest, order="deterministic"), PREFIX, key, certificates)


def verify_project(signed: SignedManifest, roots: bytes) -> ProjectManifest:
    """Verify a manifest against the trusted roots, and decode it.

    Raises:
        ConfigError: No root is trusted, or the manifest has a newer format.
        WireError: Verification failed; the reason is `certificate`, `signature`, `site` or `malformed`.
    """
    site = verify_bytes(signed, PREFIX, roots)
    manifest = decode_project(signed.manifest)
    require_site(manifest.site, site)
    return manifest


def decode_project(data: bytes) -> ProjectManifest:
    """Decode a manifest; `verify_project` checks signatures.

    Raises:
        ConfigError: It has a newer format than this version reads.
        WireError: It is malformed.
    """
    remedy = "upgrade fieldfleet on this machine"
    return decode_received(data, ProjectManifest, FORMAT, "project manifest", remedy)
