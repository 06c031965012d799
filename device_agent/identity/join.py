"""Enrolment of a board with a one-time token.

Every step can be interrupted and repeated: 1. Fetch the CA from any host at the address and compare its digest with the
token's. 2. Verify the gateway by it. 3. Create a key, which stays on the board. 4. Send token and request, verify the
certificate received. 5. Connect to the broker with it. 6. Activate the set; close the token. The token format is that
of k3s and kubeadm; the check before activation is thin-edge.io's.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CA, CERTIFICATE, CURRENT, KEY, MEMBERSHIP, Membership
from device_agent.identity.https import TOKEN, UNAVAILABLE, Gateway, authority_tls
from shared.errors import EnrolmentFailed, WireError
from shared.protocol.enrolment import JoinAnswer, Joined, JoinRequest, Token, decode_json
from shared.protocol.topics import is_name
from shared.runtime.folder_lock import hold_lock
from shared.transport.base import Broker

_HOST = re.compile(r"[\x21-\x7e]{1,253}")

Prove = Callable[[Broker, Membership], Awaitable[str]]
"""Connects to the broker as a device and leaves; returns why it is refused, empty if it is accepted."""


@dataclass
class Join:
    """Enrolment of one board.

    Attributes:
        device: Name in the board's own file; empty to take the token's.
        prove: Connects to the broker with the new certificate.
        report: Prints a progress line.
    """

    token: Token
    state_dir: Path
    device: str
    clock: BoardClock
    prove: Prove
    report: Callable[[str], None] = lambda _line: None

    async def run(self) -> Membership:
        """Enrol the board; return its membership.

        Raises:
            EnrolmentFailed: It failed, see the code; it can be repeated safely.
            ConfigError: This user may not write the folder.
            Unwritable: The disk is full or read-only.
        """
        identity = credentials.open_identity(self.state_dir)
        self.clock.folder = identity
        with hold_lock(identity):
            folder = credentials.open_set(identity, self._set_name(identity))
            gateway = Gateway(self.token.host, self.token.port, self.clock)
            await self._fetch_authority(gateway, folder)
            membership = credentials.read_membership(folder) or await self._enrol(gateway, folder)
            await self._prove(credentials.make_broker(folder, membership), membership)
            credentials.activate(identity, folder)
            confirmation = Joined(token=self.token.id, secret=self.token.secret)
            await gateway.ask("/joined", confirmation, authority_tls(folder / CA))
            credentials.remove_unused(identity)
        return membership

    def _set_name(self, identity: Path) -> str:
        """Return the name of the token's set: the current set if this token created it."""
        used = credentials.read_membership(identity / CURRENT)
        same = used is not None and used.token == self.token.id
        return (identity / CURRENT).readlink().name if same else f"join-{self.token.id}"

    async def _fetch_authority(self, gateway: Gateway, folder: Path) -> None:
        from device_agent.identity.certificates import select_trusted_chain  # noqa: PLC0415 - not for an idle agent

        begun = credentials.read_membership(folder)  # of an earlier attempt; it may have moved to the next root
        root = bytes.fromhex(begun.root) if begun else self.token.root
        chain = select_trusted_chain(await gateway.fetch_unverified("/ca.pem"), root)
        credentials.write_file(folder, CA, chain)
        self.report(f"the gateway at {gateway.host}:{gateway.port} has the CA that the token names")

    async def _enrol(self, gateway: Gateway, folder: Path) -> Membership:
        """Obtain a certificate for this board's key; the membership, written last, completes the set."""
        from device_agent.identity.certificates import check_certificate, make_certificate_request  # noqa: PLC0415 - as above

        key = _load_or_make_key(folder)
        request = JoinRequest(
            token=self.token.id,
            secret=self.token.secret,
            request=make_certificate_request(key, self.device),
            device=self.device,
        )
        answer = _decode(await gateway.ask("/join", request, authority_tls(folder / CA)))
        dates = check_certificate(answer.certificate, (folder / CA).read_bytes(), key, answer.device)
        site_utc_s = self.clock.site_utc_s()
        membership = Membership(
            device=answer.device,
            site=answer.site,
            token=self.token.id,
            host=self.token.host,
            port=self.token.port,
            root=self.token.root.hex(),
            broker_host=answer.broker_host,
            broker_port=answer.broker_port,
            not_before_utc_s=dates.not_before_utc_s if site_utc_s is None else site_utc_s,
            not_after_utc_s=dates.not_after_utc_s,
        )
        credentials.write_file(folder, CERTIFICATE, answer.certificate.encode())
        credentials.write_file(folder, MEMBERSHIP, msgspec.json.encode(membership))
        self.report(f"this board is {answer.device} of site {answer.site}; its key was created here")
        return membership

    async def _prove(self, broker: Broker, membership: Membership) -> None:
        place = f"the broker at {broker.host}:{broker.port}"
        if refusal := await self.prove(broker, membership):
            what = f"certificate received, but {place} rejects it: {refusal}; join again with the same token"
            why = self.clock.explain()
            raise EnrolmentFailed(f"{what}{'; ' if why else ''}{why}", code=UNAVAILABLE)
        self.report(f"{place} accepts the certificate")


def _load_or_make_key(folder: Path) -> bytes:
    """Return the key of an earlier attempt, to which the token may be bound, or a new one."""
    from device_agent.identity.certificates import is_usable_key, make_key  # noqa: PLC0415 - as above

    path = folder / KEY
    if not path.is_file() or not is_usable_key(path.read_bytes()):
        credentials.write_file(folder, KEY, make_key())
    return path.read_bytes()


def _decode(body: bytes) -> JoinAnswer:
    try:
        answer = decode_json(body, JoinAnswer)
    except WireError as error:
        raise EnrolmentFailed(
            f"the gateway's answer cannot be read ({error}); it may be of a newer version, update this board",
            code=TOKEN,
        ) from error
    is_place = _HOST.fullmatch(answer.broker_host) and 0 < answer.broker_port < 1 << 16
    if not is_name(answer.device) or not is_name(answer.site) or not is_place:
        names = f"device {answer.device[:64]!r}, site {answer.site[:64]!r}, broker {answer.broker_host[:64]!r}"
        raise EnrolmentFailed(
            f"the gateway's answer holds an invalid name: {names}; check the site's settings", code=TOKEN
        )
    return answer
