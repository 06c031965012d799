"""HTTPS client for the gateway's enrolment service, bounded in time and size.

A verified gateway has a certificate for its address and a chain that ends at the root whose digest the token names;
dates are checked where the board's clock is reliable. Secrets are sent only to a verified gateway, and the Date header
of its answers provides the site's time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.identity.clock_floor import BoardClock, utc_text
from shared.errors import EnrolmentFailed, WireError
from shared.protocol.enrolment import MOST_HEAD, Refusal, body_length, decode_json, parse_head, parse_http_date
from shared.runtime import backports
from shared.runtime.text_table import printable_text
from shared.transport.tls import EXPIRED, NOT_YET_VALID, TlsSettings, build_context

log = logging.getLogger(__name__)

TOKEN, OTHER_CA, CLOCK, UNAVAILABLE = 2, 3, 4, 5
"""Exit codes of the commands, see `EnrolmentFailed`."""
PATIENCE_S = 20.0
MAX_MESSAGE = 400


@dataclass(frozen=True)
class Reply:
    """HTTP response; `utc_s` from its Date header."""

    status: int
    body: bytes
    utc_s: float | None


@dataclass(frozen=True)
class Gateway:
    """A gateway's enrolment service.

    Attributes:
        host: Address, as named in its certificate.
        patience_s: Time limit of a whole request, in seconds.
    """

    host: str
    port: int
    clock: BoardClock
    patience_s: float = PATIENCE_S

    async def fetch_unverified(self, path: str) -> bytes:
        """Fetch a path from any host at the address; sends nothing secret.

        Raises:
            EnrolmentFailed: There is no valid answer.
        """
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        return self._require_success(await self._ask("GET", path, b"", anybody))

    async def ask(self, path: str, body: msgspec.Struct | None, tls: TlsSettings) -> bytes:
        """Return the verified gateway's answer, and record its time.

        Args:
            body: Request body to POST; None to GET.
            tls: CA that the gateway's certificate must be of, and the board's certificate if it has one.

        Raises:
            EnrolmentFailed: It refuses, does not answer or fails verification; or a clock is wrong.
        """
        payload = b"" if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        try:
            reply = await self._ask(method, path, payload, build_context(tls, dates=self.clock.may_judge()))
        except ssl.SSLCertVerificationError as error:
            raise await self._explain(error, tls) from error
        if reply.utc_s is not None:
            self.clock.set_site_time(reply.utc_s)
        return self._require_success(reply)

    async def _ask(self, method: str, path: str, body: bytes, secured: ssl.SSLContext) -> Reply:
        host = f"[{self.host}]" if ":" in self.host else self.host
        length = f"Content-Length: {len(body)}\r\n" if method == "POST" else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{length}Connection: close\r\n\r\n"
        try:
            async with backports.timeout(self.patience_s):
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=secured, limit=MOST_HEAD)
                try:
                    writer.write(head.encode("ascii") + body)
                    return await _read_reply(reader)
                finally:
                    writer.transport.abort()
                    with suppress(OSError):
                        await writer.wait_closed()
        except ssl.SSLCertVerificationError:
            raise
        except TimeoutError:
            raise self._unavailable(f"no answer within {self.patience_s:.0f} s") from None
        except (OSError, UnicodeError, WireError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, why: str) -> EnrolmentFailed:
        return EnrolmentFailed(
            f"no enrolment service at {self.host}:{self.port} ({why}); is the gateway on, and in this network?",
            code=UNAVAILABLE,
        )

    def _require_success(self, reply: Reply) -> bytes:
        if reply.status == 200:  # noqa: PLR2004 - HTTP's OK
            return reply.body
        try:
            refusal = decode_json(reply.body, Refusal)
        except WireError:
            raise self._unavailable(f"it answers with status {reply.status}") from None
        message = printable_text(refusal.message or refusal.reason)[:MAX_MESSAGE]  # from an unverified host, perhaps
        if refusal.reason in ("busy", "site"):
            wait = f" in {refusal.retry_s:.0f} s" if refusal.retry_s else ""
            raise EnrolmentFailed(f"{message}; try again{wait}", code=UNAVAILABLE, reason=refusal.reason)
        raise EnrolmentFailed(message, code=TOKEN, reason=refusal.reason)

    async def _explain(self, error: ssl.SSLCertVerificationError, tls: TlsSettings) -> EnrolmentFailed:
        """Explain why the gateway's certificate was rejected; for its dates, which clock is wrong."""
        if error.verify_code not in (NOT_YET_VALID, EXPIRED):
            return EnrolmentFailed(
                f"{self.host}:{self.port} is not the expected gateway ({error.verify_message}); nothing secret was "
                "sent. Check that its certificate names this address and that nothing intercepts the connection",
                code=OTHER_CA,
            )
        try:
            reply = await self._ask("GET", "/ca.pem", b"", build_context(tls, dates=False))
        except ssl.SSLCertVerificationError as other:  # another host answers now
            return (
                await self._explain(other, tls)
                if other.verify_code not in (NOT_YET_VALID, EXPIRED)
                else self._unavailable("")
            )
        if reply.utc_s is not None:
            self.clock.set_site_time(reply.utc_s, keep=False)
        when = "is not valid yet" if error.verify_code == NOT_YET_VALID else "has expired"
        what = f"the gateway's certificate {when} by this board's clock ({utc_text(self.clock.utc_s())})"
        remedy = "both clocks agree: renew the gateway's certificate (`edge-server site check` explains how)"
        return EnrolmentFailed(f"{what}; {self.clock.explain() or remedy}", code=CLOCK)


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
    version, _, status_text = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status_text[:3].isdecimal():
        raise WireError("the answer is not HTTP", reason="malformed")
    body = await reader.readexactly(body_length(headers))
    return Reply(int(status_text[:3]), body, parse_http_date(headers.get("date", "")))


def authority_tls(ca: Path) -> TlsSettings:
    """Return TLS settings that verify the gateway, for a board without a certificate."""
    return TlsSettings(ca=str(ca))
