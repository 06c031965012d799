"""Have the broker take its files anew, and see that it did: a reload that fails leaves mosquitto 2.0 open to everybody.

A list of revoked certificates that is missing, or one line of the access list that it cannot read, and the broker goes
on without them. So whoever reloads it asks it afterwards by a client of the site's own; a broker that does not answer
as it must is stopped. That its answers are of the new files, a number in the access list shows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import msgspec
import psutil  # type: ignore[import-untyped]

from edge_server.gateway.broker_files import probe_topic
from edge_server.gateway.probe_access import REFUSED, Caller, Door, call, faults, strangers
from edge_server.gateway.site_folder import OWN, SiteFolder, make_broker_files
from edge_server.gateway.state import SiteState, locked, read_state, write_state
from shared.errors import ConfigError, Unreachable

log = logging.getLogger(__name__)

PROGRAM = "mosquitto"
RELOAD_LOCK = ".reload.lock"
TAKEN_S = 15.0
"""Within which a broker has taken its files anew."""
LOOK_S = 0.02
STOP_S = 5.0
AGAIN = "`edge-server site init` makes its files anew; then start it, and look by `edge-server site check`"


@dataclass(frozen=True)
class Reloaded:
    """What became of a reload.

    Attributes:
        running: Whether there was a broker.
        faults: What it did wrong afterwards; if anything, it was stopped.
    """

    running: bool
    faults: tuple[str, ...] = ()


def broker_door(site: SiteFolder, state: SiteState) -> Door:
    """Return where a site's broker is reached from its own machine."""
    return Door(state.bind or "127.0.0.1", state.port, site.ca("chain.pem"))


async def all_faults(site: SiteFolder, state: SiteState, pid: int) -> list[str]:
    """Return what a broker does wrong at any of its listeners: for boards, and for the server's own processes.

    Args:
        pid: Of the broker. What it opens at a restart alone, as a listener or a trusted certificate, is not asked.
    """
    found = await faults(broker_door(site, state), site.gateway(""), state.site, state.generation)
    if await asyncio.to_thread(find_broker, state.servers_port) == pid and _has_read_own(site, pid):
        door = Door("127.0.0.1", state.servers_port, site.ca("chain.pem"))
        own = await faults(door, site.gateway(""), state.site, state.generation, own=True)
        found += [type(one)(f"at its listener for the server, port {state.servers_port}, {one}") for one in own]
    return found


def _has_read_own(site: SiteFolder, pid: int) -> bool:
    """Compare the start of a broker with the age of the certificates for its listener on loopback."""
    with suppress(OSError, psutil.NoSuchProcess):
        return bool(site.gateway(OWN).stat().st_mtime < psutil.Process(pid).create_time() + 1)
    return False


def find_broker(port: int) -> int | None:
    """Return the process of the broker that listens on a port; None where nobody does.

    Raises:
        ConfigError: What listens there is not mosquitto, or its process may not be seen.
    """
    for one in psutil.net_connections("tcp"):
        if one.status != psutil.CONN_LISTEN or not one.laddr or one.laddr.port != port:
            continue
        if one.pid is None:
            raise ConfigError(f"port {port}: another user's process listens there; run this as root")
        try:
            name = psutil.Process(one.pid).name()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
        if name != PROGRAM:
            raise ConfigError(f"port {port}: {name} listens there, not {PROGRAM}; end it, or choose another --port")
        return int(one.pid)
    return None


async def reload_broker(site: SiteFolder, change: Callable[[SiteState], SiteState] = lambda state: state) -> Reloaded:
    """Write what the broker reads as the site's state wants it, have it taken, and see that it is heeded.

    A broker that does not heed it is stopped before this returns.

    Args:
        change: What becomes of the state first; what it raises leaves all as it was.

    Raises:
        ConfigError: There is no site, another program has the port, or this user may not.
        Unwritable: The disk takes nothing more.
    """
    with locked(site.path, RELOAD_LOCK):  # the probe is one client id: two would throw each other out
        with locked(site.path):
            state = change(read_state(site.path))
            state = msgspec.structs.replace(state, generation=state.generation + 1)
            write_state(site.path, state)
            make_broker_files(site, state)
        pid = await asyncio.to_thread(find_broker, state.port)
        if pid is None:
            return Reloaded(running=False)
        found = await _signalled(site, state, pid)
        if found:
            await stop_broker(pid, state.port)
            log.error("the broker was stopped: after a reload %s; %s", "; ".join(found), AGAIN)
        return Reloaded(running=True, faults=tuple(found))


async def _signalled(site: SiteFolder, state: SiteState, pid: int) -> list[str]:
    """Have a broker read its files; return what it does wrong then."""
    door = broker_door(site, state)
    async with AsyncExitStack() as stack:
        witness: Caller | None = None
        try:  # a connection from before says when the files are taken, whatever becomes of new ones
            witness = await stack.enter_async_context(call(door, site.gateway("probe")))
        except Unreachable as error:
            log.debug("the broker let the probe in no more even before: %s", error)
        try:
            os.kill(pid, signal.SIGHUP)
        except PermissionError:
            raise ConfigError(f"the broker, process {pid}, is another user's: run this as root") from None
        topic = probe_topic(state.site, state.generation)
        try:
            async with asyncio.timeout(TAKEN_S):
                while not await _has_taken(witness, door, site, topic):
                    if found := await strangers(door, site.gateway("")):
                        return found  # mosquitto does not come to its access list where it finds no revocation list
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return [f"it did not heed the new access list within {TAKEN_S:.0f} s"]
        except Unreachable as error:
            return [f"it hung up ({error})"]
    return await all_faults(site, state, pid)


async def _has_taken(witness: Caller | None, door: Door, site: SiteFolder, topic: str) -> bool:
    """Tell whether the broker allows what only its new access list does."""
    if witness:
        return await witness.publish(topic) < REFUSED
    try:
        async with call(door, site.gateway("probe")) as probe:
            return await probe.publish(topic) < REFUSED
    except Unreachable as error:
        log.debug("not yet: %s", error)
        return False


async def stop_broker(pid: int, port: int) -> None:
    """End a broker; return when nobody listens any more."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = asyncio.get_running_loop().time() + STOP_S
        while asyncio.get_running_loop().time() < deadline:
            if await asyncio.to_thread(find_broker, port) != pid:
                return
            await asyncio.sleep(LOOK_S)
