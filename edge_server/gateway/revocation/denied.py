"""Poll a site's revoked accounts and pass on every change."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from edge_server.plan.server_config import ServerConfig
from shared.config import read
from shared.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "state.json"
BUSY_S = 5.0
POLL_S = 0.5
"""Poll interval; a revoked device must be shut out within two seconds, with spare time for a busy gateway."""

CHANGE_COUNTER = slice(24, 28)
"""Change counter in SQLite's header, see https://www.sqlite.org/fileformat2.html, section 1.3."""


class _Account(msgspec.Struct, frozen=True):
    denied: bool = False


class _State(msgspec.Struct, frozen=True):
    """The part of `state.SiteState` needed here; that module imports the signing code, which is expensive to load."""

    version: int = 1
    accounts: dict[str, _Account] = {}


ACCOUNTS, DENIED_QUERY = "accounts.sqlite", "SELECT name FROM accounts WHERE denied"
"""As in `enrolment.accounts`, since version 2."""


def read_denied(folder: Path) -> frozenset[str]:
    """Return the accounts of a site that have no right.

    Raises:
        ConfigError: There is no site, or its state cannot be read.
    """
    state = read(folder / FILE, _State)
    if state.version == 1:
        return frozenset(name for name, account in state.accounts.items() if account.denied)
    path = (folder / ACCOUNTS).absolute()
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            return frozenset(name for (name,) in connection.execute(DENIED_QUERY))
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; run this as the site's user") from error


def _file_version(folder: Path) -> tuple[object, ...]:
    """Return a value that changes with every change of a site's state or accounts."""
    stat, counter = (folder / FILE).stat(), b""
    with suppress(FileNotFoundError), (folder / ACCOUNTS).open("rb") as file:
        counter = file.read(CHANGE_COUNTER.stop)[CHANGE_COUNTER]
    return stat.st_mtime_ns, stat.st_ino, counter


async def watch_denied(config: ServerConfig, apply: Callable[[frozenset[str]], Awaitable[None]]) -> None:
    """Pass on the revoked accounts of a server's site, now and after each change, until cancelled.

    While they cannot be read, the last known ones stay denied.

    Args:
        config: Server's configuration; without a gateway's folder nothing is done.
        apply: Receives all revoked accounts.
    """
    folder, version, last_error = Path(config.gateway), tuple[object, ...](), ""
    while config.gateway:
        try:
            if version != (version := _file_version(folder)):
                await apply(read_denied(folder))
            last_error = ""
        except (ConfigError, OSError) as error:
            if last_error != (last_error := str(error)):
                log.warning("gateway: the revoked accounts cannot be read: %s; see `edge-server site check`", error)
        await asyncio.sleep(POLL_S)
