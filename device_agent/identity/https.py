"""One HTTPS request of a board to its gateway, bounded in time and size; secrets go only to whom we know.

Verified means: the chain ends at the root whose digest the token brought, and the certificate is for the address. Dates
are checked where this board's clock is to be trusted. Whatever is verified tells the site's time by its Date.
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
from shared.transport.tls import EXPIRED, NOT_YET_VALID, Tls, build_context

log = logging.getLogger(__name__)

TOKEN, OTHER_CA, CLOCK, AWAY = 2, 3, 4, 5
"""With what a command ends, see `EnrolmentFailed`."""
PATIENCE_S = 20.0
MOST_WORDS = 400


@dataclass(frozen=True)
class Reply:
    """What was answered."""

    status: int
    body: bytes
    utc_s: float | None


@dataclass(frozen=True)
class Gateway:
    """A gateway's enrolment service.

    Attributes:
        host: Its address, as its certificate names it.
        patience_s: Seconds that a request may take in all.
    """

    host: str
    port: int
    clock: BoardClock
    patience_s: float = PATIENCE_S

    async def fetch_unverified(self, path: str) -> bytes:
        """Return what is behind a path, whoever answers; nothing that is ours is told.

        Raises:
            EnrolmentFailed: Nobody answers, or not so.
        """
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        return self._granted(await self._ask("GET", path, b"", anybody))

    async def ask(self, path: str, body: msgspec.Struct | None, tls: Tls) -> bytes:
        """Return what the verified gateway answers; take its time.

        Args:
            path: What is asked for.
            body: What is said; None to fetch.
            tls: The CA that it must be of, and our certificate where we have one.

        Raises:
            EnrolmentFailed: It refuses, does not answer, or is not the one; or a clock is wrong.
        """
        payload = b"" if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        try:
            reply = await self._ask(method, path, payload, build_context(tls, dates=self.clock.may_judge()))
        except ssl.SSLCertVerificationError as error:
            raise await self._explain(error, tls) from error
        if reply.utc_s is not None:
            self.clock.take_site_time(reply.utc_s)
        return self._granted(reply)

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
            raise self._away(f"no answer within {self.patience_s:.0f} s") from None
        except (OSError, UnicodeError, WireError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise self._away(str(error)) from error

    def _away(self, why: str) -> EnrolmentFailed:
        return EnrolmentFailed(
            f"no enrolment service at {self.host}:{self.port} ({why}); is the gateway on, and in this network?",
            code=AWAY,
        )

    def _granted(self, reply: Reply) -> bytes:
        if reply.status == 200:  # noqa: PLR2004 - HTTP's OK
            return reply.body
        try:
            refusal = decode_json(reply.body, Refusal)
        except WireError:
            raise self._away(f"it answers with status {reply.status}") from None
        message = printable_text(refusal.message or refusal.reason)[:MOST_WORDS]  # perhaps a stranger's
        if refusal.reason in ("busy", "site"):
            wait = f" in {refusal.retry_s:.0f} s" if refusal.retry_s else ""
            raise EnrolmentFailed(f"{message}; the same again{wait}", code=AWAY, reason=refusal.reason)
        raise EnrolmentFailed(message, code=TOKEN, reason=refusal.reason)

    async def _explain(self, error: ssl.SSLCertVerificationError, tls: Tls) -> EnrolmentFailed:
        """Say why the gateway's certificate was not accepted; of its dates, which clock is wrong."""
        if error.verify_code not in (NOT_YET_VALID, EXPIRED):
            return EnrolmentFailed(
                f"{self.host}:{self.port} is not the gateway that was meant ({error.verify_message}); nothing secret "
                "was sent. Is the address one that its certificate names, and nobody between?",
                code=OTHER_CA,
            )
        try:
            reply = await self._ask("GET", "/ca.pem", b"", build_context(tls, dates=False))
        except ssl.SSLCertVerificationError as other:  # another one answers now
            return (
                await self._explain(other, tls) if other.verify_code not in (NOT_YET_VALID, EXPIRED) else self._away("")
            )
        if reply.utc_s is not None:
            self.clock.take_site_time(reply.utc_s, keep=False)
        when = "is not valid yet" if error.verify_code == NOT_YET_VALID else "has expired"
        what = f"the gateway's certificate {when} by this board's clock ({utc_text(self.clock.utc_s())})"
        remedy = "both clocks agree: make the certificate anew on the gateway (edge-server site check says how)"
        return EnrolmentFailed(f"{what}; {self.clock.explain() or remedy}", code=CLOCK)


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
    version, _, status_text = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status_text[:3].isdecimal():
        raise WireError("it speaks no HTTP", reason="malformed")
    body = await reader.readexactly(body_length(headers))
    return Reply(int(status_text[:3]), body, parse_http_date(headers.get("date", "")))


def authority_tls(ca: Path) -> Tls:
    """Return by what the gateway is known while this board has no certificate."""
    return Tls(ca=str(ca))
