"""Enrolment ledger: tokens and boards that wait for approval, in one JSON file.

The service and the operator's commands take turns to write it, by its lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from edge_server.gateway.enrolment.tokens import TokenRecord
from edge_server.gateway.state import lock_site
from shared.errors import ConfigError
from shared.runtime.durable import replace_file

FILE, LOCK = "enrolment.json", ".enrolment.lock"
VERSION: Literal[1] = 1
PRIVATE = 0o600
MOST_BYTES = 64 << 20


class EnrolmentLedger(msgspec.Struct, kw_only=True):
    """Content of the ledger.

    Attributes:
        pending: Boards that asked for a renewal too late, with the SHA-256 of their key.
        approved: Those of them that the operator approved.
        roots: SHA-256 of the root that a board trusts, hexadecimal, from its token or its own report.
    """

    version: Literal[1] = VERSION
    tokens: dict[str, TokenRecord] = {}
    pending: dict[str, str] = {}
    approved: dict[str, str] = {}
    roots: dict[str, str] = {}


@contextmanager
def edit_ledger(folder: Path) -> Iterator[EnrolmentLedger]:
    """Lock a site's ledger for the block and write its changes afterwards, unless the block raises.

    Raises:
        ConfigError: The folder is missing or not writable, or the file is damaged or of a newer version.
        Unwritable: The disk is full or read-only.
    """
    with lock_site(folder, LOCK):
        path = folder / FILE
        before = _read(path)
        ledger = _decode(before, path)
        yield ledger
        after = msgspec.json.encode(ledger)
        if after != before:
            _write(path, after)


def read_ledger(folder: Path) -> EnrolmentLedger:
    """Read the ledger without its lock.

    Raises:
        ConfigError: As `edit_ledger`.
    """
    return _decode(_read(folder / FILE), folder / FILE)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run this as the site's user") from error


def _decode(data: bytes, path: Path) -> EnrolmentLedger:
    if not data:
        return EnrolmentLedger()
    try:
        return msgspec.json.decode(data, type=EnrolmentLedger)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        hint = "restore it from a backup, or move it away: boards stay enrolled, open tokens are lost"
        raise ConfigError(f"{path}: not a ledger of version {VERSION} ({error}); {hint}") from error


def _write(path: Path, data: bytes) -> None:
    about = path.parent.stat()
    owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None  # root may write for the service's user
    replace_file(path, data, mode=PRIVATE, owner=owner)
