"""One-time tokens: what is kept of them, who may use one, and what a second use is.

A token is good for one name and one key: the first key that comes with its secret is bound to it, so that a board whose
join was interrupted may ask again, and nobody else may. Only a digest of the secret is kept; of 128 random bits SHA-256
is enough, since there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from shared.protocol.enrolment import Reason, Token, new_secret

MOST_ALARMS, ALARM_EVERY_S = 8, 3600.0
"""Of one token, and of one key: more of the same tells nobody more."""
MOST_TTL_S = 30 * 86_400.0
KEPT_S = 90 * 86_400.0
"""After its end a token is listed for so long, for whoever asks who used it."""

State: TypeAlias = Literal["open", "bound", "closed", "revoked", "expired"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A token was used by another key than the one it is bound to.

    Attributes:
        key: SHA-256 of that other public key, hexadecimal.
    """

    utc_s: float
    source: str
    key: str


class KeptToken(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway keeps of a token.

    Attributes:
        device: For whom it was made.
        digest: SHA-256 of the secret, hexadecimal.
        made_utc_s: When it was made.
        expires_utc_s: Until when it can be used.
        key: SHA-256 of the public key that it is bound to, hexadecimal; empty as long as nobody used it.
        closed: Whether the board has proven its certificate.
        revoked: Whether the operator withdrew it.
        certificate: What the board was given, PEM, until it is closed: asked again, it gets the same.
        alarms: Uses by other keys.
        root: SHA-256 of the root certificate that it names, hexadecimal; empty where that was not kept.
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
        """Return what has become of it; one that is bound is told as such until it expires."""
        if self.revoked or self.closed:
            return "revoked" if self.revoked else "closed"
        if now_utc_s >= self.expires_utc_s:
            return "expired"
        return "bound" if self.key else "open"


Tokens: TypeAlias = Mapping[str, KeptToken]
"""By their ids."""


def make_token(device: str, place: tuple[str, int, bytes], ttl_s: float, now_utc_s: float) -> tuple[Token, KeptToken]:
    """Return a new token and what is kept of it.

    Args:
        place: Host and port of the enrolment service, and the root certificate's digest.
        ttl_s: How long it can be used.
    """
    name, secret = new_secret()
    kept = KeptToken(
        device=device,
        digest=digest_of(secret),
        made_utc_s=now_utc_s,
        expires_utc_s=now_utc_s + min(ttl_s, MOST_TTL_S),
        root=place[2].hex(),
    )
    return Token(*place, name, secret), kept


def digest_of(secret: str) -> str:
    """Return what is kept of a secret."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


_NOBODYS = KeptToken(device="", digest="0" * 64, made_utc_s=0.0, expires_utc_s=0.0)


def find_token(tokens: Tokens, name: str, secret: str) -> KeptToken | None:
    """Return the token of an id if the secret is its; in a time that does not depend on how much of it is right.

    Args:
        tokens: All that are kept.
        secret: What came with it.
    """
    kept = tokens.get(name, _NOBODYS)
    is_right = hmac.compare_digest(digest_of(secret), kept.digest)
    return kept if is_right and kept is not _NOBODYS else None


def judge_use(kept: KeptToken, device: str, key: str, now_utc_s: float) -> Reason | None:
    """Return why a token whose secret was right cannot be used; None if it can.

    Args:
        device: What the board says it is called; empty if it leaves that to the token.
        key: SHA-256 of its public key, hexadecimal.
    """
    if kept.revoked:
        return "revoked"
    if kept.closed or (kept.key and not hmac.compare_digest(kept.key, key)):
        return "used"
    if now_utc_s >= kept.expires_utc_s:
        return "expired"
    return "device" if device and device != kept.device else None


def is_alarming(kept: KeptToken, key: str) -> bool:
    """Tell whether a use of a token shows that its secret is in a second hand."""
    return bool(kept.key) and not hmac.compare_digest(kept.key, key)


def with_alarm(kept: KeptToken, alarm: Alarm) -> KeptToken:
    """Return a token with an alarm more; the first ones are kept, and one an hour of a key is enough."""
    told = [one for one in kept.alarms if one.key == alarm.key and alarm.utc_s - one.utc_s < ALARM_EVERY_S]
    if told or len(kept.alarms) >= MOST_ALARMS:
        return kept
    return replace(kept, alarms=(*kept.alarms, alarm))


def without_earlier(tokens: Tokens, device: str) -> dict[str, KeptToken]:
    """Return tokens of which none that was made for a device before can be used any more."""
    return {
        name: replace(one, revoked=True) if one.device == device and not one.closed else one
        for name, one in tokens.items()
    }


def without_old(tokens: Tokens, now_utc_s: float) -> dict[str, KeptToken]:
    """Return tokens without those whose end nobody asks about any more."""
    return {name: one for name, one in tokens.items() if now_utc_s - one.expires_utc_s < KEPT_S}
