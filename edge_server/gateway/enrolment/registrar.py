"""What the enrolment service answers: a function of the request, the ledger and the clock; no network here.

Nothing is issued but in two ways: for a token whose secret came, to the one key that it is bound to and under the name
that it was made for; and anew to a key that has a certificate already, under the name in that one. The names in a
certificate request are not read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from edge_server.gateway.authority import Issued, read_request
from edge_server.gateway.enrolment.ledger import EnrolmentLedger
from edge_server.gateway.enrolment.rate_limit import RateLimit
from edge_server.gateway.enrolment.tokens import Alarm, KeptToken, find_token, is_alarming, judge_use, with_alarm
from shared.errors import WireError
from shared.protocol.enrolment import (
    JoinAnswer,
    Joined,
    JoinRequest,
    Moved,
    Reason,
    Refusal,
    RenewAnswer,
    RenewRequest,
    decode_json,
)

log = logging.getLogger(__name__)

LATE_S = 180 * 86_400.0
"""So long after its end a certificate is renewed for the same key without the operator."""
STATUS: Mapping[Reason, int] = {"busy": 429, "malformed": 400, "request": 400, "site": 503}
WORDS: Mapping[Reason, str] = {
    "unknown": "no such token, or it was changed on its way: copy it again, or have a new one made",
    "used": "this token was used already: have a new one made, and if no board of yours used it, withdraw that board",
    "expired": "this token has expired: have a new one made",
    "revoked": "the operator has withdrawn this: have a new token made",
    "device": "this token was made for a device of another name",
    "request": "the certificate request is not signed by a P-256 key of its own, or not by the one that is known",
    "approval": "the certificate expired too long ago: the operator must approve it (edge-server devices approve)",
    "busy": "too many attempts from this address or of this device: try again later",
    "malformed": "not a request that this service knows",
    "site": "the gateway's own files are not in order: see its log",
}
Body = TypeVar("Body")


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        method: `GET` or `POST`.
        path: Such as `/join`.
        peer: The certificate by which the connection is authenticated, DER; empty where there is none.
        range: What part of a file is wanted, as HTTP's header has it; empty for all.
    """

    method: str
    path: str
    body: bytes = b""
    source: str = ""
    peer: bytes = b""
    range: str = ""


@dataclass(frozen=True)
class Answer:
    """What is answered: status, kind of content, content, and seconds to wait."""

    status: int
    kind: str = "application/json"
    body: bytes = field(default=b"", repr=False)
    retry_s: float = 0.0


@dataclass(frozen=True)
class SiteFacts:
    """What boards are told of a site: its name, its CA certificates as PEM, and where its broker is."""

    name: str
    chain: bytes
    broker_host: str
    broker_port: int


@dataclass(frozen=True)
class Holder:
    """Who has certificates for a key.

    Attributes:
        not_after_utc_s: Until when the last of them is valid.
        revoked: Whether one of them was revoked, or the device may do nothing at all.
    """

    device: str
    not_after_utc_s: float
    revoked: bool


class _Refused(Exception):
    def __init__(self, reason: Reason, retry_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.retry_s = retry_s


@dataclass
class Registrar:
    """Answers requests.

    Attributes:
        site: Returns what boards are told.
        edit: Opens the ledger to be changed.
        issue: Signs a certificate for a public key (DER) under a device's name, and has it on record before it returns;
            None where the device or that key was revoked.
        find_holder: Returns who has a certificate for a public key, by the key's SHA-256, hexadecimal.
        is_denied: Tells whether a device was revoked, and not enrolled again since.
        utc_s: The gateway's time, calendar seconds.
        limit: How often an address may ask.
        renewals: How often a device may renew its certificate, whether it is granted or not.
    """

    site: Callable[[], SiteFacts]
    edit: Callable[[], AbstractContextManager[EnrolmentLedger]]
    issue: Callable[[bytes, str], Issued | None]
    find_holder: Callable[[str], Holder | None]
    is_denied: Callable[[str], bool]
    utc_s: Callable[[], float]
    limit: RateLimit
    renewals: RateLimit

    def answer(self, request: Request) -> Answer:
        """Answer a request, whatever it is."""
        if request.method == "GET" and request.path == "/ca.pem":
            return Answer(200, "application/x-pem-file", self.site().chain)
        deed = self._deeds().get(request.path) if request.method == "POST" else None
        if deed is None:
            return refusal("malformed", status=404)
        if wait_s := self.limit.wait_s(request.source):
            return refusal("busy", retry_s=wait_s)
        try:
            granted = deed(request)
        except _Refused as refused:
            return refusal(refused.reason, retry_s=refused.retry_s)
        self.limit.give_back(request.source)
        return Answer(200, body=msgspec.json.encode(granted))

    def _deeds(self) -> Mapping[str, Callable[[Request], msgspec.Struct | None]]:
        return {
            "/join": self._join,
            "/joined": self._close,
            "/moved": self._note_root,
            "/renew": self._renew,
            "/renew-expired": self._renew_expired,
        }

    def _join(self, request: Request) -> JoinAnswer:
        asked, now = _decode(request.body, JoinRequest), self.utc_s()
        with self.edit() as ledger:
            kept = find_token(ledger.tokens, asked.token, asked.secret)
            if kept is None:
                raise _Refused("unknown")
            public = _public_key(asked.request)
            key = _digest(public)
            if is_alarming(kept, key):
                ledger.tokens[asked.token] = with_alarm(kept, Alarm(utc_s=now, source=request.source, key=key))
                reason: Reason | None = "used"
            elif self.is_denied(kept.device):
                reason = "revoked"
            elif not (reason := judge_use(kept, asked.device, key, now)):
                ledger.tokens[asked.token] = kept = self._grant(kept, public, key)
        if is_alarming(kept, key):  # the ledger has it by now
            what = "token %s for %s was used again by another key, from %s: its secret is in a second hand"
            log.error(what, asked.token, kept.device, request.source)
        if reason:
            raise _Refused(reason)
        log.info("certificate for %s by token %s", kept.device, asked.token)
        return self._tell(kept)

    def _grant(self, kept: KeptToken, public: bytes, key: str) -> KeptToken:
        """Return a token bound to a key, with its certificate; the ledger has both before they are answered."""
        if kept.certificate:
            return kept
        issued = self._sign(public, kept.device)
        return replace(kept, key=key, certificate=issued.certificate.decode())

    def _tell(self, kept: KeptToken) -> JoinAnswer:
        site = self.site()
        return JoinAnswer(
            device=kept.device,
            site=site.name,
            certificate=kept.certificate,
            chain=site.chain.decode(),
            broker_host=site.broker_host,
            broker_port=site.broker_port,
        )

    def _close(self, request: Request) -> None:
        asked = _decode(request.body, Joined)
        with self.edit() as ledger:
            kept = find_token(ledger.tokens, asked.token, asked.secret)
            if kept is None or not kept.key:
                raise _Refused("unknown")
            if not kept.closed:
                log.info("%s has joined by token %s", kept.device, asked.token)
            ledger.tokens[asked.token] = replace(kept, closed=True, certificate="")
            if kept.root and not kept.closed:
                ledger.roots[kept.device] = kept.root

    def _note_root(self, request: Request) -> None:
        root, holder = _decode(request.body, Moved).root, self._holder(public_key_of(request.peer))
        with self.edit() as ledger:
            if ledger.roots.get(holder.device) != root:
                log.info("%s trusts the root %s", holder.device, root)
            ledger.roots[holder.device] = root

    def _renew(self, request: Request) -> RenewAnswer:
        public = _public_key(_decode(request.body, RenewRequest).request)
        if not request.peer or public != public_key_of(request.peer):
            raise _Refused("request")
        return self._reissue(public, self._holder(public))

    def _renew_expired(self, request: Request) -> RenewAnswer:
        public = _public_key(_decode(request.body, RenewRequest).request)
        holder, key = self._holder(public), _digest(public)
        with self.edit() as ledger:
            late = self.utc_s() - holder.not_after_utc_s > LATE_S and ledger.approved.get(holder.device) != key
            if late:
                ledger.pending[holder.device] = key
        if late:
            what = "%s asks to renew a certificate that ended long ago: `edge-server devices approve %s` lets it"
            log.warning(what, holder.device, holder.device)
            raise _Refused("approval")
        return self._reissue(public, holder)

    def _holder(self, public: bytes) -> Holder:
        holder = self.find_holder(_digest(public))
        if holder is None or holder.revoked:
            raise _Refused("revoked" if holder else "unknown")
        return holder

    def _sign(self, public: bytes, device: str) -> Issued:
        issued = self.issue(public, device)
        if issued is None:
            raise _Refused("revoked")
        return issued

    def _reissue(self, public: bytes, holder: Holder) -> RenewAnswer:
        if wait_s := self.renewals.wait_s(holder.device):
            raise _Refused("busy", wait_s)
        issued = self._sign(public, holder.device)
        with self.edit() as ledger:
            ledger.pending.pop(holder.device, None)
            ledger.approved.pop(holder.device, None)
        log.info("certificate of %s renewed", holder.device)
        return RenewAnswer(certificate=issued.certificate.decode(), chain=self.site().chain.decode())


def refusal(reason: Reason, *, status: int = 0, retry_s: float = 0.0) -> Answer:
    """Return the answer that refuses.

    Args:
        status: Of HTTP; 0 for the usual one.
        retry_s: After how many seconds to try again; 0 where that does not help.
    """
    told = Refusal(reason=reason, message=WORDS[reason], retry_s=round(retry_s, 1))
    return Answer(status or STATUS.get(reason, 403), body=msgspec.json.encode(told), retry_s=retry_s)


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return decode_json(body, kind)
    except WireError:
        raise _Refused("malformed") from None


def _public_key(request: str) -> bytes:
    try:
        return read_request(request.encode(errors="replace"))
    except WireError:
        raise _Refused("request") from None


def public_key_of(certificate: bytes) -> bytes:
    """Return the public key of a certificate (DER) as SubjectPublicKeyInfo in DER; nothing where it is none."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
        return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return b""


def _digest(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()
