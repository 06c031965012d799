"""The enrolment service at a real site: what it signs with, what it notes, and where its tokens point to."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from edge_server.gateway.authority import Issued, Subject, fingerprint, issue
from edge_server.gateway.certificate_files import authority_id, newest_root, offered_chain
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.enrolment.accounts import as_accounts
from edge_server.gateway.enrolment.ledger import FILE as LEDGER
from edge_server.gateway.enrolment.ledger import EnrolmentLedger, edit_ledger
from edge_server.gateway.enrolment.rate_limit import RENEWALS, RENEWALS_PER_S, RateLimit
from edge_server.gateway.enrolment.registrar import Holder, Registrar, SiteFacts
from edge_server.gateway.state import FILE, SiteState, lock_site, read_state, with_certificate, write_state
from shared.errors import ConfigError
from shared.runtime.clock import monotonic, utc_seconds
from shared.transport.tls import find_openness

MAX_DAYS = 36_500.0


@dataclass(frozen=True)
class EnrolmentSite:
    """A site's folder, as the enrolment service and its commands use it.

    Attributes:
        folder: As `edge-server site init` made it.
        days: How long a device's certificate is valid.
        utc_s: The gateway's time, calendar seconds.
    """

    folder: Path
    days: float = 365.0
    utc_s: Callable[[], float] = utc_seconds

    def registrar(self) -> Registrar:
        """Return what answers boards at this site.

        Raises:
            ConfigError: There is no site in that folder, or the lifetime is none.
        """
        if not 0 < self.days <= MAX_DAYS:
            raise ConfigError(f"{self.days:g} days: a certificate is valid for more than 0, and {MAX_DAYS:g} at most")
        self.facts()
        return Registrar(
            site=self.facts,
            edit=self.edit,
            issue=self.issue,
            find_holder=self.find_holder,
            is_denied=self.is_denied,
            utc_s=self.utc_s,
            limit=RateLimit(monotonic),
            renewals=RateLimit(monotonic, RENEWALS, RENEWALS_PER_S),
        )

    def edit(self) -> AbstractContextManager[EnrolmentLedger]:
        """Open the site's ledger of enrolments to be changed."""
        return edit_ledger(self.folder)

    def facts(self) -> SiteFacts:
        """Return what boards are told; read anew, since a CA may be replaced while the service runs.

        Raises:
            ConfigError: There is no site in that folder, or it has no address.
        """
        state = read_state(self.folder)
        self._read("ca", "chain.pem")
        return SiteFacts(state.site, offered_chain(self.folder / "ca"), address_of(state), state.port)

    def root_digest(self) -> bytes:
        """Return what tokens carry of the root, the next one while it is replaced: SHA-256 of its DER.

        Raises:
            ConfigError: There is none.
        """
        self._read("ca", "root.crt")
        return fingerprint(newest_root(self.folder / "ca"))

    def issue(self, public: bytes, device: str) -> Issued | None:
        """Sign a device's certificate; it is on record, so that it can be revoked, before anybody has it.

        Return None where the device or this key was revoked: whoever asked before may have found it in order since.

        Args:
            public: Its key, SubjectPublicKeyInfo in DER.

        Raises:
            ConfigError: The name cannot be a device's, or the site's CA cannot sign now.
            WireError: The key is none.
            Unwritable: The disk takes nothing more.
        """
        key, certificate = self._read("ca", "site.key"), self._read("ca", "site.crt")
        now = datetime.fromtimestamp(self.utc_s(), UTC)
        with lock_site(self.folder):
            state, digest = read_state(self.folder), hashlib.sha256(public).hexdigest()
            account = state.accounts.get(device)
            if account and (account.denied or any(one.revoked and one.key == digest for one in account.certificates)):
                return None
            issued = issue(key, certificate, public, Subject(device, "device", state.site), self.days, now)
            state = with_certificate(state, device, issued, authority=authority_id(certificate), key=digest)
            write_state(self.folder, state)
        return dataclasses.replace(issued, certificate=issued.certificate + certificate)

    def find_holder(self, key: str) -> Holder | None:
        """Return the device that has certificates for a key, by the key's SHA-256, hexadecimal."""
        accounts = as_accounts(read_state(self.folder).accounts)
        for device in accounts.with_key(key):
            account = accounts[device]
            mine = [one for one in account.certificates if one.key == key and one.role == "device"]
            if mine:
                revoked = account.denied or any(one.revoked for one in mine)
                return Holder(device, max(one.not_after_utc_s for one in mine), revoked)
        return None

    def is_denied(self, device: str) -> bool:
        """Tell whether a device was revoked, and no token made for it since."""
        account = read_state(self.folder).accounts.get(device)
        return account is not None and account.denied

    def pair(self) -> tuple[Path, Path, Path]:
        """Return the files of the service's own certificate and key, and of the authorities that it trusts."""
        gateway = self.folder / "gateway"
        return gateway / "enrolment.crt", gateway / "enrolment.key", self.folder / "ca" / "chain.pem"

    def require_private(self) -> None:
        """Refuse to begin with secrets that others can read, or put others in their place.

        Raises:
            ConfigError: One of them can be.
        """
        service_key = self.pair()[1]
        kept = (self.folder / one for one in (FILE, ACCOUNTS, LEDGER))
        for path in (self.folder / "ca" / "site.key", service_key, *kept):
            if path.exists() and (too_open := find_openness(path)):
                raise ConfigError(too_open)

    def _read(self, *parts: str) -> bytes:
        path = self.folder.joinpath(*parts)
        try:
            return path.read_bytes()
        except OSError as error:
            what = "`edge-server site init` makes what is not there; else run this as the site's user"
            raise ConfigError(f"{path}: {error.strerror}; {what}") from error


def address_of(state: SiteState) -> str:
    """Return the address that boards are told.

    Raises:
        ConfigError: The site has none.
    """
    if not state.addresses:
        raise ConfigError("the site has no address: edge-server site init --address gateway.local")
    return state.addresses[0]
