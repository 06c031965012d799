"""Signed manifests of agent packages; a board trusts only its own site.

A manifest names one version of the agent and a package for each kind of board. Its bytes, prefixed by `PREFIX`, are
signed by ECDSA over P-256 with SHA-256. The signer's certificate serves only this purpose (organisational unit
`packages`, extended key usage code signing: no broker accepts it, and no board's certificate signs packages); it is
issued by the site's CA under a root that the board's root user has pinned. Dates are not checked, since boards
without a battery-backed clock must be upgradable too; downgrades are detected by the serial number.

All input may be hostile, so everything is bounded, and `cryptography` is imported only for signing or verifying, once
per upgrade.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from shared.errors import ConfigError, CorruptFile, WireError
from shared.protocol.versioned import decode_versioned

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

T = TypeVar("T")
Arch: TypeAlias = Literal["amd64", "arm64"]

AGENT = "fieldfleet-agent"
"""Package name, and the name under which rollouts offer it; reserved, so no model may have it."""
FORMAT = 2
"""From 2 on, a package may be for several Python versions."""
PREFIX = b"fieldfleet package manifest 1\n"
"""Domain separation: a signature for anything else is not valid for a manifest."""
SIGNER_UNIT, SIGNER_NAME = "packages", "_packages"
"""Organisational unit and common name of the signer; no device can have this name."""
MOST_SIGNED, MOST_BUILDS, MOST_FORMATS, MOST_CERTIFICATES = 128 << 10, 16, 64, 8
MOST_PACKAGE = 1 << 30
"""Size limit of a package in bytes."""
MOST_BUSY_S = 3600.0
"""Longest wait for running tasks before a board refuses a new version of the agent."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+~-]{0,63}")
_FILE = re.compile(r"[a-z0-9][A-Za-z0-9.+~_-]{0,127}\.deb")
_PYTHON = re.compile(r"3\.[0-9]{1,2}( 3\.[0-9]{1,2}){0,9}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CREATED = re.compile(r"[0-9TZ:.+-]{1,40}")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """One package file.

    Attributes:
        file: File name, without a folder.
        python: Supported Python versions, such as `3.11` or `3.11 3.12`.
        sha256: Hash of its content, hexadecimal.
        size: Size of the file in bytes.
    """

    file: str
    arch: Arch
    python: str
    sha256: str
    size: int

    @property
    def pythons(self) -> tuple[str, ...]:
        """The Python versions as a tuple."""
        return tuple(self.python.split(" "))

    @property
    def kind(self) -> str:
        """Architecture and Python versions, for messages."""
        first, last = self.pythons[0], self.pythons[-1]
        return f"{self.arch} with Python {first if first == last else f'{first} to {last}'}"

    def __post_init__(self) -> None:
        """Refuse malformed names, hashes and sizes."""
        _require(_FILE, file=self.file)
        _require(_PYTHON, python=self.python)
        _require(_SHA256, sha256=self.sha256)
        if not 0 < self.size <= MOST_PACKAGE:
            raise ValueError(f"size {self.size}: a package has 1 to {MOST_PACKAGE} bytes")


class PackageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the agent.

    Attributes:
        version: Version of the package, and the name of its folder below /opt/fieldfleet.
        serial: Counts the versions imported by a gateway, from 1: newer ones have larger numbers.
        site: Site whose boards may install it.
        created: Time of signing, UTC.
        builds: Package files; at most one for each architecture and Python.
        formats: Newest format of each kind of state file that this version writes.
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
        """Refuse malformed fields, and two files for one kind of board."""
        if self.name != AGENT:
            raise ValueError(f"name {self.name[:64]!r}: only {AGENT} is offered in this way")
        _require(_VERSION, version=self.version)
        _require(_WORD, site=self.site)
        _require(_CREATED, created=self.created)
        if not 1 <= self.serial < 1 << 31:
            raise ValueError(f"serial {self.serial}: counts from 1")
        kinds = [(build.arch, python) for build in self.builds for python in build.pythons]
        if not 1 <= len(self.builds) <= MOST_BUILDS or len({*kinds}) != len(kinds):
            raise ValueError(f"builds: 1 to {MOST_BUILDS}, each for a different architecture or Python")
        if len({build.file for build in self.builds}) != len(self.builds):
            raise ValueError("builds: two have the same file name")
        if len(self.formats) > MOST_FORMATS:
            raise ValueError(f"formats: {len(self.formats)}, more than {MOST_FORMATS}")
        for name, number in self.formats.items():
            _require(_WORD, formats=name)
            if not 0 <= number < 1 << 31:
                raise ValueError(f"formats: {name} has {number}")


class SignedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest with signature and certificate chain.

    Attributes:
        manifest: Encoded PackageManifest, exactly the signed bytes.
        signature: Signature over `PREFIX` and these bytes, DER.
        certificates: The signer's first, then the intermediates up to the root; PEM.
    """

    manifest: bytes
    signature: bytes
    certificates: str


def _require(form: re.Pattern[str], **values: str) -> None:
    for name, value in values.items():
        if not form.fullmatch(value):
            raise ValueError(f"{name} {value[:80]!r}: not of its form")


def canonical_bytes(manifest: PackageManifest) -> bytes:
    """Encode a manifest for signing: JSON with sorted keys, so that equal manifests have equal bytes."""
    ordered = sorted(manifest.builds, key=lambda build: (build.arch, build.python))
    return msgspec.json.encode(msgspec.structs.replace(manifest, builds=tuple(ordered)), order="deterministic")


def encode_signed_manifest(signed: SignedManifest) -> bytes:
    """Encode a signed manifest as JSON, for disks and the network."""
    return msgspec.json.format(msgspec.json.encode(signed, order="deterministic"), indent=1) + b"\n"


def decode_signed_manifest(data: bytes) -> SignedManifest:
    """Decode a signed manifest without verifying it.

    Raises:
        WireError: It is malformed or too long.
    """
    if len(data) > MOST_SIGNED:
        raise WireError(f"a signed manifest of {len(data)} bytes, the limit is {MOST_SIGNED}", reason="malformed")
    try:
        return msgspec.json.decode(data, type=SignedManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a signed manifest: {error}", reason="malformed") from error


def decode_manifest(data: bytes) -> PackageManifest:
    """Decode a manifest; `verify` checks signatures.

    Raises:
        ConfigError: It has a newer format than this version reads.
        WireError: It is malformed.
    """
    remedy = "install the package by hand, `sudo apt install ./FILE.deb`"
    return decode_received(data, PackageManifest, FORMAT, "package manifest", remedy)


def decode_received(data: bytes, kind: type[T], newest: int, what: str, remedy: str) -> T:
    """Decode a manifest; arguments and ConfigError as of `shared.protocol.versioned`.

    Raises:
        WireError: It is malformed or too long.
    """
    try:
        return decode_versioned(data, kind, newest, MOST_SIGNED, what, remedy)
    except CorruptFile as error:
        raise WireError(str(error), reason="malformed") from error


def find_build(manifest: PackageManifest, arch: str, python: str) -> Build:
    """Find the package for a kind of board.

    Args:
        arch: Architecture in dpkg's notation.
        python: Python version, such as 3.11.

    Raises:
        ConfigError: There is none.
    """
    for build in manifest.builds:
        if build.arch == arch and python in build.pythons:
            return build
    kinds = ", ".join(each.kind for each in manifest.builds)
    problem = f"{manifest.name} {manifest.version} exists for {kinds}, but not for {arch} with Python {python}"
    raise ConfigError(f"{problem}: add that package to the gateway, `edge-server packages add FILE.deb`")


def sign(manifest: PackageManifest, key: bytes, certificates: bytes) -> SignedManifest:
    """Sign a manifest; arguments and errors as of `sign_bytes`."""
    return sign_bytes(canonical_bytes(manifest), PREFIX, key, certificates)


def sign_bytes(data: bytes, prefix: bytes, key: bytes, certificates: bytes) -> SignedManifest:
    """Sign the bytes of a manifest.

    Args:
        prefix: Domain separation of this kind of manifest.
        key: The signer's private key, EC P-256, PEM.
        certificates: The signer's certificate, then the site CA's, PEM.

    Raises:
        ConfigError: The key is invalid, or does not match the certificate.
    """
    from cryptography import x509  # noqa: PLC0415 - see the module docstring
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    try:
        private = serialization.load_pem_private_key(key, None)
        public = x509.load_pem_x509_certificates(certificates)[0].public_key()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"packages cannot be signed: {error}; `edge-server site init` creates the signer") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != public:
        raise ConfigError("the package signing key does not match its certificate: run `edge-server site init`")
    signature = private.sign(prefix + data, ec.ECDSA(hashes.SHA256()))
    return SignedManifest(manifest=data, signature=signature, certificates=certificates.decode("ascii"))


def verify(signed: SignedManifest, roots: bytes) -> PackageManifest:
    """Verify a manifest against the trusted roots, and decode it.

    Args:
        roots: The root certificates pinned on this machine, PEM.

    Raises:
        ConfigError: There is no root among them, or the manifest has a newer format.
        WireError: Verification failed; the reason is `certificate`, `signature`, `site` or `malformed`.
    """
    site = verify_bytes(signed, PREFIX, roots)
    manifest = decode_manifest(signed.manifest)
    require_site(manifest.site, site)
    return manifest


def require_site(named: str, signer: str) -> None:
    """Refuse a manifest for another site than its signer's.

    Raises:
        WireError: They differ.
    """
    if named != signer:
        raise WireError(f"signed by site {signer!r} for site {named!r}", reason="site")


def verify_bytes(signed: SignedManifest, prefix: bytes, roots: bytes) -> str:
    """Verify the signature of a manifest against the trusted roots; return the signer's site.

    Args:
        prefix: Domain separation of this kind of manifest.
        roots: The root certificates pinned on this machine, PEM.

    Raises:
        ConfigError: There is no root among them.
        WireError: Verification failed; the reason is `certificate`, `signature` or `malformed`.
    """
    from cryptography import x509  # noqa: PLC0415 - see the module docstring
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    try:
        trusted = x509.load_pem_x509_certificates(roots)
    except ValueError as error:
        raise ConfigError(f"no root certificate is trusted on this machine: {error}") from error
    try:
        chain = x509.load_pem_x509_certificates(signed.certificates.encode("ascii", "replace")[:MOST_SIGNED])
    except ValueError as error:
        raise WireError(f"the signer's certificates cannot be read: {error}", reason="certificate") from error
    try:
        signer, site = _trusted_signer(chain[:MOST_CERTIFICATES], trusted)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # certificates are parsed lazily
        raise WireError(f"the signer's certificates cannot be read: {error}", reason="certificate") from error
    try:
        signer.verify(signed.signature, prefix + signed.manifest, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise WireError("the manifest was changed, or signed by another key", reason="signature") from None
    return site


def _trusted_signer(
    certificates: list[x509.Certificate], roots: list[x509.Certificate]
) -> tuple[ec.EllipticCurvePublicKey, str]:
    """Return the signer's key and site, if its certificate chains up to a trusted root."""
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - see the module docstring

    signer, *others = certificates
    chain = [ca for ca in others if _is_authority(ca) and any(_is_issued_by(ca, root) for root in roots)]
    if not any(_is_issued_by(signer, ca) for ca in chain):
        problem = "the signer does not belong to a site whose root is trusted here"
        raise WireError(
            f"{problem}: if this board's site has a new root, run `device-agent upgrade trust`", reason="certificate"
        )
    names, key = _unique_names(signer), signer.public_key()
    is_signer = names.get("OU") == SIGNER_UNIT and names.get("CN") == SIGNER_NAME and _may_sign_code(signer)
    if not is_signer or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise WireError(f"{names.get('CN', '')!r} of the site has no right to sign packages", reason="certificate")
    return key, names.get("O", "")


def _unique_names(certificate: x509.Certificate) -> Mapping[str, str]:
    """Return a certificate's subject names by kind; empty if a kind is repeated."""
    names = dict(_subject_names(certificate))
    return names if len(names) == len(list(_subject_names(certificate))) else {}


def _subject_names(certificate: x509.Certificate) -> Iterator[tuple[str, str]]:
    for attribute in certificate.subject:
        yield attribute.rfc4514_attribute_name, str(attribute.value)


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509  # noqa: PLC0415 - see the module docstring

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False


def _may_sign_code(certificate: x509.Certificate) -> bool:
    from cryptography import x509  # noqa: PLC0415 - see the module docstring
    from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return list(uses) == [ExtendedKeyUsageOID.CODE_SIGNING] and not _is_authority(certificate)


def _is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415 - as above

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
