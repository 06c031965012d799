"""Who was revoked at a site, for a server that is at work: read again whenever the site's state was written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from edge_server.plan.server_config import ServerConfig
from shared.config import read
from shared.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "state.json"
LOOK_S = 0.5
"""Between two looks; within two seconds nothing of a revoked device passes, with time to spare for a busy gateway."""


class _Account(msgspec.Struct, frozen=True):
    denied: bool = False


class _State(msgspec.Struct, frozen=True):
    """What of `state.SiteState` matters here; that module signs, and loads what it takes to."""

    accounts: dict[str, _Account] = {}


def read_denied(folder: Path) -> frozenset[str]:
    """Return the accounts of a site that may do nothing.

    Raises:
        ConfigError: There is no site, or its state cannot be read.
    """
    found = read(folder / FILE, _State)
    return frozenset(name for name, account in found.accounts.items() if account.denied)


async def watch_denied(config: ServerConfig, apply: Callable[[frozenset[str]], Awaitable[None]]) -> None:
    """Hand on who is revoked at the site of a server, now and whenever that changes, until cancelled.

    What cannot be read leaves those denied who were.

    Args:
        config: Of the server; without a gateway's folder nothing is done.
        apply: Is given all of them.
    """
    path, seen, told = Path(config.gateway) / FILE, (0, 0), ""
    while config.gateway:
        try:
            stat = path.stat()
            if seen != (seen := (stat.st_mtime_ns, stat.st_ino)):
                await apply(read_denied(path.parent))
            told = ""
        except (ConfigError, OSError) as error:
            if told != (told := str(error)):
                log.warning("gateway: who is revoked cannot be read: %s; see `edge-server site check`", error)
        await asyncio.sleep(LOOK_S)
