"""Root CA rotation without re-enrolment (cross-signing).

The next root signs the existing site CA, with its name, key and serial number. So what that CA signed is valid under
either root, revocation lists stay as they are, and nobody needs another certificate. The gateway continues to send the
copy signed by the previous root; boards hold the copy of the root that they trust. The previous root vouches for the
next by a certificate that only boards get (`cross.crt`). Its path length, 1, is that of roots; a site CA has less, so
its key cannot make a root that way. A board finds the newest root, the last in `/ca.pem`, at its next check, switches
to it and reports that; tokens name that root from the start.

When all boards have reported, `finish_root` makes the gateway send the copy signed by the next root. The cross-signed
certificate stays until the site CA is replaced too, for boards that come late: they verify the gateway by their own
copy of the site CA, and switch then. For as long, the previous root's copy stays in the chain of the package signer,
since the root user of each board decides when to accept packages of the next root.

Each file is made once. The last one, `site-next.crt`, puts the rotation into force; all other files are derived from
these. An interrupted rotation continues when the command is run again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_server.gateway import authority
from edge_server.gateway.broker_probe import open_probe
from edge_server.gateway.certificate_files import (
    CROSS,
    FORMER_CA,
    NEXT_CA,
    NEXT_KEY,
    NEXT_ROOT,
    is_replacing_root,
    key_in,
    newest_root,
    signer_chain,
    split_certificates,
)
from edge_server.gateway.enrolment.ledger import read_ledger
from edge_server.gateway.initialise import ROOT_YEARS
from edge_server.gateway.packages.store import edit_index, read_index, write_index
from edge_server.gateway.reload import ReloadResult, broker_endpoint, find_broker, reload_broker
from edge_server.gateway.site_folder import PAIRS, SiteFolder, make_chains, make_pairs
from edge_server.gateway.state import SiteState, lock_site, read_state
from shared.errors import ConfigError, Unreachable
from shared.protocol.packages import SignedManifest
from shared.protocol.topics import PEER

UNKNOWN_CA = (
    "the broker was started with an older configuration, without the site CA: "
    "run `edge-server site init`, restart the broker, then run this again"
)


@dataclass(frozen=True)
class RootRotation:
    """Result of a root rotation.

    Attributes:
        reloaded: Result of the broker's reload.
        pending: Boards that have not reported to trust the newest root.
        peers: Servers of other sites, which an operator has to inform.
    """

    reloaded: ReloadResult
    pending: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


async def rotate_root(site: SiteFolder, now: datetime) -> RootRotation:
    """Create the next root, or continue an interrupted rotation; both roots are in force until `finish_root`.

    Args:
        now: Current time in UTC.

    Raises:
        ConfigError: The root's key is missing, another rotation is not finished, boards still trust the root before the
            present one, or the broker must be restarted first; or as `reload_broker`.
        Unwritable: The disk is full or read-only.
    """
    _require_idle(site)
    await _require_known_ca(site)

    def make(state: SiteState) -> SiteState:
        if not is_replacing_root(site.ca("")):
            _make_next(site, state.site, now)
        return _make_derived_files(site, state, now)

    reloaded = await reload_broker(site, make)
    await asyncio.to_thread(_copy_to_releases, site)
    state = read_state(site.path)
    return RootRotation(reloaded, devices_on_old_root(site, state), _peers(state))


async def finish_root(site: SiteFolder, now: datetime, *, force: bool = False) -> RootRotation:
    """Make the next root the only one that the gateway uses.

    Args:
        now: Current time in UTC.
        force: Even if boards are pending.

    Raises:
        ConfigError: No root is being replaced, or boards are pending without `force`; or as `rotate_root`.
        Unwritable: The disk is full or read-only.
    """
    if not is_replacing_root(site.ca("")):
        raise ConfigError(f"{site.path}: no root is being replaced; begin by `edge-server site rotate-root`")
    state = read_state(site.path)
    pending = devices_on_old_root(site, state)
    if pending and not force:
        names = f"{', '.join(pending)} have not moved to the next root yet"
        raise ConfigError(f"{names}; they do so within 8 hours once switched on. Wait, revoke them, or use --force")
    await _require_known_ca(site)
    await asyncio.to_thread(_copy_to_releases, site)

    def end(state: SiteState) -> SiteState:
        before, after = site.ca("site.crt").read_bytes(), site.ca(NEXT_CA).read_bytes()
        if before != after:
            former = site.ca(FORMER_CA)
            copies = [before, *(split_certificates(former.read_bytes()) if former.is_file() else [])]
            site.put(former, b"".join(dict.fromkeys(copies)))
            site.put(site.ca("site.crt"), after)
        return _make_derived_files(site, state, now)

    reloaded = await reload_broker(site, end)
    if not reloaded.faults:
        with lock_site(site.path):
            _remove_previous_root(site)
    return RootRotation(reloaded, pending, _peers(state))


def devices_on_old_root(site: SiteFolder, state: SiteState) -> tuple[str, ...]:
    """Return the boards with a valid account that have not reported to trust the newest root."""
    if not site.ca(CROSS).is_file():  # never replaced, or the previous root is no longer in use
        return ()
    newest, reported = authority.fingerprint(newest_root(site.ca(""))).hex(), read_ledger(site.path).roots
    boards = (
        name
        for name, account in state.accounts.items()
        if not account.denied and any(cert.role == "device" and not cert.revoked for cert in account.certificates)
    )
    return tuple(sorted(name for name in boards if reported.get(name) != newest))


def _peers(state: SiteState) -> tuple[str, ...]:
    named = (name for name, account in state.accounts.items() if name.startswith(PEER) and not account.denied)
    return tuple(sorted(named))


def _require_idle(site: SiteFolder) -> None:
    """Refuse to begin during another rotation, or without the key that has to sign."""
    if is_replacing_root(site.ca("")):
        return
    if site.ca("site-before.crt").exists():
        raise ConfigError("the previous CA is still valid: run `edge-server site rotate-ca --finish` first")
    if pending := devices_on_old_root(site, read_state(site.path)):
        names = f"{', '.join(pending)} still trust an earlier root, and could not move to the next one"
        raise ConfigError(f"{names}; wait until they have moved, enrol them again, or revoke them")
    if not site.ca("root.key").is_file():
        problem = f"{site.ca('root.key')} is missing: it has to sign the next root"
        raise ConfigError(f"{problem}; put it back until this is done")


async def _require_known_ca(site: SiteFolder) -> None:
    """Refuse if the running broker lacks the site CA: it would reject boards that send an outdated copy of it."""
    state = await asyncio.to_thread(read_state, site.path)
    if await asyncio.to_thread(find_broker, state.port) is None:
        return
    endpoint = broker_endpoint(site, state)
    try:
        async with open_probe(endpoint, site.gateway("probe")):
            pass
    except Unreachable:
        return  # another fault, which the reload reports
    with TemporaryDirectory(prefix="fieldfleet-") as folder:
        # The certificate without its CA's; no CA's may be in `trusted` either, for OpenSSL would send that too.
        pair, lone = site.gateway("probe"), Path(folder) / "probe"
        lone.with_suffix(".crt").write_bytes(split_certificates(pair.with_suffix(".crt").read_bytes())[0])
        lone.with_suffix(".key").symlink_to(pair.with_suffix(".key").absolute())
        try:
            async with open_probe(dataclasses.replace(endpoint, trusted=site.ca("root.crt")), lone):
                pass
        except Unreachable:
            raise ConfigError(UNKNOWN_CA) from None


def _make_next(site: SiteFolder, name: str, now: datetime) -> None:
    """Create the next root and the cross-signed certificates, or complete an interrupted attempt."""
    key, cert = site.ca("root.key").read_bytes(), site.ca("root.crt").read_bytes()
    next_key, next_cert = site.ca(NEXT_KEY), site.ca(NEXT_ROOT)
    if not (next_key.is_file() and next_cert.is_file()):
        new_key, signed = authority.make_root(name, now, ROOT_YEARS)
        next_cert.unlink(missing_ok=True)
        site.put(next_key, new_key, private_to="root")
        site.put(next_cert, signed)
    site.put(site.ca(CROSS), cross_sign(key, cert, next_cert.read_bytes()))
    again = cross_sign(next_key.read_bytes(), next_cert.read_bytes(), site.ca("site.crt").read_bytes())
    site.put(site.ca(NEXT_CA), again)


def cross_sign(key: bytes, cert: bytes, other: bytes) -> bytes:
    """Return a CA's certificate signed by another root, PEM; all but issuer and signature is unchanged.

    Args:
        key: Private key of the root, PEM.
        cert: Certificate of the root, PEM.
        other: Certificate to sign, PEM.

    Raises:
        ConfigError: The root's key does not match its certificate.
    """
    signer, certificate = x509.load_pem_x509_certificate(cert), x509.load_pem_x509_certificate(other)
    if authority.public_key_of(key) != key_in(signer):
        raise ConfigError("ca/root.key does not match ca/root.crt: put the root's key back")
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        *(signer.subject, certificate.subject, certificate.public_key(), certificate.serial_number),
        *(certificate.not_valid_before_utc, certificate.not_valid_after_utc),
    )
    for extension in certificate.extensions:
        if extension.oid != x509.AuthorityKeyIdentifier.oid:
            builder = builder.add_extension(extension.value, extension.critical)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key())
    copy = builder.add_extension(signed_by, critical=False).sign(private, hashes.SHA256())
    return copy.public_bytes(serialization.Encoding.PEM)


def _make_derived_files(site: SiteFolder, state: SiteState, now: datetime) -> SiteState:
    make_chains(site)
    return make_pairs(site, state, PAIRS, now)


def _copy_to_releases(site: SiteFolder) -> None:
    """Add the site CA's copies to the chains of signed manifests, which their signatures do not cover."""
    before = read_index(site.path)
    if not (before.releases or before.projects):
        return
    with edit_index(site) as index:
        copies = split_certificates(signer_chain(site.ca("")))
        extended = msgspec.structs.replace(
            index,
            releases=tuple(_with_copies(release, copies) for release in index.releases),
            projects=tuple(_with_copies(project, copies) for project in index.projects),
        )
        if extended != index:
            write_index(site, extended)


def _with_copies(signed: SignedManifest, copies: Sequence[bytes]) -> SignedManifest:
    chain = split_certificates(signed.certificates.encode())
    added = [ca for ca in copies if ca not in chain and _has_key_of(ca, chain)]
    return msgspec.structs.replace(signed, certificates=b"".join([*chain, *added]).decode())


def _has_key_of(ca: bytes, chain: list[bytes]) -> bool:
    key = key_in(x509.load_pem_x509_certificate(ca))
    return any(key_in(x509.load_pem_x509_certificate(cert)) == key for cert in chain[1:])


def _remove_previous_root(site: SiteFolder) -> None:
    """Replace the previous root by the next; its certificate of the next and the copies of the site CA stay."""
    root, next_key = site.ca(NEXT_ROOT), site.ca(NEXT_KEY)
    if root.is_file():
        site.put(site.ca("root.crt"), root.read_bytes())
    if next_key.is_file():
        site.put(site.ca("root.key"), next_key.read_bytes(), private_to="root")
    elif (key := site.ca("root.key")).is_file() and not _is_key_of_root(site):
        key.unlink()
    for name in (NEXT_KEY, NEXT_ROOT, NEXT_CA):
        site.ca(name).unlink(missing_ok=True)


def _is_key_of_root(site: SiteFolder) -> bool:
    root = x509.load_pem_x509_certificate(site.ca("root.crt").read_bytes())
    return authority.public_key_of(site.ca("root.key").read_bytes()) == key_in(root)


def remove_cross_certificates(site: SiteFolder) -> None:
    """Remove the certificates for boards that come late: the site CA that they know is being replaced."""
    for name in (CROSS, FORMER_CA):
        site.ca(name).unlink(missing_ok=True)
