"""Certificate database: every certificate that a site has signed, by account, in SQLite.

Signing, looking up and revoking take the same time with ten certificates as with a hundred thousand. Writers hold the
site's lock; readers need none. The site's settings are in `state.json`, for people to read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from edge_server.gateway.authority import Role
from shared.errors import ConfigError, Unwritable
from shared.runtime.durable import explain_disk_errors

FILE = "accounts.sqlite"
PRIVATE = 0o600
BUSY_S = 30.0
SCHEMA = """
PRAGMA synchronous = EXTRA;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, denied INTEGER NOT NULL, data BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS denied ON accounts (name) WHERE denied;
CREATE TABLE IF NOT EXISTS keys (key TEXT, name TEXT, PRIMARY KEY (key, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revoked (authority TEXT, serial TEXT, PRIMARY KEY (authority, serial)) WITHOUT ROWID;
"""


class SignedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate on record.

    Attributes:
        serial: Serial number of the certificate, hexadecimal.
        authority: Serial number of the certificate of the site CA that signed it, hexadecimal.
        role: Role of its account.
        key: SHA-256 of its public key (SubjectPublicKeyInfo, DER), hexadecimal.
        not_after_utc_s: End of validity, calendar seconds.
        revoked: Brokers are to reject it; never taken back.
    """

    serial: str
    authority: str
    role: Role
    key: str
    not_after_utc_s: float
    revoked: bool = False


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """An account of a site's broker, identified by its common name.

    Attributes:
        certificates: All certificates ever signed for it, in order of time.
        denied: It has no right: it was revoked, and not enrolled again.
    """

    certificates: tuple[SignedCertificate, ...] = ()
    denied: bool = False


class Accounts(Mapping[str, SiteAccount]):
    """Accounts of a site: the database's, overlaid with unwritten changes.

    Args:
        path: Database; None if there is none yet.
        changed: Accounts that differ from the database.
    """

    def __init__(self, path: Path | None = None, changed: Mapping[str, SiteAccount] | None = None) -> None:
        self._path = path
        self.changed = dict(changed or {})

    def __getitem__(self, name: str) -> SiteAccount:
        if name in self.changed:
            return self.changed[name]
        for (data,) in self.ask("SELECT data FROM accounts WHERE name = ?", name):
            return msgspec.json.decode(data, type=SiteAccount)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for (name,) in self.ask("SELECT name FROM accounts") if name not in self.changed)
        yield from self.changed

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mapping) and dict(self.items()) == dict(other.items()))

    __hash__ = None  # type: ignore[assignment]

    def with_account(self, name: str, account: SiteAccount) -> Accounts:
        """Return a copy with an account added or replaced; nothing is written."""
        return Accounts(self._path, {**self.changed, name: account})

    def denied_names(self) -> list[str]:
        """Return the names of all accounts without any right, sorted."""
        names = {name for (name,) in self.ask("SELECT name FROM accounts WHERE denied")} - self.changed.keys()
        return sorted(names | {name for name, account in self.changed.items() if account.denied})

    def revoked_serials(self, authority: str) -> list[int]:
        """Return the serial numbers of all revoked certificates of a CA."""
        serials = {serial for (serial,) in self.ask("SELECT serial FROM revoked WHERE authority = ?", authority)}
        changed = (cert for account in self.changed.values() for cert in account.certificates)
        serials |= {cert.serial for cert in changed if cert.revoked and cert.authority == authority}
        return [int(serial, 16) for serial in sorted(serials)]

    def find_by_key(self, key: str) -> list[str]:
        """Return the names of the accounts with a certificate for a key, given by its SHA-256, hexadecimal."""
        names = {name for (name,) in self.ask("SELECT name FROM keys WHERE key = ?", key)}
        return sorted(
            names
            | {name for name, account in self.changed.items() if any(cert.key == key for cert in account.certificates)}
        )

    def find_by_prefix(self, start: str) -> list[str]:
        """Return the names that begin with a prefix, sorted."""
        last = start[:-1] + chr(ord(start[-1]) + 1)
        names = {name for (name,) in self.ask("SELECT name FROM accounts WHERE name >= ? AND name < ?", start, last)}
        return sorted(names | {name for name in self.changed if name.startswith(start)})

    def ask(self, query: str, *parameters: str) -> list[tuple[str]]:
        """Return the rows of a query on the database."""
        if self._path is None:
            return []
        with open_accounts(self._path) as connection:
            return connection.execute(query, parameters).fetchall()


def as_accounts(accounts: Mapping[str, SiteAccount]) -> Accounts:
    """Return any mapping of accounts as `Accounts`."""
    return accounts if isinstance(accounts, Accounts) else Accounts(changed=accounts)


@contextmanager
def open_accounts(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a site's database of accounts for reading.

    Raises:
        ConfigError: It is missing, damaged or not readable by this user.
    """
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            yield connection
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        hint = "run this as the site's user, or restore it from a backup: its certificates cannot be revoked without it"
        raise ConfigError(f"{path}: {error}; {hint}") from error


def write_accounts(folder: Path, accounts: Mapping[str, SiteAccount]) -> None:
    """Write the changed accounts, or all to a new database, in one transaction.

    Raises:
        ConfigError: The database is damaged, or not writable by this user.
        Unwritable: The disk is full or read-only.
    """
    path = folder / FILE
    is_new = not path.exists()
    changed = as_accounts(accounts).changed
    if not changed and not is_new:
        return
    with explain_disk_errors(path):
        if is_new:
            _create(path)
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as connection:
            connection.executescript(SCHEMA)  # begins a transaction
            put_accounts(connection, changed.items())
            connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise Unwritable(f"{path}: {error}; free some space, or run this as the site's user") from error
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; restore it from a backup") from error


def _create(path: Path) -> None:
    """Create an empty file that only its owner may read; SQLite gives its journal the same mode."""
    about = path.parent.stat()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        if os.geteuid() == 0:  # root may write for the service's user
            os.fchown(descriptor, about.st_uid, about.st_gid)
    finally:
        os.close(descriptor)


def put_accounts(connection: sqlite3.Connection, changed: Iterable[tuple[str, SiteAccount]]) -> None:
    """Write accounts within an open transaction."""
    rows = [(name, account.denied, msgspec.json.encode(account)) for name, account in changed]
    connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", rows)
    signed = [(name, cert) for name, account in changed for cert in account.certificates]
    connection.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?)", [(cert.key, name) for name, cert in signed])
    revoked = [(cert.authority, cert.serial) for _, cert in signed if cert.revoked]
    connection.executemany("INSERT OR IGNORE INTO revoked VALUES (?, ?)", revoked)
