"""Who was revoked at a site, for a server that is at work: read again whenever the site's state was written."""

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
LOOK_S = 0.5
"""Between two looks; within two seconds nothing of a revoked device passes, with time to spare for a busy gateway."""

COUNTER = slice(24, 28)
"""Of SQLite's header: it grows with every change, see https://www.sqlite.org/fileformat2.html, section 1.3."""


class _Account(msgspec.Struct, frozen=True):
    denied: bool = False


class _State(msgspec.Struct, frozen=True):
    """What of `state.SiteState` matters here; that module signs, and loads what it takes to."""

    version: int = 1
    accounts: dict[str, _Account] = {}


ACCOUNTS, ASKED = "accounts.sqlite", "SELECT name FROM accounts WHERE denied"
"""As `enrolment.accounts` has them, since version 2."""


def read_denied(folder: Path) -> frozenset[str]:
    """Return the accounts of a site that may do nothing.

    Raises:
        ConfigError: There is no site, or its state cannot be read.
    """
    found = read(folder / FILE, _State)
    if found.version == 1:
        return frozenset(name for name, account in found.accounts.items() if account.denied)
    path = (folder / ACCOUNTS).absolute()
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            return frozenset(name for (name,) in connection.execute(ASKED))
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}; run this as the site's user") from error


def _mark(folder: Path) -> tuple[object, ...]:
    """Return what is another after every change of a site's state or accounts."""
    stat, counter = (folder / FILE).stat(), b""
    with suppress(FileNotFoundError), (folder / ACCOUNTS).open("rb") as file:
        counter = file.read(COUNTER.stop)[COUNTER]
    return stat.st_mtime_ns, stat.st_ino, counter


async def watch_denied(config: ServerConfig, apply: Callable[[frozenset[str]], Awaitable[None]]) -> None:
    """Hand on who is revoked at the site of a server, now and whenever that changes, until cancelled.

    What cannot be read leaves those denied who were.

    Args:
        config: Of the server; without a gateway's folder nothing is done.
        apply: Is given all of them.
    """
    folder, seen, told = Path(config.gateway), tuple[object, ...](), ""
    while config.gateway:
        try:
            if seen != (seen := _mark(folder)):
                await apply(read_denied(folder))
            told = ""
        except (ConfigError, OSError) as error:
            if told != (told := str(error)):
                log.warning("gateway: who is revoked cannot be read: %s; see `edge-server site check`", error)
        await asyncio.sleep(LOOK_S)
