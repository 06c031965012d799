"""Revoke a device permanently, even while it is connected.

A revocation list rejects new connections, but mosquitto (2.0 and 2.1) does not close open ones. So: the access list
denies the account everything, in open sessions too, and the revocation list names all of its certificates; one verified
reload applies both. Then a connection in the account's own name, by a certificate valid for minutes, replaces its
session and verifies that nothing in this name passes. A broker that lets something pass is stopped. Only a new
enrolment readmits the device.
"""

from __future__ import annotations

import logging
import tempfile
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from edge_server.gateway import authority
from edge_server.gateway.authority import Subject
from edge_server.gateway.broker_probe import open_probe
from edge_server.gateway.enrolment.accounts import SiteAccount
from edge_server.gateway.reload import (
    RESTART_ADVICE,
    ReloadResult,
    broker_endpoint,
    find_broker,
    reload_broker,
    stop_broker,
)
from edge_server.gateway.site_folder import SiteFolder
from edge_server.gateway.state import SiteState, read_state, with_account
from shared.errors import ConfigError, Unreachable
from shared.protocol.topics import topic

log = logging.getLogger(__name__)

TAKEOVER_DAYS = 10 / (24 * 60)
REVOCABLE = ("device", "peer")
MOST_LISTED = 50
"""Accounts listed in the error about an unknown one."""


async def revoke(site: SiteFolder, name: str, now: datetime) -> ReloadResult:
    """Revoke a device or a peer; running it again completes an interrupted revocation.

    Args:
        now: Current time in UTC.

    Raises:
        ConfigError: There is no such account, or as `reload_broker`.
        Unwritable: The disk is full or read-only.
    """
    done = await reload_broker(site, lambda state: with_account(state, name, _revoke_all(find_account(state, name))))
    if not done.running or done.faults:
        return done
    state = read_state(site.path)
    role = state.accounts[name].certificates[-1].role
    fault = await _end_session(site, state, Subject(name, role, state.site), now)
    if not fault:
        return done
    if pid := find_broker(state.port):
        await stop_broker(pid, state.port)
    log.error("the broker was stopped: %s; %s", fault, RESTART_ADVICE)
    return ReloadResult(running=True, faults=(fault,))


async def readmit(site: SiteFolder, name: str) -> ReloadResult:
    """Lift the denial of an account, so that a board may be enrolled under its name; its old certificates stay revoked.

    This includes those that an older version signed during the revocation.

    Raises:
        ConfigError: There is no such account, or as `reload_broker`.
        Unwritable: The disk is full or read-only.
    """
    return await reload_broker(
        site, lambda state: with_account(state, name, replace(_revoke_all(find_account(state, name)), denied=False))
    )


def find_account(state: SiteState, name: str) -> SiteAccount:
    """Return an account that may be revoked.

    Raises:
        ConfigError: There is none of that name, or it belongs to the gateway.
    """
    account = state.accounts.get(name)
    if account is None or not _is_revocable(account):
        enrolled = sorted(enrolled_name for enrolled_name, account in state.accounts.items() if _is_revocable(account))
        more = f" and {len(enrolled) - MOST_LISTED} more" if len(enrolled) > MOST_LISTED else ""
        names = f"{', '.join(enrolled[:MOST_LISTED])}{more}" if enrolled else "none yet"
        raise ConfigError(f"{name!r} was never enrolled at site {state.site}; enrolled: {names}")
    return account


def _is_revocable(account: SiteAccount) -> bool:
    return any(cert.role in REVOCABLE for cert in account.certificates)


def _revoke_all(account: SiteAccount) -> SiteAccount:
    return SiteAccount(certificates=tuple(replace(cert, revoked=True) for cert in account.certificates), denied=True)


async def _end_session(site: SiteFolder, state: SiteState, subject: Subject, now: datetime) -> str:
    """Connect as an account to end its session; return a fault if its messages still pass."""
    ca, signer = site.ca("site.crt").read_bytes(), site.ca("site.key").read_bytes()
    key = authority.make_key()
    issued = authority.issue(signer, ca, authority.public_key_of(key), subject, TAKEOVER_DAYS, now)
    with tempfile.TemporaryDirectory(prefix="fieldfleet-") as folder:  # private to this user; the key exists only here
        pair = Path(folder) / "takeover"
        pair.with_suffix(".key").touch(0o600)
        pair.with_suffix(".key").write_bytes(key)
        pair.with_suffix(".crt").write_bytes(issued.certificate + ca)
        try:
            async with open_probe(broker_endpoint(site, state), pair, subject.name) as connection:
                if not await connection.publish(topic(state.site, subject.name, "status")):
                    return f"it accepts messages of {subject.name}, which is revoked"
        except Unreachable as error:
            return f"the session of {subject.name} could not be taken over ({error})"
    return ""
