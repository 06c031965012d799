"""Local trial of several sites: each with its broker, server and agents as processes.

The servers communicate over these brokers as between real sites; each records its own run.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import msgspec

from edge_server.fleet.broker import PrivateBroker, run_private_broker
from edge_server.journal.records import AnyRecord, RunClosed
from edge_server.journal.runs import SITES, make_run_name
from edge_server.plan.plan import Plan, devices
from edge_server.plan.sites import devices_by_site
from edge_server.trial.local import SERVER, Local, emulate_link, megabit_rate, run_agent, run_server, until_closed
from edge_server.trial.relay import run_relay
from shared.errors import ConfigError

LONGEST_NAME, LONGEST_SITE = 64, 32
"""Letters of a run's name, and of the site's name in it."""


def local_sites(local: Local) -> dict[str, Local]:
    """Return the trial of each site of a plan, in its order, each with its own folder of runs.

    Args:
        local: The common trial; its `run` is the prefix of the sites' runs.

    Raises:
        ConfigError: A site's name is too long for a run's name.
    """
    sites = local.plan.sites
    assert sites
    for site in sites.names:
        if len(site) > LONGEST_SITE:
            raise ConfigError(f"{local.plan_path}: sites.clusters: {site!r}: give it at most {LONGEST_SITE} letters")
    return {
        site: replace(local, run=f"{local.run}-{site}", site=site, data_dir=local.data_dir / SITES / site)
        for site in sites.names
    }


def new_names(plan: Plan) -> str:
    """Return the common prefix of a trial's runs, short enough for the sites' names to follow."""
    assert plan.sites
    over = len(make_run_name(plan)) + 1 + max(map(len, plan.sites.names)) - LONGEST_NAME
    short = plan.name[: max(1, len(plan.name[:32]) - max(0, over))]
    return make_run_name(msgspec.structs.replace(plan, name=short))


async def run_sites(sites: Mapping[str, Local], tell: Callable[[str, AnyRecord], None]) -> dict[str, RunClosed]:
    """Run a trial of several sites until all their runs have ended; no process is left afterwards.

    Args:
        tell: Receives every record with its site.

    Raises:
        TaskFailed: A server or an agent ended before its site's run did.
        Unreachable: A broker does not start.
    """
    async with AsyncExitStack() as stack:
        brokers = dict[str, PrivateBroker]()
        for site, local in sites.items():
            local.place.mkdir(parents=True, exist_ok=True)
            brokers[site] = await stack.enter_async_context(run_private_broker(local.place, embedded=local.embedded))
        children = {site: {SERVER: await _server(stack, local, brokers)} for site, local in sites.items()}
        for site, local in sites.items():
            children[site] |= await _agents(stack, local, brokers[site])
        ends = {
            site: until_closed(local.folder, children[site], partial(tell, site), local.place)
            for site, local in sites.items()
        }
        return await _await_all(ends)


async def _server(stack: AsyncExitStack, local: Local, brokers: Mapping[str, PrivateBroker]) -> Process:
    others = {
        site: await stack.enter_async_context(emulate_backhaul(local.plan, broker))
        for site, broker in brokers.items()
        if site != local.site
    }
    return await stack.enter_async_context(run_server(local, local.place, brokers[local.site], others))


@asynccontextmanager
async def emulate_backhaul(plan: Plan, broker: PrivateBroker) -> AsyncIterator[PrivateBroker]:
    """Yield a broker as another site's server reaches it, through the emulated backhaul if the plan asks for that."""
    if not (plan.sites and plan.emulation and plan.emulation.links):
        yield broker
        return
    rate = plan.sites.backhaul_mbit_s
    async with run_relay(broker.port, megabit_rate(rate, rate, plan.sites.backhaul_delay_s)) as port:
        yield replace(broker, port=port)


async def _agents(stack: AsyncExitStack, local: Local, broker: PrivateBroker) -> dict[str, Process]:
    """Start the agents of a site; the data is shared among the devices of all sites."""
    assert local.plan.sites
    fleet = devices(local.plan)
    names = [device.name for device in fleet]
    started = dict[str, Process]()
    for name in devices_by_site(local.plan.sites, names)[local.site]:
        index = names.index(name)
        emulated_broker = await stack.enter_async_context(emulate_link(local.plan, fleet[index], broker))
        started[name] = await stack.enter_async_context(run_agent(local, local.place, emulated_broker, fleet, index))
    return started


async def _await_all(ends: Mapping[str, Coroutine[None, None, RunClosed]]) -> dict[str, RunClosed]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {site: group.create_task(end, name=f"site {site}") for site, end in ends.items()}
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return {site: task.result() for site, task in tasks.items()}
