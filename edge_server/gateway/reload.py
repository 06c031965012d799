"""Reload mosquitto and verify that the new ACL and CRL are enforced.

If the revocation list is missing or one line of the access list is malformed, mosquitto 2.0 goes on without them, open
to everybody. So every reload is followed by a probe with the site's own client, and a broker that fails it is stopped.
A number in the access list, its generation, shows that the broker's answers are based on the new files.
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
from edge_server.gateway.broker_probe import BrokerEndpoint, ProbeConnection, open_probe
from edge_server.gateway.probe_access import find_access_faults, find_open_logins
from edge_server.gateway.site_folder import LOCAL_CERTIFICATES, SiteFolder, make_broker_files
from edge_server.gateway.state import SiteState, lock_site, read_state, write_state
from shared.errors import ConfigError, Unreachable

log = logging.getLogger(__name__)

PROGRAM = "mosquitto"
RELOAD_LOCK = ".reload.lock"
RELOAD_TIMEOUT_S = 15.0
"""A broker has read its files again within this time."""
POLL_S = 0.02
STOP_S = 5.0
RESTART_ADVICE = "write its files again by `edge-server site init`, start it, then run `edge-server site check`"


@dataclass(frozen=True)
class ReloadResult:
    """Outcome of a reload.

    Attributes:
        running: A broker was running.
        faults: Faults after the reload; if there are any, the broker was stopped.
    """

    running: bool
    faults: tuple[str, ...] = ()


def broker_endpoint(site: SiteFolder, state: SiteState) -> BrokerEndpoint:
    """Return the endpoint of a site's broker, seen from its own machine."""
    return BrokerEndpoint(state.bind or "127.0.0.1", state.port, site.ca("chain.pem"))


async def find_faults(site: SiteFolder, state: SiteState, pid: int) -> list[str]:
    """Return the access faults of all of a broker's listeners.

    Args:
        pid: Process of the broker. Changes that need a restart, such as a new listener or trusted certificate, are not
            expected before it.
    """
    problems = await find_access_faults(broker_endpoint(site, state), site.gateway(""), state.site, state.generation)
    if await asyncio.to_thread(find_broker, state.servers_port) == pid and _has_loaded_local_certificates(site, pid):
        endpoint = BrokerEndpoint("127.0.0.1", state.servers_port, site.ca("chain.pem"))
        local_problems = await find_access_faults(endpoint, site.gateway(""), state.site, state.generation, local=True)
        problems += [
            type(problem)(f"at its listener for the server, port {state.servers_port}, {problem}")
            for problem in local_problems
        ]
    return problems


def _has_loaded_local_certificates(site: SiteFolder, pid: int) -> bool:
    """Compare the start of a broker with the age of the loopback listener's certificates."""
    with suppress(OSError, psutil.NoSuchProcess):
        return bool(site.gateway(LOCAL_CERTIFICATES).stat().st_mtime < psutil.Process(pid).create_time() + 1)
    return False


def find_broker(port: int) -> int | None:
    """Return the process id of the broker that listens on a port; None if nothing does.

    Raises:
        ConfigError: Another program than mosquitto listens there, or its process is not visible to this user.
    """
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.laddr.port != port:
            continue
        if connection.pid is None:
            raise ConfigError(f"port {port}: another user's process listens there; run this as root")
        try:
            name = psutil.Process(connection.pid).name()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        if name != PROGRAM:
            raise ConfigError(f"port {port}: {name} listens there, not {PROGRAM}; end it, or choose another --port")
        return int(connection.pid)
    return None


async def reload_broker(
    site: SiteFolder, change: Callable[[SiteState], SiteState] = lambda state: state
) -> ReloadResult:
    """Write the broker's files, reload the broker and verify it; stop a broker that fails the verification.

    Args:
        change: Applied to the state first; if it raises, nothing is changed.

    Raises:
        ConfigError: There is no site, another program has the port, or this user lacks the right.
        Unwritable: The disk is full or read-only.
    """
    with lock_site(site.path, RELOAD_LOCK):  # the probe has one client id: two would disconnect each other
        with lock_site(site.path):
            state = change(read_state(site.path))
            state = msgspec.structs.replace(state, generation=state.generation + 1)
            write_state(site.path, state)
            make_broker_files(site, state)
        pid = await asyncio.to_thread(find_broker, state.port)
        if pid is None:
            return ReloadResult(running=False)
        problems = await _reload_and_verify(site, state, pid)
        if problems:
            await stop_broker(pid, state.port)
            log.error("the broker was stopped: after a reload %s; %s", "; ".join(problems), RESTART_ADVICE)
        return ReloadResult(running=True, faults=tuple(problems))


async def _reload_and_verify(site: SiteFolder, state: SiteState, pid: int) -> list[str]:
    """Signal a broker to read its files; return its faults afterwards."""
    endpoint = broker_endpoint(site, state)
    async with AsyncExitStack() as stack:
        probe: ProbeConnection | None = None
        try:  # an earlier connection shows when the files are read, even if new ones are refused
            probe = await stack.enter_async_context(open_probe(endpoint, site.gateway("probe")))
        except Unreachable as error:
            log.debug("the broker refused the probe already before the reload: %s", error)
        try:
            os.kill(pid, signal.SIGHUP)
        except PermissionError:
            raise ConfigError(f"the broker, process {pid}, is another user's: run this as root") from None
        topic = probe_topic(state.site, state.generation)
        try:
            async with asyncio.timeout(RELOAD_TIMEOUT_S):
                while not await _is_new_acl_active(probe, endpoint, site, topic):
                    if problems := await find_open_logins(endpoint, site.gateway("")):
                        return problems  # without a revocation list, mosquitto does not read its access list either
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return [f"it did not apply the new access list within {RELOAD_TIMEOUT_S:.0f} s"]
        except Unreachable as error:
            return [f"it closed the connection ({error})"]
    return await find_faults(site, state, pid)


async def _is_new_acl_active(
    connection: ProbeConnection | None, endpoint: BrokerEndpoint, site: SiteFolder, topic: str
) -> bool:
    """Check whether the broker allows what only its new access list does."""
    if connection:
        return not await connection.publish(topic)
    try:
        async with open_probe(endpoint, site.gateway("probe")) as probe:
            return not await probe.publish(topic)
    except Unreachable as error:
        log.debug("the probe cannot connect yet: %s", error)
        return False


async def stop_broker(pid: int, port: int) -> None:
    """End a broker's process, and wait until its port is free."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = asyncio.get_running_loop().time() + STOP_S
        while asyncio.get_running_loop().time() < deadline:
            if await asyncio.to_thread(find_broker, port) != pid:
                return
            await asyncio.sleep(POLL_S)
