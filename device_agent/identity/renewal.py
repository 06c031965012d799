"""How a board renews its certificate: by its own key, over HTTPS that its certificate authenticates, in good time.

HTTPS and not the broker: the gateway's service knows renewals from joining, a request and its answer need no topics of
their own, and what the site's CA signs never passes through the broker. When it is time is decided by the site's time,
which every answer of the verified gateway tells, so that a board in 1970 renews as any other.

The new certificate stands in a set of its own until the broker has taken it in a TLS handshake: a connection that says
nothing in MQTT, since a second session in this board's name would end the running one. Then the set takes the place of
the one before, by one rename. Whatever is cut off where, a set that belongs together is in use.

In the same way the board moves to the site's next root, where the one that it trusts vouches for that: with the key and
the certificate that it has. Whether there is another one at all, a digest of what the gateway answers tells.
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
from shared.transport.tls import build_context, explain, handshake

log = logging.getLogger(__name__)

LEFT, JITTER = 1 / 3, 0.1
"""Of a certificate's life: it is renewed when so much is left, a tenth of that earlier or later, each board its own."""
FIRST_S, LOOK_S = (5.0, 60.0), (4 * 3600.0, 8 * 3600.0)
"""Until the first look after a start, and between two: spread, so that a fleet does not ask at once."""
RETRY_S = (300.0, 900.0)
"""After one that failed."""
BEGIN, PLAIN = ssl.PEM_HEADER, 2
"""A site's authorities, while no root of it is replaced, are its CA and its root."""
PATIENCE_S, VERDICT_S = 10.0, 3.0
"""For a handshake, and for the broker's word on our certificate, which under TLS 1.3 comes after it."""

Prove = Callable[[Broker], Awaitable[str]]
"""Shows the broker a set; returns why it does not take it, nothing where it does."""


@dataclass
class Renewal:
    """Keeps a board's certificate valid.

    Attributes:
        clock: This board's; takes the site's time.
        prove: Shows the broker a new set.
        broker: Whose other settings the broker's connection has.
    """

    state_dir: Path
    clock: BoardClock
    prove: Prove
    broker: Broker = field(default_factory=Broker)
    random: Random = field(default_factory=Random)
    _told: str = ""
    _moved: str = ""

    @property
    def identity(self) -> Path:
        """Where the board's sets are."""
        return self.state_dir / credentials.FOLDER

    async def run(self) -> None:
        """Look now and then whether it is time, until cancelled."""
        await asyncio.sleep(self.random.uniform(*FIRST_S))
        while True:
            try:
                await self.look()
                self._told, pause = "", LOOK_S
            except (EnrolmentFailed, ConfigError, Unwritable, OSError) as error:
                self._tell(str(error))
                pause = RETRY_S
            await asyncio.sleep(self.random.uniform(*pause))

    def _tell(self, problem: str) -> None:
        """Log what an operator may have to mend, once as long as it lasts."""
        if problem != self._told:
            log.warning("the certificate, or the root that it is of, is not renewed yet: %s", problem)
        self._told = problem

    async def look(self) -> bool:
        """Ask the gateway for its time and its roots; move to the newest, renew if it is time; return whether it was.

        Raises:
            EnrolmentFailed: The gateway does not answer or refuses, the broker does not take the new certificate, or
                the root that is trusted here does not vouch for another that is shown.
            ConfigError: The board's set is damaged.
            Unwritable: The disk takes nothing more.
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
                membership = await self._move(membership, offered, newest)
            except EnrolmentFailed as error:
                refused = error  # a certificate that ends is renewed all the same
        site_utc_s = self.clock.site_utc_s()
        renewed = False
        if site_utc_s is not None and site_utc_s >= self.due_utc_s(membership):
            with hold_lock(self.identity):
                await self._renew(gateway, membership, site_utc_s)
            renewed = True
        if refused:
            raise refused
        if count > PLAIN and self._moved != membership.root:
            await gateway.ask("/moved", TrustedRoot(root=membership.root), credentials.tls_of(used))
            self._moved = membership.root
        return renewed

    def due_utc_s(self, membership: Membership) -> float:
        """Return when a certificate is to be renewed, by the site's time; for one board always the same moment."""
        life_s = membership.not_after_utc_s - membership.not_before_utc_s
        share = Random(f"{membership.device} {membership.not_after_utc_s}").uniform(-JITTER, JITTER)  # noqa: S311
        return membership.not_after_utc_s - life_s * LEFT * (1 + share)

    async def _move(self, membership: Membership, offered: bytes, newest: str) -> Membership:
        """Put a set into use that trusts another root, where the one that is trusted now vouches for that."""
        with hold_lock(self.identity):
            credentials.sweep(self.identity)
            folder, new_membership = await in_thread(self._store_root, membership, offered, newest)
            await self._adopt(folder, new_membership, f"this board's certificate with the root {newest[:16]}…")
        log.info("this board trusts the site's next root by now, for which the one before vouches: %s", newest)
        return new_membership

    def _store_root(self, membership: Membership, offered: bytes, newest: str) -> tuple[Path, Membership]:
        """Return a new set with the key and certificate in use, whole and on the disk, and what it says."""
        from device_agent.identity.certificates import (  # noqa: PLC0415 - once in many years
            check_certificate,
            check_next_root,
            trusted_chain,
        )

        used = self.identity / CURRENT
        key, certificate = (used / KEY).read_bytes(), (used / CERTIFICATE).read_bytes()
        check_next_root(offered, (used / CA).read_bytes())
        chain = trusted_chain(offered, bytes.fromhex(newest))
        check_certificate(certificate.decode(), chain, key, membership.device)
        files = {KEY: key, CA: chain, CERTIFICATE: certificate}
        return self._keep(f"root-{newest[:12]}", files, replace(membership, root=newest))

    async def _adopt(self, folder: Path, membership: Membership, what: str) -> None:
        """Put a whole set into use once the broker has taken it; else sweep it away and raise."""
        if refusal := await self.prove(credentials.broker_of(folder, membership, self.broker)):
            credentials.sweep(self.identity)
            place = f"the broker at {membership.broker_host}:{membership.broker_port}"
            raise EnrolmentFailed(f"{place} does not take {what}: {refusal}; the one before stays", code=1)
        credentials.adopt(self.identity, folder)
        credentials.sweep(self.identity)

    async def _renew(self, gateway: Gateway, membership: Membership, site_utc_s: float) -> None:
        used = self.identity / CURRENT
        credentials.sweep(self.identity)  # what an attempt before left
        key = (used / KEY).read_bytes()
        request = RenewRequest(request=await in_thread(_request, key, membership.device))
        if site_utc_s < membership.not_after_utc_s:
            data = await gateway.ask("/renew", request, credentials.tls_of(used))
        else:  # no handshake takes it any more
            data = await gateway.ask("/renew-expired", request, authority_tls(used / CA))
        folder, renewed = await in_thread(self._store, data, key, membership, site_utc_s)
        await self._adopt(folder, renewed, "the new certificate")
        log.info("certificate renewed until %s", utc_text(renewed.not_after_utc_s))

    def _store(self, data: bytes, key: bytes, membership: Membership, site_utc_s: float) -> tuple[Path, Membership]:
        """Return a new set, whole and on the disk, and what it says."""
        from device_agent.identity.certificates import check_certificate, trusted_chain  # noqa: PLC0415 - once a year

        try:
            answer = decode_json(data, RenewAnswer)
        except WireError as error:
            raise EnrolmentFailed(f"the gateway's answer cannot be read ({error})", code=1) from error
        chain = trusted_chain(answer.chain.encode(), bytes.fromhex(membership.root))
        dates = check_certificate(answer.certificate, chain, key, membership.device)
        renewed = replace(membership, not_before_utc_s=site_utc_s, not_after_utc_s=dates.not_after_utc_s)
        name = hashlib.sha256(answer.certificate.encode()).hexdigest()[:12]
        files = {KEY: key, CA: chain, CERTIFICATE: answer.certificate.encode()}
        return self._keep(f"renewed-{name}", files, renewed)

    def _keep(self, name: str, files: Mapping[str, bytes], membership: Membership) -> tuple[Path, Membership]:
        """Return a new set, whole and on the disk, and what it says."""
        folder = credentials.open_set(self.identity, name)
        for file, content in (*files.items(), (MEMBERSHIP, msgspec.json.encode(membership))):
            credentials.keep(folder, file, content)
        return folder, membership


def newest_root(pem: bytes) -> tuple[str, int]:
    """Return the digest of the last of the certificates that a gateway shows, and how many there are.

    Without `cryptography`, which an idle agent does not load; nothing where they are none.
    """
    blocks = pem.decode("ascii", "replace").split(BEGIN)[1:]
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert((BEGIN + blocks[-1]).strip())).hexdigest(), len(blocks)
    except (IndexError, ValueError):
        return "", 0


def _request(key: bytes, device: str) -> str:
    from device_agent.identity.certificates import make_request  # noqa: PLC0415 - once a year

    return make_request(key, device)


async def show_certificate(broker: Broker, clock: BoardClock) -> str:
    """Show a broker our certificate in a TLS handshake, and leave; return why it does not take it, if it does not."""
    return await in_thread(_shake_hands, broker, clock.may_judge())


def _shake_hands(broker: Broker, dates: bool) -> str:  # noqa: FBT001 - a thread is given positions
    tls = broker.tls
    assert tls is not None
    try:
        sock = socket.create_connection((broker.host, broker.port), timeout=PATIENCE_S)
        with handshake(build_context(tls, dates=dates), sock, tls.server_name or broker.host, PATIENCE_S) as secured:
            return _verdict(secured)
    except Unreachable as error:
        return str(error)
    except (OSError, ValueError) as error:
        return str(explain(error, tls, broker.host))


def _verdict(secured: ssl.SSLSocket) -> str:
    """Wait for what the broker says of our certificate: it says something only where it does not take it."""
    secured.settimeout(VERDICT_S)
    try:
        return "it speaks before it is spoken to, so it is no MQTT broker" if secured.recv(1) else "it hangs up"
    except TimeoutError:
        return ""
