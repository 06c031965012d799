"""What a site is, and what it has signed for whom: its settings in `state.json`, its accounts in a file beside it.

The access list and the revocation list are made from both, so that these are written first, accounts before settings,
and the lists follow; a crash between them is mended by writing the lists again. Processes take turns by a lock; they
hold it for as long as files take.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edge_server.gateway.authority import Issued, Role
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.enrolment.accounts import Accounts, Signed, SiteAccount, as_accounts, write_accounts
from shared.config import read
from shared.errors import ConfigError
from shared.runtime.durable import replace_file

FILE, LOCK = "state.json", ".state.lock"
NO_SITE = "no site is there; make one by `edge-server site init`, or name its folder"
VERSION = 2
PRIVATE = 0o600


class SiteState(msgspec.Struct, frozen=True, kw_only=True):
    """A site, as its folder's `state.json` has it.

    Attributes:
        version: Of this form; a newer one is refused, since writing it would lose what it says.
        addresses: Under which the gateway is reached, as its certificates name them.
        port: Of the broker's TLS listener.
        bind: The only address at which the broker listens; empty for all.
        broker_user: To whom the broker gives up root's rights; empty for its own choice.
        own_port: Of the broker's listener on loopback for the server's own processes; 0 for the one after `port`.
        accounts: By common name; since version 2 in a file of their own, of which only what changes is read.
        generation: How often the broker was told to take its files anew.
    """

    version: int = VERSION
    site: str
    addresses: tuple[str, ...] = ()
    port: int = 8883
    bind: str = ""
    broker_user: str = ""
    own_port: int = 0
    accounts: Mapping[str, SiteAccount] = {}
    generation: int = 0

    @property
    def servers_port(self) -> int:
        """Where the server's own processes connect."""
        return self.own_port or self.port + 1


def read_state(folder: Path) -> SiteState:
    """Return what is known of a site.

    Raises:
        ConfigError: There is no site in that folder, or its file is damaged or of a newer version.
    """
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: {NO_SITE}")
    found = read(path, SiteState)
    if found.version > VERSION:
        raise ConfigError(f"{path}: of version {found.version}, and this program knows {VERSION}: update it")
    accounts = Accounts(folder / ACCOUNTS) if found.version == VERSION else Accounts(changed=found.accounts)
    return msgspec.structs.replace(found, version=VERSION, accounts=accounts)


def write_state(folder: Path, state: SiteState) -> None:
    """Write what is known of a site; the caller holds its lock.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    path = folder / FILE
    stat = (path if path.exists() else folder).stat()
    owner = (stat.st_uid, stat.st_gid) if os.geteuid() == 0 else None  # root may write for the service's user
    data = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, accounts={})), indent=1) + b"\n"
    write_accounts(folder, state.accounts)
    if not path.is_file() or path.read_bytes() != data:
        replace_file(path, data, mode=PRIVATE, owner=owner)


def _open_lock(folder: Path, name: str) -> int:
    """Open the file of a lock; root may come first, and the service's user must be able to hold it too."""
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        if os.geteuid() == 0:
            about = folder.stat()
            os.fchown(descriptor, about.st_uid, about.st_gid)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a site while the block lasts; another process that does is waited for.

    Args:
        name: Of the lock's file; each is a lock of its own.

    Raises:
        ConfigError: There is no such folder, or this user may not write there.
    """
    try:
        descriptor = _open_lock(folder, name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder}: {NO_SITE}") from error
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; run this as the owner of the site's folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def with_signed(
    state: SiteState, name: str, issued: Issued, *, authority: str, key: str, role: Role = "device"
) -> SiteState:
    """Return a site's state in which an account has one more certificate.

    Args:
        name: Common name of the account.
        authority: Number of the CA's certificate, hexadecimal.
        key: SHA-256 of the public key, hexadecimal.
    """
    signed = Signed(
        serial=f"{issued.serial:x}",
        authority=authority,
        role=role,
        key=key,
        not_after_utc_s=issued.not_after.timestamp(),
    )
    account = state.accounts.get(name, SiteAccount())
    return with_account(state, name, msgspec.structs.replace(account, certificates=(*account.certificates, signed)))


def with_account(state: SiteState, name: str, account: SiteAccount) -> SiteState:
    """Return a site's state with an account as given.

    Args:
        name: Common name of the account.
        account: In place of what it was.
    """
    return msgspec.structs.replace(state, accounts=as_accounts(state.accounts).with_account(name, account))


def denied_accounts(state: SiteState) -> list[str]:
    """Return the names of all that may do nothing, in order."""
    return as_accounts(state.accounts).denied()


def revoked_serials(state: SiteState, authority: str) -> list[int]:
    """Return the numbers of all certificates of one CA that brokers are to refuse."""
    return as_accounts(state.accounts).revoked(authority)
