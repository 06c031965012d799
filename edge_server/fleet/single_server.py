"""Whether this is the only server of its site: two have one name, and throw each other off the broker for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from shared.errors import ConfigError, WireError
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import SERVER, topic
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

SESSIONS = 2
"""Of another process, since ours was born: a single one may be the late will of whoever was here before."""
MOST_KNOWN = 64


async def is_another_server(inbox: Inbox, instance: str, connections: Callable[[], int]) -> bool:
    """Return when another process has been the site's server since this one was: whether it was so before, too.

    A word alone proves nothing, anybody may speak it: another server has our client id, and to connect under that is
    to throw us off the broker.

    Args:
        inbox: The server's own statuses.
        connections: How often this process has connected to the broker so far.
    """
    born, before, since = 0, set[str](), set[int]()
    async for _, data in inbox:
        with suppress(WireError):
            status = wire.decode_as(Status, data)
            if status.instance == instance:
                born = born or connections()
            elif not born and len(before) < MOST_KNOWN:
                before.add(status.instance)
            elif born and connections() > born + len(since):
                since.add(status.session)
            if len(since) == SESSIONS:
                return status.instance in before
    return False


async def require_single_server(
    transport: Transport, site: str, instance: str, *, connections: Callable[[], int], gives_way: bool
) -> None:
    """Watch for another server until cancelled, and say so.

    Args:
        transport: To the site's broker.
        site: Name of the site.
        connections: How often this process has connected to the broker so far.
        gives_way: Whether this server ends where another was first.

    Raises:
        ConfigError: There is one that was here first, and this one gives way.
    """
    async with transport.subscribe(topic(site, SERVER, "status")) as inbox:
        is_second = await is_another_server(inbox, instance, connections)
    problem = (
        f"another server is at work at site {site!r}, and the two throw each other off the broker: "
        "end it, or give one of them a site of its own"
    )
    if is_second and gives_way:
        raise ConfigError(problem)
    log.error("%s", problem)
