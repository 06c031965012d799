"""How a board joins a site: the one-time token, and what board and gateway say to each other over HTTPS.

A token is one line of at most 140 characters, the form after those of k3s and `kubeadm join`, which carry the hash of
the CA too: the board compares it before it shows the secret, so that nobody between the two learns anything.
What is said is JSON (these structs) in HTTP/1.1, one request a connection, bodies of at most `MOST_BODY` bytes.

GET  /ca.pem          the site's CA certificates, before anything is trusted; with its Date, the gateway's time
POST /join            JoinRequest -> JoinAnswer     the first key that comes with a token's secret is bound to it
POST /joined          Joined -> nothing             the board has proven its certificate: the token is closed
POST /moved           Moved -> nothing              over such a connection: the root that the board trusts by now
POST /renew           RenewRequest -> RenewAnswer   over a connection that the certificate to be renewed authenticates
POST /renew-expired   RenewRequest -> RenewAnswer   by a request that the same key signed
GET  /install.sh, /packages/...                      files, see `edge_server.gateway.packages.download`

Whatever is refused is answered by a Refusal, status 4xx.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from shared.errors import ConfigError, WireError

MOST_TOKEN = 140
"""Characters; a QR code of that many is still read off a terminal."""
MOST_HEAD, MOST_BODY = 8 << 10, 32 << 10
MOST_HEADERS = 64
USUAL_PORT = 8443
SECRET_BYTES, DIGEST_BYTES = 16, 32

Reason: TypeAlias = Literal[
    "unknown", "used", "expired", "revoked", "device", "request", "approval", "busy", "malformed", "site"
]
"""Why the gateway refuses: no such token or a wrong secret; bound to another key or closed; past its time; withdrawn by
the operator (the token, or the device); made for a device of another name; the certificate request is none; expired so
long ago that the operator must approve it; too many attempts; nothing that the protocol knows; the gateway's own files
are not in order."""

Kind = TypeVar("Kind")

_FORM = "ff1"
_ID = re.compile(r"[a-z2-7]{6}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LINE = re.compile(rb"[\x20-\x7e]*")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True)
class Token:
    """What a board needs to join, once.

    Attributes:
        host: Of the enrolment service, as the gateway's certificate names it; an IPv6 address without brackets.
        root: SHA-256 of the root certificate's DER, 32 bytes.
        id: By which it is listed and withdrawn; no secret.
        secret: 128 random bits, base64url.
    """

    host: str
    port: int
    root: bytes
    id: str
    secret: str = field(repr=False)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board asks for its certificate.

    Attributes:
        request: PKCS #10, PEM, signed by the board's key; the names in it are not read.
        device: What the board is called by its own file; empty where that leaves it to the token.
    """

    token: str
    secret: str
    request: str
    device: str = ""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a board gets; newer gateways may say more.

    Attributes:
        site: Of which it is a part now.
        chain: The site's CA certificates, PEM.
        broker_host: Where the site's broker is.
    """

    device: str
    site: str
    certificate: str
    chain: str
    broker_host: str
    broker_port: int


class Joined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board has connected to the broker by its certificate; `token` and `secret` as before."""

    token: str
    secret: str


class Moved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board trusts the newest root, for which the one before vouched; `root` is its DER's SHA-256, hexadecimal."""

    root: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A board asks for its next certificate; `request` is signed by the key that it has."""

    request: str


class RenewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The next certificate, and the site's CA certificates, which may be others by now; both PEM."""

    certificate: str
    chain: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why the gateway refuses, for programs, and in words.

    Attributes:
        reason: One of `Reason`; of a newer gateway perhaps another.
        retry_s: Seconds after which to try again; 0 where it does not help.
    """

    reason: str
    message: str = ""
    retry_s: float = 0.0


def decode_json(data: bytes, kind: type[Kind]) -> Kind:
    """Return what a body says.

    Raises:
        WireError: It is none, or says something else.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {error}", reason="malformed") from error


def new_secret() -> tuple[str, str]:
    """Return the id and the secret of a new token."""
    return (
        base64.b32encode(secrets.token_bytes(4)).decode().lower()[:6],
        _unpadded(secrets.token_bytes(SECRET_BYTES)),
    )


def format_token(token: Token) -> str:
    """Return a token as the line that people copy.

    Raises:
        ConfigError: The address is none, or too long for a token.
    """
    host = f"[{token.host}]" if ":" in token.host else token.host
    line = f"{_FORM},{host}:{token.port},{_unpadded(token.root)},{token.id},{token.secret}"
    if len(line) > MOST_TOKEN:
        raise ConfigError(f"{token.host}: too long for a token of {MOST_TOKEN} characters; use an IP address")
    parse_token(line)
    return line


def parse_token(line: str) -> Token:
    """Return what a token says.

    Raises:
        ConfigError: It is none; the message repeats nothing of it, since it is a secret.
    """
    form, _, rest = line.strip().partition(",")
    if form != _FORM or len(line.strip()) > MOST_TOKEN:
        raise ConfigError("the token is none of this kind: copy the whole line, which begins with `ff1,`")
    parts = rest.split(",")
    if len(parts) != len(("address", "root", "id", "secret")):
        raise ConfigError("the token is not whole: copy the line from `ff1,` to its end")
    address, root, name, secret = parts
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not _PORT.fullmatch(port) or int(port) >= 1 << 16:
        raise ConfigError("the token names no address of a gateway: copy the line again")
    digest = _bytes(root, DIGEST_BYTES)
    if not digest or not _ID.fullmatch(name) or not _bytes(secret, SECRET_BYTES):
        raise ConfigError("the token was changed on its way: copy the line again")
    return Token(host.strip("[]"), int(port), digest, name, secret)


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return _HOST.fullmatch(text) is not None
    try:
        IPv6Address(text[1:-1])
    except ValueError:
        return False
    return text.endswith("]") and "%" not in text


def _unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str, length: int) -> bytes:
    """Return what base64url without padding stands for if it is written in the one way there is; else nothing."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""
    return data if len(data) == length and _unpadded(data) == text else b""


def parse_head(head: bytes) -> tuple[str, Mapping[str, str]]:
    """Return the first line of an HTTP message and its headers, by names in small letters (RFC 9112).

    Args:
        head: Up to the empty line, that included.

    Raises:
        WireError: It is too long, not of printable ASCII, or a header is none or there twice.
    """
    if len(head) > MOST_HEAD or not head.endswith(b"\r\n\r\n"):
        raise WireError(f"a head of {len(head)} bytes", reason="malformed")
    first, *rest = head[:-4].split(b"\r\n")
    if len(rest) > MOST_HEADERS or not all(_LINE.fullmatch(line) for line in (first, *rest)):
        raise WireError("not the head of an HTTP message", reason="malformed")
    headers: dict[str, str] = {}
    for line in rest:
        found = _HEADER.fullmatch(line.decode("ascii"))
        if not found or found[1].lower() in headers:
            raise WireError("a header of HTTP is none, or there twice", reason="malformed")
        headers[found[1].lower()] = found[2]
    return first.decode("ascii"), headers


def body_length(headers: Mapping[str, str]) -> int:
    """Return how many bytes follow a head.

    Raises:
        WireError: The length is none, more than `MOST_BODY`, or the body comes in another way than by length.
    """
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not re.fullmatch(r"[0-9]{1,6}", length) or int(length) > MOST_BODY:
        raise WireError("a body without a length that is taken", reason="malformed")
    return int(length)


def http_date(utc_s: float) -> str:
    """Return calendar seconds as HTTP's Date header writes them (RFC 9110, section 5.6.7)."""
    from email.utils import formatdate  # noqa: PLC0415 - an idle agent has no use for it

    return formatdate(utc_s, usegmt=True)


def parse_http_date(text: str) -> float | None:
    """Return calendar seconds of a Date header; None for any other text."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - as above

    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
