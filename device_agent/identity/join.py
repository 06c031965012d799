"""How a board joins a site by a one-time token. Every step may be cut off and all of it done again by the same board.

1. Fetch the CA from whoever answers; compare its digest with the token's. 2. Verify the gateway by it. 3. Make a key,
which stays here. 4. Show token and request, get a certificate, verify that. 5. Connect to the broker by it. 6. Put it
into use; close the token. The form is that of k3s and kubeadm; the proof before anything is put into use is
thin-edge.io's.
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
from device_agent.identity.https import AWAY, TOKEN, Gateway, authority_tls
from shared.errors import EnrolmentFailed, WireError
from shared.protocol.enrolment import JoinAnswer, Joined, JoinRequest, Token, decode_json
from shared.protocol.topics import is_name
from shared.runtime.folder_lock import hold_lock
from shared.transport.base import Broker

_HOST = re.compile(r"[\x21-\x7e]{1,253}")

Prove = Callable[[Broker, Membership], Awaitable[str]]
"""Connects to the broker as a device, and leaves; returns why it is not let in, nothing where it is."""


@dataclass
class Join:
    """One board's joining.

    Attributes:
        token: What the operator gave.
        device: What the board is called by its own file; empty where that leaves it to the token.
        prove: Connects to the broker.
        say: Tells the operator how far it is.
    """

    token: Token
    state_dir: Path
    device: str
    clock: BoardClock
    prove: Prove
    say: Callable[[str], None] = lambda _line: None

    async def run(self) -> Membership:
        """Join; return what the board is now.

        Raises:
            EnrolmentFailed: It did not; see its code. The same again is no harm.
            ConfigError: This user may not write the folder.
            Unwritable: The disk takes nothing more.
        """
        identity = credentials.open_identity(self.state_dir)
        self.clock.folder = identity
        with hold_lock(identity):
            folder = credentials.open_set(identity, self._name(identity))
            gateway = Gateway(self.token.host, self.token.port, self.clock)
            await self._fetch_authority(gateway, folder)
            membership = credentials.read_membership(folder) or await self._enrol(gateway, folder)
            await self._prove(credentials.broker_of(folder, membership), membership)
            credentials.adopt(identity, folder)
            confirmation = Joined(token=self.token.id, secret=self.token.secret)
            await gateway.ask("/joined", confirmation, authority_tls(folder / CA))
            credentials.sweep(identity)
        return membership

    def _name(self, identity: Path) -> str:
        """Return the set's name: a token's own, or that in use where it is by this token that it came to be."""
        used = credentials.read_membership(identity / CURRENT)
        same = used is not None and used.token == self.token.id
        return (identity / CURRENT).readlink().name if same else f"join-{self.token.id}"

    async def _fetch_authority(self, gateway: Gateway, folder: Path) -> None:
        from device_agent.identity.certificates import trusted_chain  # noqa: PLC0415 - not for an idle agent

        begun = credentials.read_membership(folder)  # by this token; by now it may have moved to a next root
        root = bytes.fromhex(begun.root) if begun else self.token.root
        chain = trusted_chain(await gateway.fetch_unverified("/ca.pem"), root)
        credentials.keep(folder, CA, chain)
        self.say(f"the gateway at {gateway.host}:{gateway.port} has the CA that the token names")

    async def _enrol(self, gateway: Gateway, folder: Path) -> Membership:
        """Get a certificate for this board's key; the set is whole when its membership is on the disk, the last."""
        from device_agent.identity.certificates import check_certificate, make_request  # noqa: PLC0415 - as above

        key = _own_key(folder)
        request = JoinRequest(
            token=self.token.id,
            secret=self.token.secret,
            request=make_request(key, self.device),
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
        credentials.keep(folder, CERTIFICATE, answer.certificate.encode())
        credentials.keep(folder, MEMBERSHIP, msgspec.json.encode(membership))
        self.say(f"this board is {answer.device} of site {answer.site}, by its own key")
        return membership

    async def _prove(self, broker: Broker, membership: Membership) -> None:
        place = f"the broker at {broker.host}:{broker.port}"
        if refusal := await self.prove(broker, membership):
            what = f"the certificate is here, and {place} does not take it: {refusal}; join again by the same token"
            why = self.clock.explain()
            raise EnrolmentFailed(f"{what}{'; ' if why else ''}{why}", code=AWAY)
        self.say(f"{place} takes its certificate")


def _own_key(folder: Path) -> bytes:
    """Return this board's key: the one of the attempt before, to which the token may be bound, or a new one."""
    from device_agent.identity.certificates import is_key, make_key  # noqa: PLC0415 - as above

    path = folder / KEY
    if not path.is_file() or not is_key(path.read_bytes()):
        credentials.keep(folder, KEY, make_key())
    return path.read_bytes()


def _decode(body: bytes) -> JoinAnswer:
    try:
        answer = decode_json(body, JoinAnswer)
    except WireError as error:
        raise EnrolmentFailed(
            f"the gateway's answer cannot be read ({error}); is it of a newer version?", code=TOKEN
        ) from error
    is_place = _HOST.fullmatch(answer.broker_host) and 0 < answer.broker_port < 1 << 16
    if not is_name(answer.device) or not is_name(answer.site) or not is_place:
        what = "the gateway names this board, its site or its broker in a way that nothing here can use"
        raise EnrolmentFailed(what, code=TOKEN)
    return answer
