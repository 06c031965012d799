"""Credential sets of a board on disk: key, certificate, CA and membership.

A set is a folder, and `current` links to the active one. So all files of a set are replaced by one rename: no
interruption can combine a certificate with another key. A set that the broker has not accepted yet is never active; the
next attempt removes or continues it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.transport.base import Broker
from shared.transport.tls import TlsSettings

FOLDER = "identity"
CURRENT = "current"
KEY, CERTIFICATE, CA, MEMBERSHIP = "device.key", "device.crt", "ca.crt", "membership.json"
VERSION = 1
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Site membership of this board.

    Attributes:
        token: Id of the enrolment token.
        host: Address of the enrolment service, which also renews the certificate.
        root: SHA-256 of the site's root certificate, hexadecimal.
        broker_host: Address of the site's broker.
        not_before_utc_s: When the certificate was issued, by the site's time.
        not_after_utc_s: When the certificate expires.
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
    """Return the membership of a set; None if the set is missing or incomplete.

    Args:
        folder: Folder of the set, such as `identity/current`.

    Raises:
        ConfigError: It is damaged or of a newer version.
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
        raise ConfigError(f"{folder / MEMBERSHIP}: damaged ({error}); join again with a new token") from error
    if membership.version > VERSION:
        raise ConfigError(f"{folder / MEMBERSHIP}: written by a newer version of this program; update this one")
    return membership


def make_tls(folder: Path) -> TlsSettings:
    """Return the TLS settings of a set; they name files, so they remain valid after a renewal."""
    return TlsSettings(ca=str(folder / CA), cert=str(folder / CERTIFICATE), key=str(folder / KEY))


def make_broker(folder: Path, membership: Membership, like: Broker | None = None) -> Broker:
    """Return the site's broker settings with this board's certificate; `like` provides the other settings."""
    place = {"host": membership.broker_host, "port": membership.broker_port, "tls": make_tls(folder)}
    return msgspec.structs.replace(like or Broker(), **place)


def open_identity(state_dir: Path) -> Path:
    """Create the folder of the board's sets if missing, with access for its user only; return it.

    Raises:
        Unwritable: The disk is full or read-only.
        ConfigError: This user may not write there.
    """
    folder = state_dir / FOLDER
    with explain_disk_errors(folder):
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            folder.chmod(PRIVATE_FOLDER)
            _chown_like(folder, state_dir)
            sync(state_dir)
        except PermissionError as error:
            raise ConfigError(f"{error}; run this as the agent's user, or as root") from error
    return folder


def open_set(identity: Path, name: str) -> Path:
    """Create or continue an inactive set; return its folder.

    Args:
        name: Unique to the attempt.
    """
    folder = identity / name
    with explain_disk_errors(folder):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        _chown_like(folder, identity)
        sync(identity)
    return folder


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a set durably, readable by its user only."""
    about = folder.stat()
    owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None
    replace_file(folder / name, data, mode=PRIVATE, owner=owner)


def activate(identity: Path, folder: Path) -> None:
    """Make a complete set, accepted by the broker, the current one; its files are on disk already."""
    link = identity / f".{CURRENT}.part"
    with explain_disk_errors(link):
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(identity / CURRENT)
        sync(identity)


def remove_unused(identity: Path) -> None:
    """Remove all sets but the current one, as far as possible."""
    used = identity / CURRENT
    target = used.readlink().name if used.is_symlink() else ""
    for path in identity.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != target:
            shutil.rmtree(path, ignore_errors=True)


def _chown_like(path: Path, like: Path) -> None:
    """Give a path created by root to the owner of the folder `like`."""
    if os.geteuid() == 0:
        about = like.stat()
        os.chown(path, about.st_uid, about.st_gid)
