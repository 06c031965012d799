"""Two sites that know each other by certificates alone: rounds, cases, decisions and models pass both access lists."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from edge_server.allocation.inputs import Case
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.decision import Figure
from edge_server.plan.server_config import PeerConfig, ServerConfig
from edge_server.sites.cases import ROUND_JOULES
from edge_server.sites.overview import read_rounds
from edge_server.trial.peers import connect_peers
from shared.tensors.tree import State
from tests.edge_server.gateway.sites import LiveSite, make_site
from tests.edge_server.harness import beginning
from tests.edge_server.sites.test_sites_whole import EDGE_ROUNDS, HOMES, planned
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto

pytestmark = [pytest.mark.broker, needs_mosquitto]


@asynccontextmanager
async def live(sites: dict[str, LiveSite]):
    """Run the brokers of all sites."""
    async with AsyncExitStack() as stack:
        for site in sites.values():
            site.tell_refusals()
            await site.start()
            stack.push_async_callback(site.stop)
        yield


def config_of(sites: dict[str, LiveSite], name: str) -> ServerConfig:
    """Return the file of a site's server: its own broker on loopback, the other's by what that one signed for it."""
    [other] = {*HOMES} - {name}
    peer = PeerConfig(site=other, broker=sites[other].for_board(f"_peer-{name}", "peer"))
    return ServerConfig(plan="none.toml", site=name, broker=sites[name].for_server(), peer=(peer,))


async def test_neighbours_decide_and_mix_by_certificates(tmp_path):
    plan = planned(tmp_path)
    sites = {name: make_site(tmp_path / name, name) for name in HOMES}
    configs = {name: config_of(sites, name) for name in HOMES}
    for site in sites.values():  # who is a peer there stands in the access list
        site.renew_files()
    async with live(sites), AsyncExitStack() as stack:
        servers = {}
        for name, config in configs.items():
            store = SqliteStore(tmp_path / name / "run", durable=False)
            stack.callback(store.close)
            servers[name] = await stack.enter_async_context(connect_peers(config, plan, f"run-of-{name}", store))
        for number in range(1, EDGE_ROUNDS + 1):
            await asyncio.gather(*(one.begin(number) for one in servers.values()))
            cases = {name: case_of(device) for name, device in HOMES.items()}
            found = await asyncio.gather(*(one.decide(cases[name], number) for name, one in servers.items()))
            assert {one.coordinator for one in found} == {"north"}
        states = [State(moved_by(plan, by)) for by in (1.0, 3.0)]
        mixed = await asyncio.gather(
            *(one.mix(EDGE_ROUNDS, state) for one, state in zip(servers.values(), states, strict=True))
        )
        for one in servers.values():
            await one.leave()
        mixed = dict(zip(servers, mixed, strict=True))
    require_equal(mixed["north"].tree, mixed["south"].tree)
    for key, leaf in moved_by(plan, 2.0).items():
        torch.testing.assert_close(mixed["north"].tree[key], leaf)
    assert [read_rounds(tmp_path / name / "run") for name in HOMES] == [{"south": 2}, {"north": 2}]
    assert [site.refusals() for site in sites.values()] == [[], []]


def moved_by(plan, by: float):
    """Return the model that a plan begins with, every parameter changed by the same."""
    return {key: leaf + by for key, leaf in beginning(plan).items()}


def case_of(device: str) -> Case:
    limits = {"deadline_s": 30.0, ROUND_JOULES: 1.0, "spent_joules": 0.0}
    return Case((device,), limits, {device: {"step_s": Figure(1e6, "measured")}})
