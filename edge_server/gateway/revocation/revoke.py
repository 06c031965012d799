"""Shut a device out for good, also while it is connected; let it in again by new enrolment alone.

A list of revoked certificates keeps out whoever connects from now on, and cuts nobody off who is connected (mosquitto
2.0 and 2.1). So: first the access list denies the account everything, live sessions included; then the list names all
of its certificates; both are taken by one reload, which is proven; then a connection in the account's own name, by a
certificate of a few minutes, throws its session off and shows that nothing in this name passes any more. A broker that
lets something pass is stopped.
"""

from __future__ import annotations

import logging
import tempfile
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from edge_server.gateway import authority
from edge_server.gateway.authority import Subject
from edge_server.gateway.enrolment.accounts import SiteAccount
from edge_server.gateway.probe_access import REFUSED, open_probe
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
MOST_NAMED = 50
"""Accounts that are told to whoever names one that is none."""


async def revoke(site: SiteFolder, name: str, now: datetime) -> ReloadResult:
    """Let nothing of a device or a peer pass any more; done again, it mends what was cut short.

    Args:
        now: UTC.

    Raises:
        ConfigError: There is no such account, or as `reload_broker`.
        Unwritable: The disk takes nothing more.
    """
    done = await reload_broker(site, lambda state: with_account(state, name, _denied(find_account(state, name))))
    if not done.running or done.faults:
        return done
    state = read_state(site.path)
    role = state.accounts[name].certificates[-1].role
    fault = await _take_over(site, state, Subject(name, role, state.site), now)
    if not fault:
        return done
    if pid := find_broker(state.port):
        await stop_broker(pid, state.port)
    log.error("the broker was stopped: %s; %s", fault, RESTART_ADVICE)
    return ReloadResult(running=True, faults=(fault,))


async def readmit(site: SiteFolder, name: str) -> ReloadResult:
    """Deny an account no more, so that a board may be enrolled under its name; all its old certificates are revoked.

    Also those that an older version signed while it was being revoked.

    Raises:
        ConfigError: There is no such account, or as `reload_broker`.
        Unwritable: The disk takes nothing more.
    """
    return await reload_broker(
        site, lambda state: with_account(state, name, replace(_denied(find_account(state, name)), denied=False))
    )


def find_account(state: SiteState, name: str) -> SiteAccount:
    """Return an account that may be revoked.

    Raises:
        ConfigError: There is none of that name, or it is the gateway's own.
    """
    found = state.accounts.get(name)
    if found is None or not _is_revocable(found):
        there = sorted(one for one, account in state.accounts.items() if _is_revocable(account))
        more = f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else ""
        known = f"{', '.join(there[:MOST_NAMED])}{more}" if there else "none yet"
        raise ConfigError(f"{name!r} was never enrolled at site {state.site}; enrolled: {known}")
    return found


def _is_revocable(account: SiteAccount) -> bool:
    return any(one.role in REVOCABLE for one in account.certificates)


def _denied(account: SiteAccount) -> SiteAccount:
    return SiteAccount(certificates=tuple(replace(one, revoked=True) for one in account.certificates), denied=True)


async def _take_over(site: SiteFolder, state: SiteState, subject: Subject, now: datetime) -> str:
    """Connect as an account and end its session; return what of it still passes, if anything."""
    ca, signer = site.ca("site.crt").read_bytes(), site.ca("site.key").read_bytes()
    key = authority.make_key()
    issued = authority.issue(signer, ca, authority.public_key_of(key), subject, TAKEOVER_DAYS, now)
    with tempfile.TemporaryDirectory(prefix="fieldfleet-") as folder:  # its user's alone; the key is nowhere else
        pair = Path(folder) / "takeover"
        pair.with_suffix(".key").write_bytes(key)
        pair.with_suffix(".crt").write_bytes(issued.certificate + ca)
        try:
            async with open_probe(broker_endpoint(site, state), pair, subject.name) as caller:
                if await caller.publish(topic(state.site, subject.name, "status")) < REFUSED:
                    return f"it takes what {subject.name} says although that was revoked"
        except Unreachable as error:
            return f"the session of {subject.name} could not be taken over ({error})"
    return ""
