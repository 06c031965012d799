"""Rotation of the broker's keys and of the site CA, while boards stay connected.

Boards and broker trust the root, and every client sends the site CA's certificate with its own, so nobody has to be
informed. The broker loads its own pair and the revocation lists at a reload. It accepts a site CA as long as it has
that CA's revocation list: during the overlap both lists exist, and removing a list ends its CA, whatever the broker's
`cafile` contains.

An interrupted rotation continues when the command is run again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509

from edge_server.gateway import authority
from edge_server.gateway.certificate_files import authority_id, is_replacing_root
from edge_server.gateway.initialise import SITE_YEARS
from edge_server.gateway.probe_access import fetch_certificate
from edge_server.gateway.reload import ReloadResult, broker_endpoint, reload_broker
from edge_server.gateway.rotation.root import devices_on_old_root, remove_cross_certificates
from edge_server.gateway.site_folder import PAIRS, SiteFolder, make_chains, make_pair
from edge_server.gateway.state import SiteState, read_state
from shared.errors import ConfigError, Unreachable

SERVER_PAIRS = ("server", "enrolment", "edge-server", "probe")


@dataclass(frozen=True)
class CaRotation:
    """Result of a rotation.

    Attributes:
        reloaded: Result of the broker's reload.
        pending: Boards and peers whose newest certificate was signed by the previous CA.
    """

    reloaded: ReloadResult
    pending: tuple[str, ...] = ()


async def rotate_server(site: SiteFolder, now: datetime) -> CaRotation:
    """Replace the keys and certificates of the broker, the enrolment service, the server and the probe.

    Args:
        now: Current time in UTC.

    Raises:
        ConfigError: As `reload_broker`, or the CA cannot sign.
        Unwritable: The disk is full or read-only.
    """

    def renew(state: SiteState) -> SiteState:
        for name in SERVER_PAIRS:
            state = make_pair(site, state, name, now, new_key=True)
        return state

    return CaRotation(await _verify_served_certificate(site, await reload_broker(site, renew)))


async def rotate_ca(site: SiteFolder, now: datetime) -> CaRotation:
    """Create the next site CA; certificates of the previous one stay valid until `finish_ca`.

    Args:
        now: Current time in UTC.

    Raises:
        ConfigError: The root's key is missing, another rotation is not finished, or boards that still trust the
            previous root would be shut out; or as `rotate_server`.
        Unwritable: The disk is full or read-only.
    """

    def renew(state: SiteState) -> SiteState:
        _require_moved(site, state)
        _make_next(site, state.site, now)
        for name in PAIRS:
            state = make_pair(site, state, name, now)
        return state

    reloaded = await _verify_served_certificate(site, await reload_broker(site, renew))
    return CaRotation(reloaded, _pending_accounts(site, read_state(site.path)))


async def finish_ca(site: SiteFolder, *, force: bool = False) -> CaRotation:
    """End the overlap: certificates of the previous CA are rejected from now on.

    Args:
        force: Even if boards have no other certificate; they have to be enrolled again.

    Raises:
        ConfigError: There is no previous CA, or boards would be shut out without `force`.
        Unwritable: The disk is full or read-only.
    """

    def end(state: SiteState) -> SiteState:
        if not any(
            site.ca(f"site-before.{ending}").is_file() for ending in ("crt", "key")
        ):  # the key alone: interrupted
            raise ConfigError(f"{site.path}: there is no previous CA; begin a rotation by `edge-server site rotate-ca`")
        pending = _pending_accounts(site, state)
        if pending and not force:
            names = f"{', '.join(pending)} have no certificate of the new CA yet, and would be shut out"
            raise ConfigError(f"{names}; wait for their renewal, enrol them again, revoke them, or use --force")
        for ending in ("crt", "key"):  # without its certificate, it is no longer valid
            site.ca(f"site-before.{ending}").unlink(missing_ok=True)
        make_chains(site)
        return state

    return CaRotation(await reload_broker(site, end))


def _require_moved(site: SiteFolder, state: SiteState) -> None:
    """Refuse while boards of a previous root recognize the gateway only by the CA to be replaced."""
    if is_replacing_root(site.ca("")):
        raise ConfigError("the root is being replaced: run `edge-server site rotate-root --finish` first")
    if pending := devices_on_old_root(site, state):
        names = f"{', '.join(pending)} still trust the previous root, and would reject the gateway with its next CA"
        raise ConfigError(f"{names}; switch them on and wait 8 hours, enrol them again, or revoke them")


def _make_next(site: SiteFolder, name: str, now: datetime) -> None:
    """Set the present CA aside and create the next, or complete an interrupted attempt."""
    key, cert, root_key = site.ca("site.key"), site.ca("site.crt"), site.ca("root.key")
    if not root_key.is_file():
        raise ConfigError(f"{root_key} is missing: put it back while the CA is rotated, and remove it again")
    before = site.ca("site-before.crt")  # the same as `site.crt` if this was interrupted
    if before.is_file() and before.read_bytes() != cert.read_bytes():
        raise ConfigError("the previous CA is still valid: run `edge-server site rotate-ca --finish` first")
    if not before.is_file():
        site.put(site.ca("site-before.key"), key.read_bytes(), private_to=site.server_user)
        site.put(before, cert.read_bytes())
    root = site.ca("root.crt").read_bytes()
    next_key, next_cert = authority.make_site(root_key.read_bytes(), root, name, now, SITE_YEARS)
    site.put(key, next_key, private_to=site.server_user)
    site.put(cert, next_cert)
    remove_cross_certificates(site)
    make_chains(site)


def _pending_accounts(site: SiteFolder, state: SiteState) -> tuple[str, ...]:
    """Return the valid accounts that have certificates of the previous CA only."""
    now = authority_id(site.ca("site.crt").read_bytes())
    return tuple(
        sorted(
            name
            for name, account in state.accounts.items()
            if not account.denied
            and any(not cert.revoked for cert in account.certificates)
            and not any(cert.authority == now and not cert.revoked for cert in account.certificates)
        )
    )


async def _verify_served_certificate(site: SiteFolder, reloaded: ReloadResult) -> ReloadResult:
    """Verify that a running broker serves the gateway's new certificate."""
    if not reloaded.running or reloaded.faults:
        return reloaded
    expected = x509.load_pem_x509_certificate(site.gateway("server.crt").read_bytes())
    try:
        served = await fetch_certificate(broker_endpoint(site, await asyncio.to_thread(read_state, site.path)))
    except Unreachable as error:
        return ReloadResult(running=True, faults=(f"it serves no certificate ({error})",))
    if x509.load_der_x509_certificate(served) != expected:
        return ReloadResult(running=True, faults=("it still serves its previous certificate: restart it",))
    return reloaded
