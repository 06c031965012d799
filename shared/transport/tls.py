"""TLS towards the broker: whom we trust, who we are, and what to mend where either fails.

The certificates are read anew for every connection, so that a renewed pair is taken without a restart. Times in
certificates are checked by this machine's clock; where that is not to be trusted yet, on a board without a battery
behind it, dates alone are left unchecked: the chain and the name still are (X509_V_FLAG_NO_CHECK_TIME of OpenSSL's
x509_vfy.h, which Python has no name for).
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
TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP
"""Of a secret's file."""

NOT_YET_VALID, EXPIRED, OTHER_NAME, OTHER_ADDRESS = 9, 10, 62, 64
UNSUITED = 26
"""X509_V_ERR_* of OpenSSL's x509_vfy.h; nearly all others say that the chain does not end at our CA."""

HUNG_UP = (
    "it hung up in the TLS handshake: it speaks no TLS on this port, or does not take our certificate; its log says "
    f"why; {MAY_BE_FULL}"
)
NO_TLS = "what listens there speaks no TLS: set `port` to that of its TLS listener, or take `tls` out of [broker]"
ALERTS = {
    "CERTIFICATE_EXPIRED": "our certificate {cert} has expired, or is not valid yet, by the broker's clock: renew it, "
    "or set the clock of the broker's machine",
    "CERTIFICATE_REVOKED": "our certificate {cert} is revoked there: enrol this machine anew",
    "UNKNOWN_CA": "our certificate {cert} is of a CA that the broker does not know: use one of its own site's CA",
    "CERTIFICATE_REQUIRED": "the broker wants a certificate: set `cert` and `key` of [broker] tls",
    "HANDSHAKE_FAILURE": "the broker refuses what we offer, perhaps because it wants a certificate: set `cert` and "
    "`key` of [broker] tls",
    "PROTOCOL_VERSION": "the broker speaks no TLS of 1.2 or newer: set `tls_version` there, or update it",
    "BAD_CERTIFICATE": "the broker cannot use our certificate {cert}: use one that its CA signed for a client",
    "CERTIFICATE_UNKNOWN": "the broker does not take our certificate {cert}: use one of its own site's CA",
    "ACCESS_DENIED": "the broker does not let our certificate {cert} in: allow it there",
    "DECRYPT_ERROR": "the broker could not check our certificate {cert}: use one of its own site's CA",
}
"""What the broker tells of us, by the end of OpenSSL's name for it."""


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what this machine and a broker know each other. Paths; relative ones are taken from their file's folder.

    Attributes:
        ca: Certificates that the broker's must be signed by, PEM; empty for those that this system trusts.
        cert: Our certificate, PEM, with those between it and the CA; empty where the broker wants none.
        key: Its private key, PEM, which nobody else may read.
        server_name: Name or address that the broker's certificate must be for, where that is not `host`.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        """Refuse half a pair."""
        if bool(self.cert) != bool(self.key):
            there, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise ValueError(f"{there} stands without {lacking}: a certificate and its key go together")


def placed_tls(tls: Tls, folder: Path) -> Tls:
    """Return settings with their paths taken from a folder."""
    paths = {name: str(folder / path) for name in ("ca", "cert", "key") if (path := getattr(tls, name))}
    return msgspec.structs.replace(tls, **paths)


def context(tls: Tls, *, dates: bool) -> ssl.SSLContext:
    """Return what a connection is made with: TLS 1.2 at least, chain and name checked.

    Args:
        tls: Whom we trust and who we are; its files are read now.
        dates: Whether to check dates too; false while this machine's clock is not to be trusted.

    Raises:
        Untrusted: A file is missing, cannot be read, may be read by others, or holds what it should not.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    if not dates:
        made.verify_flags |= NO_CHECK_TIME
    _take_authority(made, tls.ca)
    if tls.cert:
        _take_pair(made, tls)
    return made


def _take_authority(made: ssl.SSLContext, ca: str) -> None:
    if not ca:
        made.load_default_certs()
        return
    _require_readable(ca, "ca", "name the file of the site's CA")
    try:
        made.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise Untrusted(
            f"tls.ca: {ca} holds no certificate ({_reason(error)}): name the file of the site's CA"
        ) from error


def _take_pair(made: ssl.SSLContext, tls: Tls) -> None:
    _require_readable(tls.cert, "cert", "name the file of this machine's certificate, or enrol it anew")
    _require_readable(tls.key, "key", "name the file of the certificate's key, or enrol this machine anew")
    if too_open := find_openness(Path(tls.key)):
        raise Untrusted(f"tls.key: {too_open}")
    try:
        made.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise Untrusted(
                f"tls.key: {tls.key} is not the key of {tls.cert}: put the pair there that belongs together"
            ) from error
        told = f"tls.cert and tls.key: {tls.cert} and {tls.key} cannot be used ({_reason(error)})"
        raise Untrusted(f"{told}: put a certificate and its key there, PEM, not encrypted") from error


def _no_password() -> str:
    raise Untrusted("tls.key is encrypted: put one there that is not, and let nobody else read it")


def _require_readable(path: str, what: str, remedy: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise Untrusted(f"tls.{what}: {path}: {error.strerror or error}: {remedy}") from error


def find_openness(path: Path) -> str:
    """Say why a secret's file is too open, and what to do; empty where only its owner, or a group that reads, has it.

    Raises:
        OSError: It is not there.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & TOO_OPEN:
        return ""
    return f"{path} has mode {mode:04o}, so that others can read it or put another in its place: `chmod 600 {path}`"


def handshake(made: ssl.SSLContext, sock: socket.socket, host: str, patience_s: float) -> ssl.SSLSocket:
    """Make a TLS connection of a TCP one, for as long as it takes the broker to look at our certificate too.

    Under TLS 1.3 this end is done before the other has checked us. What it says then, its session tickets or an alert,
    is waited for as long as the handshake took: were CONNECT on its way, TCP's reset would often swallow the alert.

    Args:
        made: By what we know each other.
        sock: Connected; closed if it fails.
        host: What the broker's certificate must be for.
        patience_s: Seconds that it may take.

    Raises:
        OSError: It failed; `explain` says why.
    """
    begun = monotonic()
    secured = made.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        secured.settimeout(patience_s)
        secured.do_handshake()
        secured.setblocking(False)
        if secured.version() == "TLSv1.3" and select.select([secured], [], [], monotonic() - begun)[0]:
            _hear_verdict(secured)
    except BaseException:
        secured.close()
        raise
    return secured


def _hear_verdict(secured: ssl.SSLSocket) -> None:
    try:
        spoken = secured.recv(1)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # session tickets
        return
    raise ConnectionError("it speaks before it is spoken to, so it is no MQTT broker" if spoken else HUNG_UP)


def explain(error: Exception, tls: Tls, host: str) -> Unreachable:
    """Return why a connection by TLS failed, and what to mend where it is a matter of trust.

    Args:
        error: As the connection raised it.
        tls: What it was made with.
        host: Where the broker is.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(_explain_distrust(error, tls, tls.server_name or host))
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return Unreachable(HUNG_UP)
    if not isinstance(error, ssl.SSLError):
        return Unreachable(str(error))
    reason = error.reason or ""
    if found := next((remedy for alert, remedy in ALERTS.items() if reason.endswith(alert)), None):
        return Untrusted(found.format(cert=tls.cert or "(there is none)"))
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"):
        return Untrusted(NO_TLS)
    return Unreachable(f"TLS failed ({_reason(error)})")


def _explain_distrust(error: ssl.SSLCertVerificationError, tls: Tls, name: str) -> str:
    stamp = utc_stamp()
    clock = f"this machine's clock ({stamp[:4]}-{stamp[4:6]}-{stamp[6:8]})"
    match error.verify_code:
        case code if code == NOT_YET_VALID:
            return (
                f"the broker's certificate is not valid yet by {clock}: set this clock, or, if it is right, that of "
                "the machine that made the certificate, and make it anew"
            )
        case code if code == EXPIRED:
            return (
                f"the broker's certificate has expired by {clock}: set this clock, or, if it is right, renew the "
                "broker's certificate"
            )
        case code if code in (OTHER_NAME, OTHER_ADDRESS):
            return (
                f"the broker's certificate is not for {name}: set `host`, or `server_name` of [broker] tls, to a name "
                "in it; if there is none, this is not the broker that was meant"
            )
        case code if code == UNSUITED:
            return "the broker's certificate is not one for a server: give the broker its own"
    whom = f"the CA in {tls.ca}" if tls.ca else "a CA that this system trusts"
    return (
        f"the broker's certificate is not signed by {whom} ({error.verify_message}): this is not the broker that was "
        "meant, or `ca` of [broker] tls is another site's"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
