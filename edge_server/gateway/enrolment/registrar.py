"""Enrolment requests and their answers, as a function of request, ledger and clock.

Certificates are issued in two cases only: for a token with its secret, to the key that the token is bound to and under
the name it was made for; and again to a key that already has a certificate, under the name in that one. The names in a
certificate request are ignored.
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

from edge_server.gateway.authority import IssuedCertificate, read_request
from edge_server.gateway.enrolment.ledger import EnrolmentLedger
from edge_server.gateway.enrolment.rate_limit import RateLimit
from edge_server.gateway.enrolment.tokens import Alarm, TokenRecord, find_token, is_reuse, refusal_reason, with_alarm
from shared.errors import WireError
from shared.protocol.enrolment import (
    JoinAnswer,
    Joined,
    JoinRequest,
    Reason,
    Refusal,
    RenewAnswer,
    RenewRequest,
    TrustedRoot,
    decode_json,
)

log = logging.getLogger(__name__)

LATE_S = 180 * 86_400.0
"""A certificate that expired less than this long ago is renewed for the same key without the operator."""
STATUS: Mapping[Reason, int] = {"busy": 429, "malformed": 400, "request": 400, "site": 503}
MESSAGES: Mapping[Reason, str] = {
    "unknown": "unknown token, or it was damaged in transit: copy it again, or ask the operator for a new one",
    "used": "this token was used already: ask for a new one; if no board of yours used it, revoke that board",
    "expired": "this token has expired: ask the operator for a new one",
    "revoked": "the operator has revoked this: ask for a new token",
    "device": "this token was made for a device of another name",
    "request": "the certificate request is not signed by its P-256 key, or by another key than the one on record",
    "approval": "the certificate expired too long ago: have its renewal approved (edge-server devices approve)",
    "busy": "too many attempts from this address or by this device: try again later",
    "malformed": "unknown or malformed request",
    "site": "the gateway's files are faulty: see its log",
}
Body = TypeVar("Body")


@dataclass(frozen=True)
class Request:
    """An HTTP request.

    Attributes:
        method: HTTP method; only `GET` and `POST` are answered.
        path: Absolute path, for example `/join`.
        peer: Client certificate of the connection, DER; empty if there is none.
        range: Value of the Range header; empty for the entire file.
    """

    method: str
    path: str
    body: bytes = b""
    source: str = ""
    peer: bytes = b""
    range: str = ""


@dataclass(frozen=True)
class Answer:
    """An HTTP response: status, content type, content, and seconds until a retry may help."""

    status: int
    kind: str = "application/json"
    body: bytes = field(default=b"", repr=False)
    retry_s: float = 0.0


@dataclass(frozen=True)
class SiteInfo:
    """Facts of a site for its boards: name, CA certificates (PEM), broker address."""

    name: str
    chain: bytes
    broker_host: str
    broker_port: int


@dataclass(frozen=True)
class Holder:
    """Device that holds certificates for a key.

    Attributes:
        not_after_utc_s: End of validity of the latest one, calendar seconds.
        revoked: One of them was revoked, or the device has no right at all.
    """

    device: str
    not_after_utc_s: float
    revoked: bool


class _RequestRefused(Exception):
    def __init__(self, reason: Reason, retry_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.retry_s = retry_s


@dataclass
class Registrar:
    """Answers enrolment requests.

    Attributes:
        site: Return the site's facts.
        edit: Open the ledger for changes.
        issue: Sign and record a certificate for a public key (DER) and a device's name; None where the device or that
            key was revoked.
        find_holder: Return the holder of a certificate for a public key, by the key's SHA-256, hexadecimal.
        is_denied: Return whether a device was revoked and not enrolled again.
        utc_s: Gateway's clock, calendar seconds.
        limit: Rate limit per address.
        renewals: Rate limit of renewals per device, granted or not.
    """

    site: Callable[[], SiteInfo]
    edit: Callable[[], AbstractContextManager[EnrolmentLedger]]
    issue: Callable[[bytes, str], IssuedCertificate | None]
    find_holder: Callable[[str], Holder | None]
    is_denied: Callable[[str], bool]
    utc_s: Callable[[], float]
    limit: RateLimit
    renewals: RateLimit

    def answer(self, request: Request) -> Answer:
        """Answer any request."""
        if request.method == "GET" and request.path == "/ca.pem":
            return Answer(200, "application/x-pem-file", self.site().chain)
        deed = self._handlers().get(request.path) if request.method == "POST" else None
        if deed is None:
            return refusal("malformed", status=404)
        if wait_s := self.limit.wait_s(request.source):
            return refusal("busy", retry_s=wait_s)
        try:
            granted = deed(request)
        except _RequestRefused as refused:
            return refusal(refused.reason, retry_s=refused.retry_s)
        self.limit.give_back(request.source)
        return Answer(200, body=msgspec.json.encode(granted))

    def _handlers(self) -> Mapping[str, Callable[[Request], msgspec.Struct | None]]:
        return {
            "/join": self._join,
            "/joined": self._confirm_join,
            "/moved": self._record_root,
            "/renew": self._renew,
            "/renew-expired": self._renew_expired,
        }

    def _join(self, request: Request) -> JoinAnswer:
        message, now = _decode(request.body, JoinRequest), self.utc_s()
        with self.edit() as ledger:
            record = find_token(ledger.tokens, message.token, message.secret)
            if record is None:
                raise _RequestRefused("unknown")
            public = _public_key(message.request)
            key = _digest(public)
            if is_reuse(record, key):
                ledger.tokens[message.token] = with_alarm(record, Alarm(utc_s=now, source=request.source, key=key))
                reason: Reason | None = "used"
            elif self.is_denied(record.device):
                reason = "revoked"
            elif not (reason := refusal_reason(record, message.device, key, now)):
                ledger.tokens[message.token] = record = self._grant(record, public, key)
        if is_reuse(record, key):  # recorded in the ledger by now
            what = "token %s for %s was used again by another key, from %s: somebody else knows its secret"
            log.error(what, message.token, record.device, request.source)
        if reason:
            raise _RequestRefused(reason)
        log.info("certificate for %s by token %s", record.device, message.token)
        return self._join_answer(record)

    def _grant(self, record: TokenRecord, public: bytes, key: str) -> TokenRecord:
        """Return a token bound to a key, with its certificate; both are recorded before the answer is sent."""
        if record.certificate:
            return record
        issued = self._sign(public, record.device)
        return replace(record, key=key, certificate=issued.certificate.decode())

    def _join_answer(self, record: TokenRecord) -> JoinAnswer:
        site = self.site()
        return JoinAnswer(
            device=record.device,
            site=site.name,
            certificate=record.certificate,
            chain=site.chain.decode(),
            broker_host=site.broker_host,
            broker_port=site.broker_port,
        )

    def _confirm_join(self, request: Request) -> None:
        message = _decode(request.body, Joined)
        with self.edit() as ledger:
            record = find_token(ledger.tokens, message.token, message.secret)
            if record is None or not record.key:
                raise _RequestRefused("unknown")
            if not record.closed:
                log.info("%s has joined by token %s", record.device, message.token)
            ledger.tokens[message.token] = replace(record, closed=True, certificate="")
            if record.root and not record.closed:
                ledger.roots[record.device] = record.root

    def _record_root(self, request: Request) -> None:
        root, holder = _decode(request.body, TrustedRoot).root, self._holder(public_key_of(request.peer))
        with self.edit() as ledger:
            if ledger.roots.get(holder.device) != root:
                log.info("%s trusts the root %s", holder.device, root)
            ledger.roots[holder.device] = root

    def _renew(self, request: Request) -> RenewAnswer:
        public = _public_key(_decode(request.body, RenewRequest).request)
        if not request.peer or public != public_key_of(request.peer):
            raise _RequestRefused("request")
        return self._reissue(public, self._holder(public))

    def _renew_expired(self, request: Request) -> RenewAnswer:
        public = _public_key(_decode(request.body, RenewRequest).request)
        holder, key = self._holder(public), _digest(public)
        with self.edit() as ledger:
            late = self.utc_s() - holder.not_after_utc_s > LATE_S and ledger.approved.get(holder.device) != key
            if late:
                ledger.pending[holder.device] = key
        if late:
            what = "%s wants to renew a certificate that expired long ago; to allow it: edge-server devices approve %s"
            log.warning(what, holder.device, holder.device)
            raise _RequestRefused("approval")
        return self._reissue(public, holder)

    def is_board(self, certificate: bytes) -> bool:
        """Check that a client certificate (DER) is that of a device that has not been revoked."""
        holder = self.find_holder(_digest(public_key_of(certificate)))
        return holder is not None and not holder.revoked

    def _holder(self, public: bytes) -> Holder:
        holder = self.find_holder(_digest(public))
        if holder is None or holder.revoked:
            raise _RequestRefused("revoked" if holder else "unknown")
        return holder

    def _sign(self, public: bytes, device: str) -> IssuedCertificate:
        issued = self.issue(public, device)
        if issued is None:
            raise _RequestRefused("revoked")
        return issued

    def _reissue(self, public: bytes, holder: Holder) -> RenewAnswer:
        if wait_s := self.renewals.wait_s(holder.device):
            raise _RequestRefused("busy", wait_s)
        issued = self._sign(public, holder.device)
        with self.edit() as ledger:
            ledger.pending.pop(holder.device, None)
            ledger.approved.pop(holder.device, None)
        log.info("certificate of %s renewed", holder.device)
        return RenewAnswer(certificate=issued.certificate.decode(), chain=self.site().chain.decode())


def refusal(reason: Reason, *, status: int = 0, retry_s: float = 0.0) -> Answer:
    """Return the answer for a refused request.

    Args:
        status: HTTP status; 0 for the reason's default.
        retry_s: Seconds until a retry; 0 where it does not help.
    """
    message = Refusal(reason=reason, message=MESSAGES[reason], retry_s=round(retry_s, 1))
    return Answer(status or STATUS.get(reason, 403), body=msgspec.json.encode(message), retry_s=retry_s)


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return decode_json(body, kind)
    except WireError:
        raise _RequestRefused("malformed") from None


def _public_key(request: str) -> bytes:
    try:
        return read_request(request.encode(errors="replace"))
    except WireError:
        raise _RequestRefused("request") from None


def public_key_of(certificate: bytes) -> bytes:
    """Return the public key of a certificate (DER), as SubjectPublicKeyInfo in DER; empty if it is malformed."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
        return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return b""


def _digest(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()
