"""Mutual TLS with the broker: contexts, handshake, and explanations of failures.

Certificates are read again for every connection, so that a renewed pair is used without a restart. Their dates are
checked by this machine's clock; where it is not reliable yet, on a board without a battery-backed clock, dates alone
are not checked: chain and name still are (X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h, which Python has no name
for).
"""

from __future__ import annotations

import select
import socket
import ssl
import stat
from pathlib import Path

import msgspec

from shared.errors import Unreachable, Untrusted
from shared.runtime.clock import monotonic, utc_stamp
from shared.transport.refusals import MAY_BE_FULL

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME."""
UNSAFE_MODE = stat.S_IRWXO | stat.S_IWGRP
"""Mode bits that a secret's file must not have."""

NOT_YET_VALID, EXPIRED, OTHER_NAME, OTHER_ADDRESS = 9, 10, 62, 64
WRONG_PURPOSE = 26
"""X509_V_ERR_* of OpenSSL's x509_vfy.h; nearly all others mean that the chain does not end at our CA."""

HUNG_UP = (
    "it hung up in the TLS handshake: it does not use TLS on this port, or does not accept our certificate; its log "
    f"has the reason; {MAY_BE_FULL}"
)
NO_TLS = "that port does not use TLS: set `port` to that of the TLS listener, or remove `tls` from [broker]"
ALERTS = {
    "CERTIFICATE_EXPIRED": "our certificate {cert} has expired, or is not valid yet, by the broker's clock: renew it, "
    "or set the clock of the broker's machine",
    "CERTIFICATE_REVOKED": "our certificate {cert} is revoked there: enrol this machine again",
    "UNKNOWN_CA": "our certificate {cert} is of a CA that the broker does not know: use one of its own site's CA",
    "CERTIFICATE_REQUIRED": "the broker wants a certificate: set `cert` and `key` of [broker] tls",
    "HANDSHAKE_FAILURE": "the broker refuses our parameters, perhaps because it wants a certificate: set `cert` and "
    "`key` of [broker] tls",
    "PROTOCOL_VERSION": "the broker does not support TLS 1.2 or newer: set `tls_version` there, or update it",
    "BAD_CERTIFICATE": "the broker cannot use our certificate {cert}: use one that its CA signed for a client",
    "CERTIFICATE_UNKNOWN": "the broker does not accept our certificate {cert}: use one of its own site's CA",
    "ACCESS_DENIED": "the broker denies access to our certificate {cert}: allow it there",
    "DECRYPT_ERROR": "the broker could not check our certificate {cert}: use one of its own site's CA",
}
"""Remedy for each alert of the broker, by the end of OpenSSL's name for it."""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates for the connection to a broker. Relative paths are relative to the file's folder.

    Attributes:
        ca: CA certificates of the broker's certificate, PEM; empty for those that this system trusts.
        cert: Our certificate, PEM, with intermediates; empty where the broker wants none.
        key: Its private key, PEM, readable only by its owner.
        server_name: Name or address in the broker's certificate, where that is not `host`.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        """Refuse a certificate without a key, or a key without a certificate."""
        if bool(self.cert) != bool(self.key):
            present, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise ValueError(f"{present} is set without {lacking}: a certificate and its key go together")


def resolve_tls_paths(tls: TlsSettings, folder: Path) -> TlsSettings:
    """Resolve the paths against a folder."""
    paths = {name: str(folder / path) for name in ("ca", "cert", "key") if (path := getattr(tls, name))}
    return msgspec.structs.replace(tls, **paths)


def build_context(tls: TlsSettings, *, dates: bool) -> ssl.SSLContext:
    """Build the context of a connection: TLS 1.2 at least, chain and name checked.

    Args:
        tls: Trust and certificates; its files are read now.
        dates: Whether to check dates too; false while this machine's clock is not reliable.

    Raises:
        Untrusted: A file is missing, unreadable, readable by others, or has wrong contents.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not dates:
        context.verify_flags |= NO_CHECK_TIME
    _load_ca(context, tls.ca)
    if tls.cert:
        _load_key_pair(context, tls)
    return context


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    if not ca:
        context.load_default_certs()
        return
    _require_readable(ca, "ca", "name the file of the site's CA")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise Untrusted(
            f"tls.ca: {ca} holds no certificate ({_reason(error)}): name the file of the site's CA"
        ) from error


def _load_key_pair(context: ssl.SSLContext, tls: TlsSettings) -> None:
    _require_readable(tls.cert, "cert", "name the file of this machine's certificate, or enrol it again")
    _require_readable(tls.key, "key", "name the file of the certificate's key, or enrol this machine again")
    if too_open := describe_unsafe_mode(Path(tls.key)):
        raise Untrusted(f"tls.key: {too_open}")
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise Untrusted(
                f"tls.key: {tls.key} is not the key of {tls.cert}: use a pair that belongs together"
            ) from error
        problem = f"tls.cert and tls.key: {tls.cert} and {tls.key} cannot be used ({_reason(error)})"
        raise Untrusted(f"{problem}: use an unencrypted PEM certificate and key") from error


def _no_password() -> str:
    raise Untrusted("tls.key is encrypted: use an unencrypted key, readable only by its owner")


def _require_readable(path: str, what: str, remedy: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise Untrusted(f"tls.{what}: {path}: {error.strerror or error}: {remedy}") from error


def describe_unsafe_mode(path: Path) -> str:
    """Describe unsafe permissions of a secret's file, with the remedy; empty if they are safe.

    Raises:
        OSError: It does not exist.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & UNSAFE_MODE:
        return ""
    return f"{path} has mode {mode:04o}, so that others can read it or put another in its place: `chmod 600 {path}`"


def handshake(context: ssl.SSLContext, sock: socket.socket, host: str, patience_s: float) -> ssl.SSLSocket:
    """Run the TLS handshake on a TCP socket, and wait until the broker has checked our certificate too.

    With TLS 1.3 the client is done before the server has checked it. The server's next message, session tickets or an
    alert, is awaited for as long as the handshake took: if CONNECT were sent at once, TCP's reset would often swallow
    the alert.

    Args:
        sock: Connected socket; closed on failure.

    Raises:
        OSError: It failed; see `explain_failure`.
    """
    begun = monotonic()
    secured = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        secured.settimeout(patience_s)
        secured.do_handshake()
        secured.setblocking(False)
        if secured.version() == "TLSv1.3" and select.select([secured], [], [], monotonic() - begun)[0]:
            _check_for_alert(secured)
    except BaseException:
        secured.close()
        raise
    return secured


def _check_for_alert(secured: ssl.SSLSocket) -> None:
    try:
        spoken = secured.recv(1)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # session tickets
        return
    raise ConnectionError("it sends data first, so it is not an MQTT broker" if spoken else HUNG_UP)


def explain_failure(error: Exception, tls: TlsSettings, host: str) -> Unreachable:
    """Explain a failed TLS connection, with the remedy if it is a matter of trust."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(_explain_distrust(error, tls, tls.server_name or host))
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return Unreachable(HUNG_UP)
    if not isinstance(error, ssl.SSLError):
        return Unreachable(str(error))
    reason = error.reason or ""
    if remedy := next((remedy for alert, remedy in ALERTS.items() if reason.endswith(alert)), None):
        return Untrusted(remedy.format(cert=tls.cert or "(there is none)"))
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"):
        return Untrusted(NO_TLS)
    return Unreachable(f"TLS failed ({_reason(error)})")


def _explain_distrust(error: ssl.SSLCertVerificationError, tls: TlsSettings, name: str) -> str:
    stamp = utc_stamp()
    clock = f"this machine's clock ({stamp[:4]}-{stamp[4:6]}-{stamp[6:8]})"
    match error.verify_code:
        case code if code == NOT_YET_VALID:
            return (
                f"the broker's certificate is not valid yet by {clock}: set this clock, or, if it is right, that of "
                "the machine that issued the certificate, and issue it again"
            )
        case code if code == EXPIRED:
            return (
                f"the broker's certificate has expired by {clock}: set this clock, or, if it is right, renew the "
                "broker's certificate"
            )
        case code if code in (OTHER_NAME, OTHER_ADDRESS):
            return (
                f"the broker's certificate is not for {name}: set `host`, or `server_name` of [broker] tls, to a name "
                "in it; if there is none, this is not the right broker"
            )
        case code if code == WRONG_PURPOSE:
            return "the broker's certificate is not one for a server: give the broker its own"
    whom = f"the CA in {tls.ca}" if tls.ca else "a CA that this system trusts"
    return (
        f"the broker's certificate is not signed by {whom} ({error.verify_message}): this is not the right broker, or "
        "`ca` of [broker] tls is another site's"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
