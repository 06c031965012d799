"""Key, certificate and CA of a board on its disk: one set is in use, another may stand beside it until it is proven.

A set is a folder of its own, and `current` is a link to the one in use. So all files of a set change places at once, by
one rename: there is no moment, whatever is killed or cut off, at which a certificate stands beside another one's key.
A set that was not proven is never in use, and is swept away, or gone on with, by the next attempt.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.transport.base import Broker
from shared.transport.tls import Tls

FOLDER = "identity"
CURRENT = "current"
KEY, CERTIFICATE, CA, MEMBERSHIP = "device.key", "device.crt", "ca.crt", "membership.json"
VERSION = 1
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Of which site this board is a part, and until when.

    Attributes:
        token: Id of the token it joined by.
        host: Of the enrolment service, where it renews its certificate.
        root: SHA-256 of the site's root certificate, hexadecimal.
        broker_host: Where the site's broker is.
        not_before_utc_s: From when the certificate was given, by the site's time.
        not_after_utc_s: Until when it is valid.
    """

    version: int = VERSION
    device: str
    site: str
    token: str
    host: str
    port: int
    root: str
    broker_host: str
    broker_port: int
    not_before_utc_s: float
    not_after_utc_s: float


def read_membership(folder: Path) -> Membership | None:
    """Return what a set says; None where there is no whole one.

    Args:
        folder: Of the set, such as `identity/current`.

    Raises:
        ConfigError: It is damaged, or of a newer version.
    """
    try:
        data = (folder / MEMBERSHIP).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{folder / MEMBERSHIP}: {error.strerror}; run this as the agent's user") from error
    try:
        membership = msgspec.json.decode(data, type=Membership)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / MEMBERSHIP}: damaged ({error}); join anew by a new token") from error
    if membership.version > VERSION:
        raise ConfigError(f"{folder / MEMBERSHIP}: of a newer version of this program; update it")
    return membership


def tls_of(folder: Path) -> Tls:
    """Return the TLS settings of a set; the certificate's file is the last word, so they hold after a renewal too."""
    return Tls(ca=str(folder / CA), cert=str(folder / CERTIFICATE), key=str(folder / KEY))


def broker_of(folder: Path, membership: Membership, like: Broker | None = None) -> Broker:
    """Return the site's broker, with this board's certificate.

    Args:
        like: Whose other settings to take.
    """
    place = {"host": membership.broker_host, "port": membership.broker_port, "tls": tls_of(folder)}
    return msgspec.structs.replace(like or Broker(), **place)


def open_identity(state_dir: Path) -> Path:
    """Return the folder of a board's sets, made where there is none; nobody else may look into it.

    Raises:
        Unwritable: The disk takes nothing more.
        ConfigError: This user may not write there.
    """
    folder = state_dir / FOLDER
    with explain_disk_errors(folder):
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            folder.chmod(PRIVATE_FOLDER)
            _give(folder, state_dir)
            sync(state_dir)
        except PermissionError as error:
            raise ConfigError(f"{error}; run this as the agent's user, or as root") from error
    return folder


def open_set(identity: Path, name: str) -> Path:
    """Return the folder of a set that is being made, as it was left if it was begun before.

    Args:
        identity: Folder of the sets.
        name: Of this one; none has it but the same attempt.
    """
    folder = identity / name
    with explain_disk_errors(folder):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        _give(folder, identity)
        sync(identity)
    return folder


def keep(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a set, for its user alone; it is on the disk when this returns.

    Args:
        data: What is in it.
    """
    about = folder.stat()
    owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None
    replace_file(folder / name, data, mode=PRIVATE, owner=owner)


def adopt(identity: Path, folder: Path) -> None:
    """Put a whole set, proven, into use; its files are on the disk already.

    Args:
        identity: Folder of the sets.
    """
    link = identity / f".{CURRENT}.part"
    with explain_disk_errors(link):
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(identity / CURRENT)
        sync(identity)


def sweep(identity: Path) -> None:
    """Remove all sets but the one in use; what cannot be removed harms nobody."""
    used = identity / CURRENT
    target = used.readlink().name if used.is_symlink() else ""
    for path in identity.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != target:
            shutil.rmtree(path, ignore_errors=True)


def _give(path: Path, like: Path) -> None:
    """Give what root makes to the user whose folder it is in: the agent."""
    if os.geteuid() == 0:
        about = like.stat()
        os.chown(path, about.st_uid, about.st_gid)
