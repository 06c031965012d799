"""Site state: settings in `state.json`, issued certificates in a database beside it.

Access list and revocation list are derived from both. So accounts are written first, then settings, then the lists;
after a crash in between, writing the lists again repairs the site. Processes take turns by a file lock, held while
files are written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edge_server.gateway.authority import IssuedCertificate, Role
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.enrolment.accounts import Accounts, SignedCertificate, SiteAccount, as_accounts, write_accounts
from shared.config import read
from shared.errors import ConfigError
from shared.runtime.durable import replace_file

FILE, LOCK = "state.json", ".state.lock"
NO_SITE = "there is no site; create one by `edge-server site init`, or name its folder"
VERSION = 2
PRIVATE = 0o600


class SiteState(msgspec.Struct, frozen=True, kw_only=True):
    """A site's settings and accounts.

    Attributes:
        version: Version of the format; a newer one is refused, since writing it would lose its content.
        addresses: Addresses of the gateway, as in its certificates.
        port: Port of the broker's TLS listener.
        bind: Only address of the broker's listener; empty for all.
        broker_user: User that the broker switches to from root; empty for its default.
        own_port: Port of the broker's loopback listener; 0 for the one after `port`.
        accounts: By common name; since version 2 in a database of their own, of which only changed ones are loaded.
        generation: Number of reloads of the broker.
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
        """Port of the loopback listener, for the server's processes."""
        return self.own_port or self.port + 1


def read_state(folder: Path) -> SiteState:
    """Read a site's state.

    Raises:
        ConfigError: There is no site in that folder, or its file is damaged or of a newer version.
    """
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: {NO_SITE}")
    state = read(path, SiteState)
    if state.version > VERSION:
        raise ConfigError(f"{path}: version {state.version} is newer than {VERSION}: update this program")
    accounts = Accounts(folder / ACCOUNTS) if state.version == VERSION else Accounts(changed=state.accounts)
    return msgspec.structs.replace(state, version=VERSION, accounts=accounts)


def write_state(folder: Path, state: SiteState) -> None:
    """Write a site's state; the caller holds its lock.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    path = folder / FILE
    stat = (path if path.exists() else folder).stat()
    owner = (stat.st_uid, stat.st_gid) if os.geteuid() == 0 else None  # root may write for the service's user
    data = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, accounts={})), indent=1) + b"\n"
    write_accounts(folder, state.accounts)
    if not path.is_file() or path.read_bytes() != data:
        replace_file(path, data, mode=PRIVATE, owner=owner)


def _open_lock(folder: Path, name: str) -> int:
    """Open a lock file; if root creates it, the service's user must be able to lock it too."""
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
def lock_site(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a site's lock during the block; wait for another process that holds it.

    Args:
        name: File name of the lock; different names are independent locks.

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


def with_certificate(
    state: SiteState, name: str, issued: IssuedCertificate, *, authority: str, key: str, role: Role = "device"
) -> SiteState:
    """Return a site's state with one more certificate of an account.

    Args:
        authority: Serial number of the CA's certificate, hexadecimal.
        key: SHA-256 of the public key, hexadecimal.
    """
    signed = SignedCertificate(
        serial=f"{issued.serial:x}",
        authority=authority,
        role=role,
        key=key,
        not_after_utc_s=issued.not_after.timestamp(),
    )
    account = state.accounts.get(name, SiteAccount())
    return with_account(state, name, msgspec.structs.replace(account, certificates=(*account.certificates, signed)))


def with_account(state: SiteState, name: str, account: SiteAccount) -> SiteState:
    """Return a site's state with an account added or replaced."""
    return msgspec.structs.replace(state, accounts=as_accounts(state.accounts).with_account(name, account))


def denied_accounts(state: SiteState) -> list[str]:
    """Return the names of all accounts without any right, sorted."""
    return as_accounts(state.accounts).denied_names()


def revoked_serials(state: SiteState, authority: str) -> list[int]:
    """Return the serial numbers of all revoked certificates of a CA."""
    return as_accounts(state.accounts).revoked_serials(authority)
