"""One-time enrolment tokens: record, permitted use, and detection of reuse.

A token is good for one name and one key: the first key that comes with its secret is bound to it, so that only a board
whose join was interrupted may ask again. Only a digest of the secret is stored; SHA-256 is enough for 128 random bits,
which nobody can guess.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from shared.protocol.enrolment import Reason, Token, new_secret

MOST_ALARMS, ALARM_EVERY_S = 8, 3600.0
"""Per token, and per other key: more of the same adds no information."""
MOST_TTL_S = 30 * 86_400.0
LISTED_S = 90 * 86_400.0
"""A token is listed for so long after its end, to see who used it."""

State: TypeAlias = Literal["open", "bound", "closed", "revoked", "expired"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A use of a token by another key than the one it is bound to.

    Attributes:
        key: SHA-256 of that other public key, hexadecimal.
    """

    utc_s: float
    source: str
    key: str


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A token on record at the gateway.

    Attributes:
        device: Name of the device that it is for.
        digest: SHA-256 of the secret, hexadecimal.
        made_utc_s: Time of creation, calendar seconds.
        expires_utc_s: End of use, calendar seconds.
        key: SHA-256 of the public key that it is bound to, hexadecimal; empty until it is used.
        closed: The board has proved that it has its certificate.
        revoked: The operator withdrew it.
        certificate: Issued certificate, PEM, until the token is closed: the board may ask for it again.
        alarms: Uses by other keys.
        root: SHA-256 of the root certificate in the token, hexadecimal; empty if unknown.
    """

    device: str
    digest: str
    made_utc_s: float
    expires_utc_s: float
    key: str = ""
    closed: bool = False
    revoked: bool = False
    certificate: str = ""
    alarms: tuple[Alarm, ...] = ()
    root: str = ""

    def state(self, now_utc_s: float) -> State:
        """Return its state; a bound token counts as bound until it expires."""
        if self.revoked or self.closed:
            return "revoked" if self.revoked else "closed"
        if now_utc_s >= self.expires_utc_s:
            return "expired"
        return "bound" if self.key else "open"


Tokens: TypeAlias = Mapping[str, TokenRecord]
"""Records by token id."""


@dataclass(frozen=True)
class EnrolmentEndpoint:
    """Host and port of an enrolment service, and the SHA-256 of the site's root certificate (DER)."""

    host: str
    port: int
    root: bytes


def make_token(device: str, endpoint: EnrolmentEndpoint, ttl_s: float, now_utc_s: float) -> tuple[Token, TokenRecord]:
    """Return a new token and its record.

    Args:
        ttl_s: Seconds until it expires.
    """
    name, secret = new_secret()
    record = TokenRecord(
        device=device,
        digest=secret_digest(secret),
        made_utc_s=now_utc_s,
        expires_utc_s=now_utc_s + min(ttl_s, MOST_TTL_S),
        root=endpoint.root.hex(),
    )
    return Token(endpoint.host, endpoint.port, endpoint.root, name, secret), record


def secret_digest(secret: str) -> str:
    """Return the digest by which a secret is stored."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def find_token(tokens: Tokens, name: str, secret: str) -> TokenRecord | None:
    """Return the record of a token if the secret is right, in constant time."""
    record = tokens.get(name)
    is_right = hmac.compare_digest(secret_digest(secret), record.digest if record else "0" * 64)
    return record if is_right else None


def refusal_reason(record: TokenRecord, device: str, key: str, now_utc_s: float) -> Reason | None:
    """Return the reason why a token, whose secret was right, cannot be used; None if it can.

    Args:
        device: Name that the board claims; empty to accept the token's.
        key: SHA-256 of its public key, hexadecimal.
    """
    if record.revoked:
        return "revoked"
    if record.closed or (record.key and not hmac.compare_digest(record.key, key)):
        return "used"
    if now_utc_s >= record.expires_utc_s:
        return "expired"
    return "device" if device and device != record.device else None


def is_reuse(record: TokenRecord, key: str) -> bool:
    """Check whether a use of a token shows that somebody else knows its secret."""
    return bool(record.key) and not hmac.compare_digest(record.key, key)


def with_alarm(record: TokenRecord, alarm: Alarm) -> TokenRecord:
    """Return a record with one more alarm, up to a limit, and at most one per hour and key."""
    recent = [other for other in record.alarms if other.key == alarm.key and alarm.utc_s - other.utc_s < ALARM_EVERY_S]
    if recent or len(record.alarms) >= MOST_ALARMS:
        return record
    return replace(record, alarms=(*record.alarms, alarm))


def revoke_earlier_tokens(tokens: Tokens, device: str) -> dict[str, TokenRecord]:
    """Return records in which a device's earlier open tokens are revoked."""
    return {
        name: replace(record, revoked=True) if record.device == device and not record.closed else record
        for name, record in tokens.items()
    }


def drop_old_tokens(tokens: Tokens, now_utc_s: float) -> dict[str, TokenRecord]:
    """Return records without those that expired long ago."""
    return {name: record for name, record in tokens.items() if now_utc_s - record.expires_utc_s < LISTED_S}
