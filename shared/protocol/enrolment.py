"""Enrolment protocol: one-time join tokens and HTTPS requests between board and gateway.

A token is one line of at most 140 characters. As with k3s and `kubeadm join`, it carries the hash of the CA: the board
verifies the CA before it sends the secret, so that a man in the middle learns nothing. Bodies are JSON (these structs)
in HTTP/1.1, one request per connection, at most `MOST_BODY` bytes.

GET  /ca.pem          the site's CA certificates, before any trust exists; the Date header is the gateway's time
POST /join            JoinRequest -> JoinAnswer     binds the token to the first key that presents its secret
POST /joined          Joined -> nothing             the certificate works: closes the token
POST /moved           TrustedRoot -> nothing        over mutual TLS: the root that the board trusts now
POST /renew           RenewRequest -> RenewAnswer   over mutual TLS with the old certificate
POST /renew-expired   RenewRequest -> RenewAnswer   request signed by the same key
GET  /install.sh, /packages/...                      files, see `edge_server.gateway.packages.download`

A refused request is answered by a Refusal with status 4xx.
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
"""Characters; a QR code of that many can still be scanned from a terminal."""
MOST_HEAD, MOST_BODY = 8 << 10, 32 << 10
MOST_HEADERS = 64
USUAL_PORT = 8443
SECRET_BYTES, DIGEST_BYTES = 16, 32

Reason: TypeAlias = Literal[
    "unknown", "used", "expired", "revoked", "device", "request", "approval", "busy", "malformed", "site"
]
"""Reasons of a refusal: unknown token or wrong secret; token bound to another key or closed; expired; withdrawn by the
operator (token or device); issued for another device name; invalid certificate request; expired so long ago that the
operator must approve; too many attempts; malformed request; faulty files of the gateway."""

Kind = TypeVar("Kind")

_FORM = "ff1"
_ID = re.compile(r"[a-z2-7]{6}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LINE = re.compile(rb"[\x20-\x7e]*")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True)
class Token:
    """One-time credentials for joining a site.

    Attributes:
        host: Host of the enrolment service, as in the gateway's certificate; an IPv6 address without brackets.
        root: SHA-256 of the root certificate's DER, 32 bytes.
        id: Public id, for listing and withdrawing.
        secret: 128 random bits, base64url.
    """

    host: str
    port: int
    root: bytes
    id: str
    secret: str = field(repr=False)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Board -> gateway: request a certificate.

    Attributes:
        request: PKCS #10, PEM, signed by the board's key; the names in it are not read.
        device: Device name from the board's own file; empty to use the token's.
    """

    token: str
    secret: str
    request: str
    device: str = ""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway -> board: certificate and site settings; newer gateways may add fields.

    Attributes:
        site: Name of the site.
        chain: The site's CA certificates, PEM.
        broker_host: Host of the site's broker.
    """

    device: str
    site: str
    certificate: str
    chain: str
    broker_host: str
    broker_port: int


class Joined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Board -> gateway: connected to the broker with the certificate; `token` and `secret` as in the JoinRequest."""

    token: str
    secret: str


class TrustedRoot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Board -> gateway: trusts the newest root, cross-signed by the previous one; `root` is its hex SHA-256 (DER)."""

    root: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Board -> gateway: request the next certificate; `request` is signed by the board's existing key."""

    request: str


class RenewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway -> board: the next certificate and the site's current CA certificates, which may have changed; PEM."""

    certificate: str
    chain: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway -> board: reason of a refusal, for programs and for people.

    Attributes:
        reason: One of `Reason`; a newer gateway may send another.
        retry_s: Seconds until a retry makes sense; 0 for never.
    """

    reason: str
    message: str = ""
    retry_s: float = 0.0


def decode_json(data: bytes, kind: type[Kind]) -> Kind:
    """Decode a JSON body.

    Raises:
        WireError: It is not valid JSON of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {error}", reason="malformed") from error


def new_secret() -> tuple[str, str]:
    """Generate the id and the secret of a new token."""
    return (
        base64.b32encode(secrets.token_bytes(4)).decode().lower()[:6],
        _encode_base64url(secrets.token_bytes(SECRET_BYTES)),
    )


def format_token(token: Token) -> str:
    """Format a token as the line that people copy.

    Raises:
        ConfigError: The address is invalid, or too long for a token.
    """
    host = f"[{token.host}]" if ":" in token.host else token.host
    line = f"{_FORM},{host}:{token.port},{_encode_base64url(token.root)},{token.id},{token.secret}"
    if len(line) > MOST_TOKEN:
        raise ConfigError(f"{token.host}: too long for a token of {MOST_TOKEN} characters; use an IP address")
    parse_token(line)
    return line


def parse_token(line: str) -> Token:
    """Parse a token.

    Raises:
        ConfigError: It is invalid; the message repeats nothing of it, since it is a secret.
    """
    form, _, fields = line.strip().partition(",")
    if form != _FORM or len(line.strip()) > MOST_TOKEN:
        raise ConfigError("the token is not of this kind: copy the whole line, which begins with `ff1,`")
    parts = fields.split(",")
    if len(parts) != len(("address", "root", "id", "secret")):
        raise ConfigError("the token is incomplete: copy the line from `ff1,` to its end")
    address, root, name, secret = parts
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not _PORT.fullmatch(port) or int(port) >= 1 << 16:
        raise ConfigError("the token has no valid gateway address: copy the line again")
    digest = _decode_base64url(root, DIGEST_BYTES)
    if not digest or not _ID.fullmatch(name) or not _decode_base64url(secret, SECRET_BYTES):
        raise ConfigError("the token is damaged: copy the line again")
    return Token(host.strip("[]"), int(port), digest, name, secret)


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return _HOST.fullmatch(text) is not None
    try:
        IPv6Address(text[1:-1])
    except ValueError:
        return False
    return text.endswith("]") and "%" not in text


def _encode_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode_base64url(text: str, length: int) -> bytes:
    """Decode canonical base64url without padding; empty for any other text or length."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""
    return data if len(data) == length and _encode_base64url(data) == text else b""


def parse_head(head: bytes) -> tuple[str, Mapping[str, str]]:
    """Parse the head of an HTTP message; return its first line and the headers by lower-case names (RFC 9112).

    Args:
        head: Everything up to and including the empty line.

    Raises:
        WireError: It is too long, not printable ASCII, or a header is malformed or repeated.
    """
    if len(head) > MOST_HEAD or not head.endswith(b"\r\n\r\n"):
        raise WireError(f"a head of {len(head)} bytes", reason="malformed")
    first, *lines = head[:-4].split(b"\r\n")
    if len(lines) > MOST_HEADERS or not all(_LINE.fullmatch(line) for line in (first, *lines)):
        raise WireError("not the head of an HTTP message", reason="malformed")
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line.decode("ascii"))
        if not match or match[1].lower() in headers:
            raise WireError(f"HTTP header {line[:80]!r} is malformed or repeated", reason="malformed")
        headers[match[1].lower()] = match[2]
    return first.decode("ascii"), headers


def body_length(headers: Mapping[str, str]) -> int:
    """Return the number of bytes that follow a head.

    Raises:
        WireError: The length is invalid or above `MOST_BODY`, or the body is chunked.
    """
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not re.fullmatch(r"[0-9]{1,6}", length) or int(length) > MOST_BODY:
        raise WireError("a body without an acceptable length", reason="malformed")
    return int(length)


def http_date(utc_s: float) -> str:
    """Format calendar seconds as HTTP's Date header (RFC 9110, section 5.6.7)."""
    from email.utils import formatdate  # noqa: PLC0415 - not needed by an idle agent

    return formatdate(utc_s, usegmt=True)


def parse_http_date(text: str) -> float | None:
    """Parse a Date header to calendar seconds; None for any other text."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - not needed by an idle agent

    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
