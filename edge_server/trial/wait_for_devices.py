"""Wait for a plan's devices to connect before a trial begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from edge_server.fleet import membership
from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Membership
from edge_server.fleet.task_sender import CONNECT_S
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from shared.errors import ConfigError, Unreachable

log = logging.getLogger(__name__)

MOST_NAMED = 8


async def wait_for_fleet(
    server: Server, plan: Plan, members: Membership, config: ServerConfig, say: Callable[[str], None]
) -> None:
    """Wait for the broker and for the minimum cohort, at most `cohort.wait_s` each.

    Args:
        config: Broker and site for messages.
        say: Shows a line whenever the state changes.

    Raises:
        ConfigError: The plan names fewer devices than it waits for.
        Unreachable: No broker or too few devices; the message names those online and the remedy.
    """
    least, wait_s = plan.cohort.min_devices, plan.cohort.wait_s
    require_enough(plan, members)
    address = f"{config.broker.host}:{config.broker.port}"
    await _broker(server, address, wait_s, say)
    lines = [""]

    def tell(online: tuple[str, ...]) -> None:
        line = f"{len(online)} of {least} devices are connected{_list(online, ': ')}"
        if line != lines[-1]:
            say(line)
            lines.append(line)

    if await membership.wait_for_cohort(server, members, plan.cohort, tell):
        return
    strangers = [device for device in server.fleet.online if not members.takes(device)]
    absent = sorted((members.members or frozenset()) - set(server.fleet.online))
    raise Unreachable(
        f"{lines[-1]}, after {wait_s:g} s at {address}, site {config.site!r}"
        f"{_list(absent, '; named by the plan but offline: ')}"
        f"{_list(strangers, '; online but not named by the plan: ')}. "
        "Start their agents with this broker and site, or change [[device]], cohort.min_devices or cohort.wait_s"
    )


async def wait_without_end(server: Server, plan: Plan, members: Membership) -> None:
    """Wait for the broker and for the minimum cohort without a limit; warn every `cohort.wait_s`.

    Raises:
        ConfigError: The plan names fewer devices than it waits for.
    """
    require_enough(plan, members)
    await server.reachable()
    least, lines = plan.cohort.min_devices, [""]

    def tell(online: tuple[str, ...]) -> None:
        line = f"{len(online)} of {least} devices are connected{_list(online, ': ')}"
        if line != lines[-1]:
            lines.append(line)
            more = f"; waiting for {least - len(online)} more" if len(online) < least else ""
            log.info("%s%s", line, more)

    while not await membership.wait_for_cohort(server, members, plan.cohort, tell):
        log.warning("%s, after another %g s; round 1 waits for them", lines[-1], plan.cohort.wait_s)
        await server.reachable()


def require_enough(plan: Plan, members: Membership) -> None:
    """Refuse a plan that names fewer devices than it waits for.

    Raises:
        ConfigError: It does.
    """
    least = plan.cohort.min_devices
    if members.members is not None and len(members.members) < least:
        raise ConfigError(
            f"plan {plan.name!r} names {len(members.members)} devices but cohort.min_devices is {least}; "
            "name more devices or lower it"
        )


async def _broker(server: Server, address: str, wait_s: float, say: Callable[[str], None]) -> None:
    if server.sender.broker is None or server.sender.broker.is_set():
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(min(CONNECT_S, wait_s / 2)):
            await server.sender.broker.wait()
            return
    say(f"waiting for the broker at {address}")
    try:
        async with asyncio.timeout(wait_s):
            await server.sender.broker.wait()
    except TimeoutError:
        raise Unreachable(
            f"no broker answered at {address} within {wait_s:g} s; start it, name a server's file with --config, "
            "or run the trial on this machine with --local"
        ) from None


def _list(devices: tuple[str, ...] | list[str], before: str) -> str:
    """Return up to `MOST_NAMED` names after a prefix; empty for no names."""
    if not devices:
        return ""
    more = f" and {len(devices) - MOST_NAMED} more" if len(devices) > MOST_NAMED else ""
    return before + ", ".join(devices[:MOST_NAMED]) + more
