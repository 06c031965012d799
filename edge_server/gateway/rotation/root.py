"""The next root of a site, and nobody has to join anew: boards move to it by themselves while two roots are in force.

The next root signs the site CA that is there, with the name, key and number that it has from the root before. So what
that CA signed, for boards or the gateway, is good under either root, lists of revoked certificates stay as they are,
and nobody needs another certificate. The gateway goes on showing the copy by the root before, and boards of either root
have the one of theirs. The root before vouches for the next by a certificate that boards alone get (`cross.crt`): its
path length, 1, is that of roots, and no site CA has it, so that who has a site CA's key cannot make a root by it. A
board's next look finds the newest root, last in `/ca.pem`, moves and says so; tokens name that root from the start.

When all have said so, `finish_root` shows the copy by the next root. The certificate by which boards move stays until
the site CA is replaced too: who comes later knows the gateway by its own copy of the site CA, and moves then. The copy
by the root before stays as long behind the certificate of who signs packages, since boards' own root users write
down in their own time whose packages are taken.

Each file is made once and the last, `site-next.crt`, makes the rotation count; all else is made of these. What was
cut short goes on when it is asked for again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from datetime import datetime

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_server.gateway import authority
from edge_server.gateway.certificate_files import (
    CROSS,
    FORMER_CA,
    NEXT_CA,
    NEXT_KEY,
    NEXT_ROOT,
    is_replacing_root,
    key_in,
    newest_root,
    signers_chain,
    split_certificates,
)
from edge_server.gateway.enrolment.ledger import read_ledger
from edge_server.gateway.initialise import ROOT_YEARS
from edge_server.gateway.packages.store import editing, read_index, write_index
from edge_server.gateway.probe_access import open_probe
from edge_server.gateway.reload import ReloadResult, broker_endpoint, find_broker, reload_broker
from edge_server.gateway.site_folder import PAIRS, SiteFolder, make_chains, make_pairs
from edge_server.gateway.state import SiteState, lock_site, read_state
from shared.errors import ConfigError, Unreachable
from shared.protocol.topics import PEER

KNOW_CA = (
    "the broker was started with an older configuration, by which it does not know the site CA: "
    "`edge-server site init`, restart the broker once, and then the same again"
)


@dataclass(frozen=True)
class RootRotated:
    """What became of a root's rotation.

    Attributes:
        reloaded: What the broker did.
        left: Boards that have not said that they trust the newest root.
        peers: Other sites' servers, which somebody has to tell.
    """

    reloaded: ReloadResult
    left: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


async def rotate_root(site: SiteFolder, now: datetime) -> RootRotated:
    """Make the next root; both are in force until `finish_root`. Asked again, it goes on, and says who is left.

    Args:
        now: UTC.

    Raises:
        ConfigError: The root's key is not here, another rotation is not finished, boards did not move at the one
            before, or the broker must be restarted first; or as `reload_broker`.
        Unwritable: The disk takes nothing more.
    """
    _require_in_order(site)
    await _require_known_ca(site)

    def make(state: SiteState) -> SiteState:
        if not is_replacing_root(site.ca("")):
            _make_next(site, state.site, now)
        return _made_of_them(site, state, now)

    reloaded = await reload_broker(site, make)
    await asyncio.to_thread(_copy_to_releases, site)
    state = read_state(site.path)
    return RootRotated(reloaded, unmoved(site, state), _peers(state))


async def finish_root(site: SiteFolder, now: datetime, *, force: bool = False) -> RootRotated:
    """Have the next root be the only one that the gateway goes by.

    Args:
        now: UTC.
        force: Also where boards have not moved.

    Raises:
        ConfigError: No root is being replaced, or boards are left and that is not forced; or as `rotate_root`.
        Unwritable: The disk takes nothing more.
    """
    if not is_replacing_root(site.ca("")):
        raise ConfigError(f"{site.path}: no root is being replaced; `edge-server site rotate-root` begins that")
    state = read_state(site.path)
    left = unmoved(site, state)
    if left and not force:
        names = f"{', '.join(left)} have not moved to the next root yet"
        raise ConfigError(f"{names}; they do within 8 hours of being switched on. Wait, revoke them, or say --force")
    await _require_known_ca(site)
    await asyncio.to_thread(_copy_to_releases, site)

    def end(state: SiteState) -> SiteState:
        before, after = site.ca("site.crt").read_bytes(), site.ca(NEXT_CA).read_bytes()
        if before != after:
            former = site.ca(FORMER_CA)
            copies = [before, *(split_certificates(former.read_bytes()) if former.is_file() else [])]
            site.put(former, b"".join(dict.fromkeys(copies)))
            site.put(site.ca("site.crt"), after)
        return _made_of_them(site, state, now)

    reloaded = await reload_broker(site, end)
    if not reloaded.faults:
        with lock_site(site.path):
            _forget_before(site)
    return RootRotated(reloaded, left, _peers(state))


def unmoved(site: SiteFolder, state: SiteState) -> tuple[str, ...]:
    """Return the boards that have not said that they trust the newest root, of those that may do anything."""
    if not site.ca(CROSS).is_file():  # never replaced, or all of before is gone
        return ()
    newest, said = authority.fingerprint(newest_root(site.ca(""))).hex(), read_ledger(site.path).roots
    boards = (
        name
        for name, account in state.accounts.items()
        if not account.denied and any(one.role == "device" and not one.revoked for one in account.certificates)
    )
    return tuple(sorted(name for name in boards if said.get(name) != newest))


def _peers(state: SiteState) -> tuple[str, ...]:
    named = (name for name, account in state.accounts.items() if name.startswith(PEER) and not account.denied)
    return tuple(sorted(named))


def _require_in_order(site: SiteFolder) -> None:
    """Refuse to begin while something else is in the middle, or without the key that has to sign."""
    if is_replacing_root(site.ca("")):
        return
    if site.ca("site-before.crt").exists():
        raise ConfigError("the CA before is still in force: `edge-server site rotate-ca --finish` ends that")
    if left := unmoved(site, read_state(site.path)):
        names = f"{', '.join(left)} trust a root of before still, for which nobody would vouch any more"
        raise ConfigError(f"{names}; wait until they have moved, enrol them anew, or revoke them")
    if not site.ca("root.key").is_file():
        told = f"{site.ca('root.key')} is not here: the root's own key has to vouch for the next one"
        raise ConfigError(f"{told}; bring it back from its medium until this is done")


async def _require_known_ca(site: SiteFolder) -> None:
    """Refuse where a broker that runs would turn boards away once the copies of the site CA that they show are old."""
    state = await asyncio.to_thread(read_state, site.path)
    if await asyncio.to_thread(find_broker, state.port) is None:
        return
    door = broker_endpoint(site, state)
    try:
        async with open_probe(door, site.gateway("probe")):
            pass
    except Unreachable:
        return  # for another reason; the reload says which
    lone = dataclasses.replace(door, trusted=site.ca("root.crt"), alone=True)
    try:
        async with open_probe(lone, site.gateway("probe")):
            pass
    except Unreachable:
        raise ConfigError(KNOW_CA) from None


def _make_next(site: SiteFolder, name: str, now: datetime) -> None:
    """Make the next root, and what it and the one before sign; what an attempt before left of it is gone on with."""
    key, cert = site.ca("root.key").read_bytes(), site.ca("root.crt").read_bytes()
    next_key, next_cert = site.ca(NEXT_KEY), site.ca(NEXT_ROOT)
    if not (next_key.is_file() and next_cert.is_file()):
        made, signed = authority.make_root(name, now, ROOT_YEARS)
        next_cert.unlink(missing_ok=True)
        site.put(next_key, made, private_to="root")
        site.put(next_cert, signed)
    site.put(site.ca(CROSS), sign_again(key, cert, next_cert.read_bytes()))
    again = sign_again(next_key.read_bytes(), next_cert.read_bytes(), site.ca("site.crt").read_bytes())
    site.put(site.ca(NEXT_CA), again)


def sign_again(key: bytes, cert: bytes, other: bytes) -> bytes:
    """Return a CA's certificate as another root signs it: all but the signer and the signature is the same; PEM.

    Args:
        key: Of the root, PEM.
        cert: Of the root, PEM.

    Raises:
        ConfigError: The root's key is not that of its certificate.
    """
    signer, found = x509.load_pem_x509_certificate(cert), x509.load_pem_x509_certificate(other)
    if authority.public_key_of(key) != key_in(signer):
        raise ConfigError("ca/root.key is not the key of ca/root.crt: bring the root's own key")
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        *(signer.subject, found.subject, found.public_key(), found.serial_number),
        *(found.not_valid_before_utc, found.not_valid_after_utc),
    )
    for one in found.extensions:
        if one.oid != x509.AuthorityKeyIdentifier.oid:
            builder = builder.add_extension(one.value, one.critical)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key())
    made = builder.add_extension(signed_by, critical=False).sign(private, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)


def _made_of_them(site: SiteFolder, state: SiteState, now: datetime) -> SiteState:
    make_chains(site)
    return make_pairs(site, state, PAIRS, now)


def _copy_to_releases(site: SiteFolder) -> None:
    """Give packages that are signed already the copies too: the signature is not of them."""
    if not read_index(site.path).releases:
        return
    with editing(site) as index:
        copies = signers_chain(site.ca(""))
        releases = []
        for one in index.releases:
            known = split_certificates(one.certificates.encode())
            added = [ca for ca in split_certificates(copies) if ca not in known and _has_key_of(ca, known)]
            certificates = b"".join([*known, *added]).decode()
            releases.append(msgspec.structs.replace(one, certificates=certificates))
        if tuple(releases) != index.releases:
            write_index(site, msgspec.structs.replace(index, releases=tuple(releases)))


def _has_key_of(ca: bytes, known: list[bytes]) -> bool:
    key = key_in(x509.load_pem_x509_certificate(ca))
    return any(key_in(x509.load_pem_x509_certificate(one)) == key for one in known[1:])


def _forget_before(site: SiteFolder) -> None:
    """End the overlap: what is left of the root before is its certificate of the next, and copies of the site CA."""
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


def forget_moves(site: SiteFolder) -> None:
    """Remove what a root's rotation left for boards that come late: the site CA that they know is going."""
    for name in (CROSS, FORMER_CA):
        site.ca(name).unlink(missing_ok=True)
