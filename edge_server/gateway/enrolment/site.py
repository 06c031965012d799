"""Enrolment at a site's folder: sign and record certificates, provide the site's facts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from edge_server.gateway.authority import IssuedCertificate, Subject, fingerprint, issue
from edge_server.gateway.certificate_files import authority_id, cross_signed_chain, newest_root
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.enrolment.accounts import as_accounts
from edge_server.gateway.enrolment.ledger import FILE as LEDGER
from edge_server.gateway.enrolment.ledger import EnrolmentLedger, edit_ledger
from edge_server.gateway.enrolment.rate_limit import RENEWALS, RENEWALS_PER_S, RateLimit
from edge_server.gateway.enrolment.registrar import Holder, Registrar, SiteInfo
from edge_server.gateway.state import FILE, SiteState, lock_site, read_state, with_certificate, write_state
from shared.errors import ConfigError
from shared.runtime.clock import monotonic, utc_seconds
from shared.transport.tls import describe_unsafe_mode

MAX_DAYS = 36_500.0


@dataclass(frozen=True)
class EnrolmentSite:
    """A site's folder, as the enrolment service and its commands use it.

    Attributes:
        folder: Folder made by `edge-server site init`.
        days: Validity of a device's certificate.
        utc_s: Gateway's clock, calendar seconds.
    """

    folder: Path
    days: float = 365.0
    utc_s: Callable[[], float] = utc_seconds

    def registrar(self) -> Registrar:
        """Return a registrar for this site.

        Raises:
            ConfigError: There is no site in that folder, or `days` is out of range.
        """
        if not 0 < self.days <= MAX_DAYS:
            raise ConfigError(f"{self.days:g} days: a certificate's validity must be above 0, at most {MAX_DAYS:g}")
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
        """Open the site's enrolment ledger for changes."""
        return edit_ledger(self.folder)

    def facts(self) -> SiteInfo:
        """Return the site's facts, read each time, since a CA may be replaced while the service runs.

        Raises:
            ConfigError: There is no site in that folder, or it has no address.
        """
        state = read_state(self.folder)
        self._read("ca", "chain.pem")
        return SiteInfo(state.site, cross_signed_chain(self.folder / "ca"), gateway_address(state), state.port)

    def root_digest(self) -> bytes:
        """Return the SHA-256 of the newest root's DER, which tokens contain.

        Raises:
            ConfigError: There is none.
        """
        self._read("ca", "root.crt")
        return fingerprint(newest_root(self.folder / "ca"))

    def issue(self, public: bytes, device: str) -> IssuedCertificate | None:
        """Sign a device's certificate, after recording it so that it can be revoked.

        Return None where the device or this key is revoked; a caller's earlier check may be outdated.

        Args:
            public: Device's public key, SubjectPublicKeyInfo in DER.

        Raises:
            ConfigError: The name is not a valid device name, or the site's CA cannot sign now.
            WireError: The key is malformed.
            Unwritable: The disk is full or read-only.
        """
        key, certificate = self._read("ca", "site.key"), self._read("ca", "site.crt")
        now = datetime.fromtimestamp(self.utc_s(), UTC)
        with lock_site(self.folder):
            state, digest = read_state(self.folder), hashlib.sha256(public).hexdigest()
            account = state.accounts.get(device)
            if account and (
                account.denied or any(cert.revoked and cert.key == digest for cert in account.certificates)
            ):
                return None
            issued = issue(key, certificate, public, Subject(device, "device", state.site), self.days, now)
            state = with_certificate(state, device, issued, authority=authority_id(certificate), key=digest)
            write_state(self.folder, state)
        return dataclasses.replace(issued, certificate=issued.certificate + certificate)

    def find_holder(self, key: str) -> Holder | None:
        """Return the device that has certificates for a key, given by its SHA-256, hexadecimal."""
        accounts = as_accounts(read_state(self.folder).accounts)
        for device in accounts.find_by_key(key):
            account = accounts[device]
            mine = [cert for cert in account.certificates if cert.key == key and cert.role == "device"]
            if mine:
                revoked = account.denied or any(cert.revoked for cert in mine)
                return Holder(device, max(cert.not_after_utc_s for cert in mine), revoked)
        return None

    def is_denied(self, device: str) -> bool:
        """Check whether a device was revoked and not enrolled again."""
        account = read_state(self.folder).accounts.get(device)
        return account is not None and account.denied

    def pair(self) -> tuple[Path, Path, Path]:
        """Return the service's certificate and key, and the certificates of the authorities that it trusts."""
        gateway = self.folder / "gateway"
        return gateway / "enrolment.crt", gateway / "enrolment.key", self.folder / "ca" / "chain.pem"

    def require_private(self) -> None:
        """Require that only the owner can read or replace the secret files.

        Raises:
            ConfigError: Others can access one of them.
        """
        service_key = self.pair()[1]
        stored = (self.folder / name for name in (FILE, ACCOUNTS, LEDGER))
        for path in (self.folder / "ca" / "site.key", service_key, *stored):
            if path.exists() and (too_open := describe_unsafe_mode(path)):
                raise ConfigError(too_open)

    def _read(self, *parts: str) -> bytes:
        path = self.folder.joinpath(*parts)
        try:
            return path.read_bytes()
        except OSError as error:
            what = "`edge-server site init` creates missing files; otherwise run this as the site's user"
            raise ConfigError(f"{path}: {error.strerror}; {what}") from error


def gateway_address(state: SiteState) -> str:
    """Return the gateway's address for boards.

    Raises:
        ConfigError: The site has none.
    """
    if not state.addresses:
        raise ConfigError("the site has no address; set one by `edge-server site init --address gateway.local`")
    return state.addresses[0]
