"""What a gateway says of the agent's packages, signed, so that a board installs nothing that its own site did not sign.

A manifest names one version of the agent and a package for each kind of board. What is signed is its bytes as they
are, behind `PREFIX`, by ECDSA over P-256 with SHA-256. The signer's certificate is for this alone (organisational unit
`packages`, extended key usage code signing: no broker lets it in, and no board's certificate signs packages), the
site's CA issued it, and a root that the board's own root user wrote down vouches for that. Dates are not looked at,
since boards without a battery behind their clock must be mended too; an older version is told by its number.

Whoever reads one of these reads what an attacker may have written: everything is bounded, and `cryptography` is
imported only where something is signed or verified, once for each upgrade.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from shared.errors import ConfigError, WireError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

Arch: TypeAlias = Literal["amd64", "arm64"]

AGENT = "fieldfleet-agent"
"""The package, and the name under which rollouts offer it; no model may be called so."""
FORMAT = 2
"""From 2 on a package may be for several Pythons."""
PREFIX = b"fieldfleet package manifest 1\n"
"""Before what is signed, so that a signature for anything else is none for a manifest."""
SIGNER_UNIT, SIGNER_NAME = "packages", "_packages"
"""Organisational unit and common name of who signs; no device can be called so."""
MOST_SIGNED, MOST_BUILDS, MOST_FORMATS, MOST_CERTIFICATES = 128 << 10, 16, 64, 8
MOST_PACKAGE = 1 << 30
"""Bytes of a package."""
MOST_BUSY_S = 3600.0
"""For which a board waits until no task of its runs, before it refuses a version of the agent."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+~-]{0,63}")
_FILE = re.compile(r"[a-z0-9][A-Za-z0-9.+~_-]{0,127}\.deb")
_PYTHON = re.compile(r"3\.[0-9]{1,2}( 3\.[0-9]{1,2}){0,9}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CREATED = re.compile(r"[0-9TZ:.+-]{1,40}")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """One package file.

    Attributes:
        file: Its name, without a folder.
        python: The Pythons that it runs on, such as `3.11` or `3.11 3.12`.
        sha256: Of its content, hexadecimal.
        size: Its bytes.
    """

    file: str
    arch: Arch
    python: str
    sha256: str
    size: int

    @property
    def pythons(self) -> tuple[str, ...]:
        """The Pythons, one by one."""
        return tuple(self.python.split(" "))

    @property
    def kind(self) -> str:
        """What it is for, for people."""
        first, last = self.pythons[0], self.pythons[-1]
        return f"{self.arch} with Python {first if first == last else f'{first} to {last}'}"

    def __post_init__(self) -> None:
        """Refuse what is no file of a package."""
        _require(_FILE, file=self.file)
        _require(_PYTHON, python=self.python)
        _require(_SHA256, sha256=self.sha256)
        if not 0 < self.size <= MOST_PACKAGE:
            raise ValueError(f"size {self.size}: a package has 1 to {MOST_PACKAGE} bytes")


class PackageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the agent.

    Attributes:
        version: As the package has it, and the name of its folder below /opt/fieldfleet.
        serial: Counts the versions that a gateway took in, from 1: the newer has the larger.
        site: For whose boards it is.
        created: When it was signed, UTC.
        builds: Its files; at most one for each architecture and Python.
        formats: The newest form of each kind of state file that this version writes.
    """

    name: str
    version: str
    serial: int
    site: str
    created: str
    builds: tuple[Build, ...]
    formats: dict[str, int] = {}
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse what names no version, or two files for one kind of board."""
        if self.name != AGENT:
            raise ValueError(f"name {self.name[:64]!r}: only {AGENT} is offered in this way")
        _require(_VERSION, version=self.version)
        _require(_WORD, site=self.site)
        _require(_CREATED, created=self.created)
        if not 1 <= self.serial < 1 << 31:
            raise ValueError(f"serial {self.serial}: counts from 1")
        kinds = [(one.arch, python) for one in self.builds for python in one.pythons]
        if not 1 <= len(self.builds) <= MOST_BUILDS or len({*kinds}) != len(kinds):
            raise ValueError(f"builds: 1 to {MOST_BUILDS}, each of another architecture or Python")
        if len({one.file for one in self.builds}) != len(self.builds):
            raise ValueError("builds: two have one file's name")
        if len(self.formats) > MOST_FORMATS:
            raise ValueError(f"formats: {len(self.formats)}, more than {MOST_FORMATS}")
        for name, number in self.formats.items():
            _require(_WORD, formats=name)
            if not 0 <= number < 1 << 31:
                raise ValueError(f"formats: {name} has {number}")


class SignedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest and who vouches for it.

    Attributes:
        manifest: Its bytes, as they were signed.
        signature: Of `PREFIX` and these bytes, DER.
        certificates: The signer's first, then those between it and the root; PEM.
    """

    manifest: bytes
    signature: bytes
    certificates: str


def _require(form: re.Pattern[str], **values: str) -> None:
    for name, value in values.items():
        if not form.fullmatch(value):
            raise ValueError(f"{name} {value[:80]!r}: not of its form")


def canonical_bytes(manifest: PackageManifest) -> bytes:
    """Return a manifest as it is signed: JSON, its keys in order, so that one manifest is always the same bytes."""
    ordered = sorted(manifest.builds, key=lambda one: (one.arch, one.python))
    return msgspec.json.encode(msgspec.structs.replace(manifest, builds=tuple(ordered)), order="deterministic")


def write_signed(signed: SignedManifest) -> bytes:
    """Return a signed manifest as it lies on disks and is sent: JSON."""
    return msgspec.json.format(msgspec.json.encode(signed, order="deterministic"), indent=1) + b"\n"


def read_signed(data: bytes) -> SignedManifest:
    """Return a signed manifest, of which nothing is verified yet.

    Args:
        data: As `write_signed` made it.

    Raises:
        WireError: It is none, or longer than any.
    """
    if len(data) > MOST_SIGNED:
        raise WireError(f"a signed manifest of {len(data)} bytes, more than {MOST_SIGNED}", reason="malformed")
    try:
        return msgspec.json.decode(data, type=SignedManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no signed manifest: {error}", reason="malformed") from error


def read_manifest(data: bytes) -> PackageManifest:
    """Return what the bytes of a manifest say; whether they are signed, `verify` tells.

    Raises:
        ConfigError: It is of a newer form than this version reads.
        WireError: It is none.
    """
    if len(data) > MOST_SIGNED:
        raise WireError(f"a manifest of {len(data)} bytes, more than {MOST_SIGNED}", reason="malformed")
    try:
        found = msgspec.json.decode(data, type=_ManifestFormat).format
        if found > FORMAT:
            told = f"the manifest is of format {found}, and this version reads up to {FORMAT}"
            raise ConfigError(f"{told}: install the package by hand, `sudo apt install ./FILE.deb`")
        return msgspec.json.decode(data, type=PackageManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"no manifest of a package: {error}", reason="malformed") from error


class _ManifestFormat(msgspec.Struct):
    format: int = FORMAT


def find_build(manifest: PackageManifest, arch: str, python: str) -> Build:
    """Return the package for a kind of board.

    Args:
        arch: As dpkg calls it.
        python: Such as 3.11.

    Raises:
        ConfigError: There is none.
    """
    for one in manifest.builds:
        if one.arch == arch and python in one.pythons:
            return one
    there = ", ".join(one.kind for one in manifest.builds)
    told = f"{manifest.name} {manifest.version} is there for {there}, and not for {arch} with Python {python}"
    raise ConfigError(f"{told}: give the gateway that package too, `edge-server packages add FILE.deb`")


def sign(manifest: PackageManifest, key: bytes, certificates: bytes) -> SignedManifest:
    """Sign a manifest.

    Args:
        manifest: What is vouched for.
        key: The signer's private key, EC P-256, PEM.
        certificates: The signer's certificate, then the site CA's, PEM.

    Raises:
        ConfigError: The key is none, or not that of the certificate.
    """
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    try:
        private = serialization.load_pem_private_key(key, None)
        public = x509.load_pem_x509_certificates(certificates)[0].public_key()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"packages cannot be signed: {error}; `edge-server site init` makes what signs") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != public:
        raise ConfigError("the key that signs packages is not its certificate's: `edge-server site init` mends that")
    data = canonical_bytes(manifest)
    signature = private.sign(PREFIX + data, ec.ECDSA(hashes.SHA256()))
    return SignedManifest(manifest=data, signature=signature, certificates=certificates.decode("ascii"))


def verify(signed: SignedManifest, roots: bytes) -> PackageManifest:
    """Return a manifest that a site signed whose root is trusted here.

    Args:
        roots: The root certificates that root on this machine wrote down, PEM.

    Raises:
        ConfigError: There is no root among them, or the manifest is of a newer form.
        WireError: It is not so; the reason is `certificate`, `signature`, `site` or `malformed`.
    """
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    try:
        trusted = x509.load_pem_x509_certificates(roots)
    except ValueError as error:
        raise ConfigError(f"no root certificate is trusted here: {error}") from error
    try:
        shown = x509.load_pem_x509_certificates(signed.certificates.encode("ascii", "replace")[:MOST_SIGNED])
    except ValueError as error:
        raise WireError(f"who signed it cannot be read: {error}", reason="certificate") from error
    try:
        signer, site = _trusted_signer(shown[:MOST_CERTIFICATES], trusted)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # of certificates, much is read late
        raise WireError(f"who signed it cannot be read: {error}", reason="certificate") from error
    try:
        signer.verify(signed.signature, PREFIX + signed.manifest, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise WireError(
            "the manifest is not what was signed, or was signed by another key", reason="signature"
        ) from None
    manifest = read_manifest(signed.manifest)
    if manifest.site != site:
        raise WireError(f"signed by site {site!r} for site {manifest.site!r}", reason="site")
    return manifest


def _trusted_signer(
    shown: list[x509.Certificate], roots: list[x509.Certificate]
) -> tuple[ec.EllipticCurvePublicKey, str]:
    """Return the key of who signed, and of which site, if a root vouches for a CA that vouches for it."""
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - see the file's beginning

    signer, *others = shown
    chain = [ca for ca in others if _is_authority(ca) and any(_is_issued_by(ca, root) for root in roots)]
    if not any(_is_issued_by(signer, ca) for ca in chain):
        told = "who signed it is not of a site whose root is trusted here"
        raise WireError(
            f"{told}: if this board's site has another root now, `device-agent upgrade trust`", reason="certificate"
        )
    names, key = _names(signer), signer.public_key()
    is_signer = names.get("OU") == SIGNER_UNIT and names.get("CN") == SIGNER_NAME and _may_sign_code(signer)
    if not is_signer or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise WireError(f"{names.get('CN', 'nobody')!r} of the site signed it, who may not", reason="certificate")
    return key, names.get("O", "")


def _names(certificate: x509.Certificate) -> Mapping[str, str]:
    """Return the names in a certificate, where each kind is there once."""
    found = dict(_each_name(certificate))
    return found if len(found) == len(list(_each_name(certificate))) else {}


def _each_name(certificate: x509.Certificate) -> Iterator[tuple[str, str]]:
    for one in certificate.subject:
        yield one.rfc4514_attribute_name, str(one.value)


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False


def _may_sign_code(certificate: x509.Certificate) -> bool:
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return list(uses) == [ExtendedKeyUsageOID.CODE_SIGNING] and not _is_authority(certificate)


def _is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415 - see above

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
