"""Detect a second server of the same site.

Two servers with one client id disconnect each other from the broker for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from shared.errors import SiteBusy, WireError
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import SERVER, topic
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

SESSIONS = 2
"""Sessions of another process after our birth; a single one may be the last will of an earlier server."""
MOST_KNOWN = 64


async def detect_other_server(inbox: Inbox, instance: str, connections: Callable[[], int]) -> bool:
    """Wait for another server process; return true if it was there before this one.

    A status message alone proves nothing, since anybody may send it: another server uses our client id, so its
    connection also disconnects ours.

    Args:
        inbox: Statuses under the server's own name.
        connections: Returns how often this process has connected to the broker.
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
    """Watch for another server until cancelled, and log an error.

    Args:
        connections: Returns how often this process has connected to the broker.
        gives_way: Whether this server ends if the other one was first.

    Raises:
        SiteBusy: Another server was first, and this one gives way.
    """
    async with transport.subscribe(topic(site, SERVER, "status")) as inbox:
        is_second = await detect_other_server(inbox, instance, connections)
    problem = (
        f"another server runs at site {site!r}, and both disconnect each other from the broker: "
        "stop it, queue the plan there with `edge-server submit PLAN`, or give one of them its own site"
    )
    if is_second and gives_way:
        raise SiteBusy(problem)
    log.error("%s", problem)
