"""New keys for the broker, and a new site CA, while boards stay connected.

Nobody has to learn anything: boards and broker trust the root, and whoever shows a certificate sends the site CA's
along. The broker takes its own pair and the lists of revoked certificates at a reload. A site CA is in force at the
broker by its list: while two overlap both lists are there; the one before is out when its list is gone. What the
broker's `cafile` holds of it does not matter for that.

A rotation that was cut short goes on when it is asked for again.
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
from edge_server.gateway.rotation.root import forget_moves, unmoved
from edge_server.gateway.site_folder import PAIRS, SiteFolder, make_chains, make_pair
from edge_server.gateway.state import SiteState, read_state
from shared.errors import ConfigError, Unreachable

OWN_KEYS = ("server", "enrolment", "edge-server", "probe")


@dataclass(frozen=True)
class Rotated:
    """What became of a rotation.

    Attributes:
        reloaded: What the broker did.
        left: Boards and peers whose newest certificate is of the CA before.
    """

    reloaded: ReloadResult
    left: tuple[str, ...] = ()


async def rotate_server(site: SiteFolder, now: datetime) -> Rotated:
    """Give the broker, the enrolment service, the server and the probe new keys and certificates.

    Args:
        now: UTC.

    Raises:
        ConfigError: As `reload_broker`, or the CA cannot sign.
        Unwritable: The disk takes nothing more.
    """

    def renew(state: SiteState) -> SiteState:
        for name in OWN_KEYS:
            state = make_pair(site, state, name, now, new_key=True)
        return state

    return Rotated(await _shown(site, await reload_broker(site, renew)))


async def rotate_ca(site: SiteFolder, now: datetime) -> Rotated:
    """Make the next site CA; what the one before signed stays good until `finish_ca`.

    Args:
        now: UTC.

    Raises:
        ConfigError: The root's key is not here, another rotation is not finished, or boards would be shut out since
            they trust the root of before still; or as `rotate_server`.
        Unwritable: The disk takes nothing more.
    """

    def renew(state: SiteState) -> SiteState:
        _require_moved(site, state)
        _make_next(site, state.site, now)
        for name in PAIRS:
            state = make_pair(site, state, name, now)
        return state

    reloaded = await _shown(site, await reload_broker(site, renew))
    return Rotated(reloaded, _left(site, read_state(site.path)))


async def finish_ca(site: SiteFolder, *, force: bool = False) -> Rotated:
    """End the overlap: what the CA before signed is refused from now on.

    Args:
        force: Also where boards have no other certificate yet; they have to be enrolled anew.

    Raises:
        ConfigError: There is no CA before; or boards would be shut out, and that is not forced.
        Unwritable: The disk takes nothing more.
    """

    def end(state: SiteState) -> SiteState:
        if not any(site.ca(f"site-before.{ending}").is_file() for ending in ("crt", "key")):  # or one was cut short
            raise ConfigError(f"{site.path}: there is no CA before; `edge-server site rotate-ca` begins a rotation")
        left = _left(site, state)
        if left and not force:
            names = f"{', '.join(left)} have no certificate of the new CA yet, and would be shut out"
            raise ConfigError(f"{names}; wait for their renewal, enrol them anew, revoke them, or say --force")
        for ending in ("crt", "key"):  # without its certificate it counts no more
            site.ca(f"site-before.{ending}").unlink(missing_ok=True)
        make_chains(site)
        return state

    return Rotated(await reload_broker(site, end))


def _require_moved(site: SiteFolder, state: SiteState) -> None:
    """Refuse while boards of a root before know the gateway by the CA alone that would go."""
    if is_replacing_root(site.ca("")):
        raise ConfigError("the root is being replaced: `edge-server site rotate-root --finish` first")
    if left := unmoved(site, state):
        names = f"{', '.join(left)} trust the root of before still, and would not know the gateway by its next CA"
        raise ConfigError(f"{names}; switch them on and wait 8 hours, enrol them anew, or revoke them")


def _make_next(site: SiteFolder, name: str, now: datetime) -> None:
    """Set the CA that signs aside and make the next, or go on with that."""
    key, cert, root_key = site.ca("site.key"), site.ca("site.crt"), site.ca("root.key")
    if not root_key.is_file():
        raise ConfigError(f"{root_key} is not here: bring it back while the CA is rotated, and take it away again")
    before = site.ca("site-before.crt")  # the same as `site.crt` where this was cut short
    if before.is_file() and before.read_bytes() != cert.read_bytes():
        raise ConfigError("the CA before is still in force: `edge-server site rotate-ca --finish` ends that")
    if not before.is_file():
        site.put(site.ca("site-before.key"), key.read_bytes(), private_to=site.server_user)
        site.put(before, cert.read_bytes())
    root = site.ca("root.crt").read_bytes()
    next_key, next_cert = authority.make_site(root_key.read_bytes(), root, name, now, SITE_YEARS)
    site.put(key, next_key, private_to=site.server_user)
    site.put(cert, next_cert)
    forget_moves(site)
    make_chains(site)


def _left(site: SiteFolder, state: SiteState) -> tuple[str, ...]:
    """Return who has nothing but certificates of the CA before, and is not revoked."""
    now = authority_id(site.ca("site.crt").read_bytes())
    return tuple(
        sorted(
            name
            for name, account in state.accounts.items()
            if not account.denied
            and any(not one.revoked for one in account.certificates)
            and not any(one.authority == now and not one.revoked for one in account.certificates)
        )
    )


async def _shown(site: SiteFolder, reloaded: ReloadResult) -> ReloadResult:
    """See that a broker that runs shows the gateway's new certificate to whoever connects."""
    if not reloaded.running or reloaded.faults:
        return reloaded
    wanted = x509.load_pem_x509_certificate(site.gateway("server.crt").read_bytes())
    try:
        shown = await fetch_certificate(broker_endpoint(site, await asyncio.to_thread(read_state, site.path)))
    except Unreachable as error:
        return ReloadResult(running=True, faults=(f"it shows no certificate ({error})",))
    if x509.load_der_x509_certificate(shown) != wanted:
        return ReloadResult(running=True, faults=("it shows its certificate of before still: restart it",))
    return reloaded
