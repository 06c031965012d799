"""Certificate renewal of a board, and migration to the next root CA.

Renewal uses HTTPS authenticated by the current certificate, not the broker: the gateway's service handles enrolment
already, a request and its answer need no topics, and nothing the site's CA signs passes through the broker. The due
time follows the site's time, which every answer of the verified gateway carries, so a board with its clock in 1970
renews like any other.

The new certificate is stored as a separate set until the broker has accepted it in a TLS handshake (without an MQTT
session, since a second session under this board's name would end the running one). One rename then activates the set,
so an interruption at any point leaves a consistent set in use.

The board moves to the site's next root in the same way, with its present key and certificate, if the trusted root has
cross-signed it. A digest in the gateway's answer shows whether there is another root.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
from msgspec.structs import replace

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock, utc_text
from device_agent.identity.credentials import CA, CERTIFICATE, CURRENT, KEY, MEMBERSHIP, Membership
from device_agent.identity.https import Gateway, authority_tls
from shared.errors import ConfigError, EnrolmentFailed, Unreachable, Unwritable, WireError
from shared.protocol.enrolment import RenewAnswer, RenewRequest, TrustedRoot, decode_json
from shared.runtime.executor import in_thread
from shared.runtime.folder_lock import hold_lock
from shared.transport.base import Broker
from shared.transport.tls import build_context, explain_failure, handshake

log = logging.getLogger(__name__)

RENEW_AT, JITTER = 1 / 3, 0.1
"""Remaining share of a certificate's life at renewal, and its spread: each board renews a tenth earlier or later."""
FIRST_S, CHECK_S = (5.0, 60.0), (4 * 3600.0, 8 * 3600.0)
"""Seconds until the first check after a start and between checks: spread, so that a fleet does not ask at once."""
RETRY_S = (300.0, 900.0)
"""Pause after a failed check."""
PEM_HEADER, USUAL_CHAIN = ssl.PEM_HEADER, 2
"""Start of a certificate, and the usual number in a chain: the site's CA and its root."""
PATIENCE_S, VERDICT_S = 10.0, 3.0
"""Time limits of a handshake and of the broker's verdict, which TLS 1.3 delivers after the handshake."""

Prove = Callable[[Broker], Awaitable[str]]
"""Presents a set to the broker; returns why it is rejected, empty if it is accepted."""


@dataclass
class Renewal:
    """Keeps a board's certificate valid.

    Attributes:
        clock: The board's clock; receives the site's time.
        prove: Presents a new set to the broker.
        broker: Template for the other settings of the broker connection.
    """

    state_dir: Path
    clock: BoardClock
    prove: Prove
    broker: Broker = field(default_factory=Broker)
    random: Random = field(default_factory=Random)
    _last_problem: str = ""
    _reported_root: str = ""

    @property
    def identity(self) -> Path:
        """Folder of the board's sets."""
        return self.state_dir / credentials.FOLDER

    async def run(self) -> None:
        """Check periodically whether renewal is due, until cancelled."""
        await asyncio.sleep(self.random.uniform(*FIRST_S))
        while True:
            try:
                await self.look()
                self._last_problem, pause = "", CHECK_S
            except (EnrolmentFailed, ConfigError, Unwritable, OSError) as error:
                self._log_once(str(error))
                pause = RETRY_S
            await asyncio.sleep(self.random.uniform(*pause))

    def _log_once(self, problem: str) -> None:
        """Log a problem that an operator may have to fix, once while it lasts."""
        if problem != self._last_problem:
            log.warning("certificate or root not renewed yet: %s", problem)
        self._last_problem = problem

    async def look(self) -> bool:
        """Ask the gateway for its time and roots; migrate to a new root and renew if due; return whether renewed.

        Raises:
            EnrolmentFailed: The gateway does not answer or refuses, the broker rejects the new certificate, or the
                trusted root has not signed the new one.
            ConfigError: The board's set is damaged.
            Unwritable: The disk is full or read-only.
        """
        used = self.identity / CURRENT
        membership = credentials.read_membership(used)
        if membership is None:
            return False
        gateway = Gateway(membership.host, membership.port, self.clock)
        offered = await gateway.ask("/ca.pem", None, authority_tls(used / CA))
        refused: EnrolmentFailed | None = None
        newest, count = newest_root(offered)
        if newest and newest != membership.root:
            try:
                membership = await self._switch_root(membership, offered, newest)
            except EnrolmentFailed as error:
                refused = error  # renew an expiring certificate all the same
        site_utc_s = self.clock.site_utc_s()
        renewed = False
        if site_utc_s is not None and site_utc_s >= self.due_utc_s(membership):
            with hold_lock(self.identity):
                await self._renew(gateway, membership, site_utc_s)
            renewed = True
        if refused:
            raise refused
        if count > USUAL_CHAIN and self._reported_root != membership.root:
            await gateway.ask("/moved", TrustedRoot(root=membership.root), credentials.make_tls(used))
            self._reported_root = membership.root
        return renewed

    def due_utc_s(self, membership: Membership) -> float:
        """Return when a certificate is to be renewed, by the site's time; deterministic for each board."""
        life_s = membership.not_after_utc_s - membership.not_before_utc_s
        share = Random(f"{membership.device} {membership.not_after_utc_s}").uniform(-JITTER, JITTER)  # noqa: S311
        return membership.not_after_utc_s - life_s * RENEW_AT * (1 + share)

    async def _switch_root(self, membership: Membership, offered: bytes, newest: str) -> Membership:
        """Activate a set with another root that the trusted root has cross-signed."""
        with hold_lock(self.identity):
            credentials.remove_unused(self.identity)
            folder, new_membership = await in_thread(self._store_root, membership, offered, newest)
            await self._activate(folder, new_membership, f"this board's certificate with the root {newest[:16]}…")
        log.info("this board now trusts the site's next root, cross-signed by the previous one: %s", newest)
        return new_membership

    def _store_root(self, membership: Membership, offered: bytes, newest: str) -> tuple[Path, Membership]:
        """Store a new set with the present key and certificate; return it and its membership."""
        from device_agent.identity.certificates import (  # noqa: PLC0415 - once in many years
            check_certificate,
            select_trusted_chain,
            verify_cross_signed_root,
        )

        used = self.identity / CURRENT
        key, certificate = (used / KEY).read_bytes(), (used / CERTIFICATE).read_bytes()
        verify_cross_signed_root(offered, (used / CA).read_bytes())
        chain = select_trusted_chain(offered, bytes.fromhex(newest))
        check_certificate(certificate.decode(), chain, key, membership.device)
        files = {KEY: key, CA: chain, CERTIFICATE: certificate}
        return self._keep(f"root-{newest[:12]}", files, replace(membership, root=newest))

    async def _activate(self, folder: Path, membership: Membership, what: str) -> None:
        """Activate a complete set once the broker accepts it; else remove it and raise."""
        if refusal := await self.prove(credentials.make_broker(folder, membership, self.broker)):
            credentials.remove_unused(self.identity)
            place = f"the broker at {membership.broker_host}:{membership.broker_port}"
            raise EnrolmentFailed(f"{place} rejects {what}: {refusal}; the current set stays in use", code=1)
        credentials.activate(self.identity, folder)
        credentials.remove_unused(self.identity)

    async def _renew(self, gateway: Gateway, membership: Membership, site_utc_s: float) -> None:
        used = self.identity / CURRENT
        credentials.remove_unused(self.identity)  # left by an earlier attempt
        key = (used / KEY).read_bytes()
        request = RenewRequest(request=await in_thread(_make_request, key, membership.device))
        if site_utc_s < membership.not_after_utc_s:
            data = await gateway.ask("/renew", request, credentials.make_tls(used))
        else:  # an expired certificate passes no handshake
            data = await gateway.ask("/renew-expired", request, authority_tls(used / CA))
        folder, renewed = await in_thread(self._store, data, key, membership, site_utc_s)
        await self._activate(folder, renewed, "the new certificate")
        log.info("certificate renewed until %s", utc_text(renewed.not_after_utc_s))

    def _store(self, data: bytes, key: bytes, membership: Membership, site_utc_s: float) -> tuple[Path, Membership]:
        """Store a new set from the gateway's answer; return it and its membership."""
        from device_agent.identity.certificates import check_certificate, select_trusted_chain  # noqa: PLC0415 - once a year

        try:
            answer = decode_json(data, RenewAnswer)
        except WireError as error:
            raise EnrolmentFailed(f"the gateway's answer cannot be read ({error})", code=1) from error
        chain = select_trusted_chain(answer.chain.encode(), bytes.fromhex(membership.root))
        dates = check_certificate(answer.certificate, chain, key, membership.device)
        renewed = replace(membership, not_before_utc_s=site_utc_s, not_after_utc_s=dates.not_after_utc_s)
        name = hashlib.sha256(answer.certificate.encode()).hexdigest()[:12]
        files = {KEY: key, CA: chain, CERTIFICATE: answer.certificate.encode()}
        return self._keep(f"renewed-{name}", files, renewed)

    def _keep(self, name: str, files: Mapping[str, bytes], membership: Membership) -> tuple[Path, Membership]:
        """Write the files of a new set to disk; return it and its membership."""
        folder = credentials.open_set(self.identity, name)
        for file, content in (*files.items(), (MEMBERSHIP, msgspec.json.encode(membership))):
            credentials.write_file(folder, file, content)
        return folder, membership


def newest_root(pem: bytes) -> tuple[str, int]:
    """Return the digest of the last certificate that a gateway offers, and their number.

    Works without `cryptography`, which an idle agent does not load; returns an empty digest for malformed input.
    """
    blocks = pem.decode("ascii", "replace").split(PEM_HEADER)[1:]
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert((PEM_HEADER + blocks[-1]).strip())).hexdigest(), len(blocks)
    except (IndexError, ValueError):
        return "", 0


def _make_request(key: bytes, device: str) -> str:
    from device_agent.identity.certificates import make_certificate_request  # noqa: PLC0415 - once a year

    return make_certificate_request(key, device)


async def show_certificate(broker: Broker, clock: BoardClock) -> str:
    """Present this board's certificate to a broker in a TLS handshake; return why it is rejected, empty if accepted."""
    return await in_thread(_try_handshake, broker, clock.may_judge())


def _try_handshake(broker: Broker, dates: bool) -> str:  # noqa: FBT001 - a thread is given positions
    tls = broker.tls
    assert tls is not None
    try:
        sock = socket.create_connection((broker.host, broker.port), timeout=PATIENCE_S)
        with handshake(build_context(tls, dates=dates), sock, tls.server_name or broker.host, PATIENCE_S) as secured:
            return _read_rejection(secured)
    except Unreachable as error:
        return str(error)
    except (OSError, ValueError) as error:
        return str(explain_failure(error, tls, broker.host))


def _read_rejection(secured: ssl.SSLSocket) -> str:
    """Wait for the broker's verdict on our certificate: it sends something only to reject it."""
    secured.settimeout(VERDICT_S)
    try:
        return "it sends data before a request, so it is not an MQTT broker" if secured.recv(1) else "it hangs up"
    except TimeoutError:
        return ""
