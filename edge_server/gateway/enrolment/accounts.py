"""Every certificate that a site has signed, by account, in a file of SQLite: looked up and changed one by one.

A site of a hundred thousand certificates signs, finds and revokes one as fast as a site of ten. Whoever changes it
holds the site's lock; who only reads needs none. Settings of the site stand in `state.json`, for people.
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


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate that was signed.

    Attributes:
        serial: Its number, hexadecimal.
        authority: Number of the site CA's own certificate, which signed it, hexadecimal.
        role: Of whom it is for.
        key: SHA-256 of its public key (SubjectPublicKeyInfo, DER), hexadecimal.
        not_after_utc_s: Until when it is valid, calendar seconds.
        revoked: Whether brokers are to refuse it; once it is so, it stays.
    """

    serial: str
    authority: str
    role: Role
    key: str
    not_after_utc_s: float
    revoked: bool = False


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Whom brokers know by a common name.

    Attributes:
        certificates: All that were ever signed for it, in that order.
        denied: Whether it may do nothing at all: it was revoked, and not enrolled again since.
    """

    certificates: tuple[Signed, ...] = ()
    denied: bool = False


_DECODER = msgspec.json.Decoder(SiteAccount)


class Accounts(Mapping[str, SiteAccount]):
    """Accounts as the file has them now, but for changes that are not written yet.

    Args:
        path: Of the file; None where there is none yet.
        changed: What differs from the file.
    """

    def __init__(self, path: Path | None = None, changed: Mapping[str, SiteAccount] | None = None) -> None:
        self._path = path
        self.changed = dict(changed or {})

    def __getitem__(self, name: str) -> SiteAccount:
        if name in self.changed:
            return self.changed[name]
        for (data,) in self.ask("SELECT data FROM accounts WHERE name = ?", name):
            return _DECODER.decode(data)
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
        """Return these with one as given; nothing is written.

        Args:
            name: Common name of the account.
            account: In place of what it was.
        """
        return Accounts(self._path, {**self.changed, name: account})

    def denied(self) -> list[str]:
        """Return the names of all that may do nothing, in order."""
        found = {name for (name,) in self.ask("SELECT name FROM accounts WHERE denied")} - self.changed.keys()
        return sorted(found | {name for name, account in self.changed.items() if account.denied})

    def revoked(self, authority: str) -> list[int]:
        """Return the numbers of all certificates of one CA that brokers are to refuse."""
        found = {serial for (serial,) in self.ask("SELECT serial FROM revoked WHERE authority = ?", authority)}
        changed = (one for account in self.changed.values() for one in account.certificates)
        found |= {one.serial for one in changed if one.revoked and one.authority == authority}
        return [int(serial, 16) for serial in sorted(found)]

    def with_key(self, key: str) -> list[str]:
        """Return who has certificates for a key, by its SHA-256, hexadecimal."""
        found = {name for (name,) in self.ask("SELECT name FROM keys WHERE key = ?", key)}
        return sorted(
            found | {name for name, one in self.changed.items() if any(x.key == key for x in one.certificates)}
        )

    def beginning(self, start: str) -> list[str]:
        """Return the names that begin so, in order."""
        last = start[:-1] + chr(ord(start[-1]) + 1)
        found = {name for (name,) in self.ask("SELECT name FROM accounts WHERE name >= ? AND name < ?", start, last)}
        return sorted(found | {name for name in self.changed if name.startswith(start)})

    def ask(self, query: str, *given: str) -> list[tuple[str]]:
        """Return what the file says to a query."""
        if self._path is None:
            return []
        with reading(self._path) as connection:
            return connection.execute(query, given).fetchall()


def as_accounts(accounts: Mapping[str, SiteAccount]) -> Accounts:
    """Return accounts that can be looked up, of the file or not."""
    return accounts if isinstance(accounts, Accounts) else Accounts(changed=accounts)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a site's accounts to be read.

    Raises:
        ConfigError: They are gone or damaged, or not this user's.
    """
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            yield connection
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        hint = "run this as the site's user, or bring it back from a copy: what it holds cannot be revoked without it"
        raise ConfigError(f"{path}: {error}; {hint}") from error


def write_accounts(folder: Path, accounts: Mapping[str, SiteAccount]) -> None:
    """Write what differs, or all where these are not of the file; a kill leaves what was there, or all of it.

    Args:
        accounts: As they are to be.

    Raises:
        ConfigError: The file is damaged, or not this user's.
        Unwritable: The disk takes nothing more.
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
        raise Unwritable(f"{path}: {error}; make room there, or run this as the site's user") from error
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; bring it back from a copy") from error


def _create(path: Path) -> None:
    """Make an empty file, its owner's alone from the beginning: what lies beside it while it is written is as it is."""
    about = path.parent.stat()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        if os.geteuid() == 0:  # root may write for the service's user
            os.fchown(descriptor, about.st_uid, about.st_gid)
    finally:
        os.close(descriptor)


def put_accounts(connection: sqlite3.Connection, changed: Iterable[tuple[str, SiteAccount]]) -> None:
    """Write accounts in a transaction that is open."""
    rows = [(name, one.denied, msgspec.json.encode(one)) for name, one in changed]
    connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", rows)
    signed = [(name, each) for name, one in changed for each in one.certificates]
    connection.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?)", [(each.key, name) for name, each in signed])
    revoked = [(each.authority, each.serial) for _, each in signed if each.revoked]
    connection.executemany("INSERT OR IGNORE INTO revoked VALUES (?, ?)", revoked)
