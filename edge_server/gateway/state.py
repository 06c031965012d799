"""What a site has signed and for whom, in one file: every certificate of every account, and who is denied.

The access list and the revocation list are made from it, so that it is written first and they follow; a crash between
the two is mended by writing them again. Processes take turns by a lock; they hold it for as long as files take.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edge_server.gateway.authority import Issued, Role
from shared.config import read
from shared.errors import ConfigError
from shared.runtime.durable import replace_file

FILE, LOCK = "state.json", ".state.lock"
VERSION = 1
PRIVATE = 0o600


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate that was signed.

    Attributes:
        serial: Its number, hexadecimal.
        authority: Number of the site CA's own certificate, which signed it, hexadecimal.
        role: Of whom it is for.
        key: SHA-256 of its public key (SubjectPublicKeyInfo, DER), hexadecimal.
        not_after_utc_s: Until when it is valid, calendar seconds.
        revoked: Whether brokers are to refuse it.
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


class SiteState(msgspec.Struct, frozen=True, kw_only=True):
    """A site, as its folder's `state.json` has it.

    Attributes:
        version: Of this form; a newer one is refused, since writing it would lose what it says.
        site: Its name.
        addresses: Under which the gateway is reached, as its certificates name them.
        port: Of the broker's TLS listener.
        bind: The only address at which the broker listens; empty for all.
        broker_user: To whom the broker gives up root's rights; empty for its own choice.
        own_port: Of the broker's listener on loopback for the server's own processes; 0 for the one after `port`.
        accounts: By common name.
        generation: How often the broker was told to take its files anew.
    """

    version: int = VERSION
    site: str
    addresses: tuple[str, ...] = ()
    port: int = 8883
    bind: str = ""
    broker_user: str = ""
    own_port: int = 0
    accounts: dict[str, SiteAccount] = {}
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
        raise ConfigError(f"{folder}: no site is there; make one by `edge-server site init`, or name its folder")
    found = read(path, SiteState)
    if found.version > VERSION:
        raise ConfigError(f"{path}: of version {found.version}, and this program knows {VERSION}: update it")
    return found


def write_state(folder: Path, state: SiteState) -> None:
    """Write what is known of a site; the caller holds its lock.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    path = folder / FILE
    stat = (path if path.exists() else folder).stat()
    owner = (stat.st_uid, stat.st_gid) if os.geteuid() == 0 else None  # root may write for the service's user
    data = msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"
    replace_file(path, data, mode=PRIVATE, owner=owner)


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a site while the block lasts; another process that does is waited for.

    Args:
        folder: Of the site.
        name: Of the lock's file; each is a lock of its own.

    Raises:
        ConfigError: There is no such folder, or this user may not write there.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        if os.geteuid() == 0:  # root may come first, and the service's user takes turns with it
            about = folder.stat()
            os.fchown(descriptor, about.st_uid, about.st_gid)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; run this as the owner of the site's folder") from error
    try:
        if os.geteuid() == 0:  # root may hold it first, and the service's user must be able to hold it too
            about = folder.stat()
            os.fchown(descriptor, about.st_uid, about.st_gid)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def with_signed(
    state: SiteState, name: str, issued: Issued, *, authority: str, key: str, role: Role = "device"
) -> SiteState:
    """Return a site's state in which an account has one more certificate.

    Args:
        state: As it is.
        name: Common name of the account.
        issued: The certificate.
        authority: Number of the CA's certificate, hexadecimal.
        key: SHA-256 of the public key, hexadecimal.
        role: Of the account.
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
        state: As it is.
        name: Common name of the account.
        account: In place of what it was.
    """
    return msgspec.structs.replace(state, accounts={**state.accounts, name: account})


def denied_accounts(state: SiteState) -> list[str]:
    """Return the names of all that may do nothing, in order."""
    return sorted(name for name, account in state.accounts.items() if account.denied)


def revoked_serials(state: SiteState, authority: str) -> list[int]:
    """Return the numbers of all certificates of one CA that brokers are to refuse."""
    signed = (one for account in state.accounts.values() for one in account.certificates)
    return [int(one.serial, 16) for one in signed if one.revoked and one.authority == authority]
