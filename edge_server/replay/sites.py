"""Several sites in one virtual time, with simulated links between their brokers.

The servers exchange the same messages as in a live run. Every link has the backhaul's rate and delay per direction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from edge_server.allocation.coordinator import decide
from edge_server.allocation.inputs import Case
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import Store
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.participants import Participants
from edge_server.replay.play import ReplaySite, couple_jobs_to_time, serve_devices
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.run import run_plan
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links, SitePresence, encode_plan
from edge_server.sites.neighbours import join_peers
from shared.tensors.tree import State
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate

ServerSeconds: TypeAlias = Mapping[str, Callable[..., float]]
"""Seconds of a server's calculations, by name."""
# Limit on the size of a neighbour's model.
MOST_MODEL_BYTES = 8 << 30


def backhaul(sites: SitesPlan) -> Rate:
    """Return the rate and delay of the link between two sites."""
    rate = None if sites.backhaul_mbit_s is None else sites.backhaul_mbit_s * 1e6
    return Rate(rate, rate, sites.backhaul_delay_s)


SiteDecisions: TypeAlias = Mapping[str, Mapping[int, Decision]]
"""Recorded decisions by site and round."""


class SiteRecord(NamedTuple):
    """Store of a site's run and its recorded decisions; None to decide them again."""

    store: Store
    decisions: Mapping[int, Decision] | None


@dataclass(frozen=True)
class DecidedNeighbours:
    """Neighbours that mix models but repeat recorded decisions.

    Attributes:
        decisions: By round; a round without an entry decides nothing for any device.
    """

    others: Neighbours
    decisions: Mapping[int, Decision]

    async def begin(self, number: int) -> None:
        """Announce the start of a round to the neighbours."""
        await self.others.begin(number)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return the recorded decision of a round."""
        del case
        return self.decisions.get(number, Decision())

    async def mix(self, number: int, state: State) -> State:
        """Return the state after a gossip step."""
        return await self.others.mix(number, state)

    async def leave(self) -> None:
        """Announce the end of the run to the neighbours."""
        await self.others.leave()


async def play_sites(
    plan: Plan,
    stores: Mapping[str, Store],
    participants: Participants,
    server_s: Mapping[str, ServerSeconds],
    decisions: SiteDecisions | None = None,
) -> dict[str, State]:
    """Run a plan at all its sites on the running loop's virtual time; return each server's final state.

    Args:
        stores: Store of each site's run; its folder has the run's name.
        server_s: Seconds of each site's server calculations; sites without an entry use those of the participants.
        decisions: Recorded decisions to repeat; None to decide them again.

    Raises:
        FieldFleetError: A site's run failed; the first of several.
    """
    assert plan.sites
    couple_jobs_to_time(participants)
    clusters = devices_by_site(plan.sites, [device.name for device in participants.fleet])
    places = {site: ReplaySite(site, frozenset(devices), MemoryTransport()) for site, devices in clusters.items()}
    records = {site: SiteRecord(store, decisions[site] if decisions else None) for site, store in stores.items()}
    ended = asyncio.Barrier(len(places))
    casts = {site: replace(participants, server_s=server_s.get(site, participants.server_s)) for site in places}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {
                site: group.create_task(
                    _play_site(plan, places, records[site], site_participants, site, ended), name=f"site {site}"
                )
                for site, site_participants in casts.items()
            }
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return {site: task.result() for site, task in tasks.items()}


async def _play_site(
    plan: Plan,
    places: Mapping[str, ReplaySite],
    record: SiteRecord,
    participants: Participants,
    site: str,
    ended: asyncio.Barrier,
) -> State:
    """Run a plan at one site and serve its neighbours until all sites have ended."""
    store, decisions = record
    run = store.folder.name
    async with (
        serve_devices(plan, run, participants, places[site]) as server,
        _link_peers(plan, participants, store, places, server) as neighbours,
    ):
        graph = make_evaluation_graph(plan)
        others = neighbours if decisions is None else DecidedNeighbours(neighbours, decisions)
        link = LinkConfig()
        state = await run_plan(
            plan, run, server, store, link, started="", draw=participants.draw, graph=graph, neighbours=others
        )
        await ended.wait()
        return state


@asynccontextmanager
async def _link_peers(
    plan: Plan, participants: Participants, store: Store, places: Mapping[str, ReplaySite], server: Server
) -> AsyncIterator[Neighbours]:
    """Link a site to the brokers of the other sites while the block lasts."""
    sites, site = plan.sites, server.site
    assert sites
    rate, described, names, run = backhaul(sites), encode_plan(plan), list(places), store.folder.name
    remote_links = {
        peer: Link(place.broker, rate, server.clock, seed=names.index(peer))
        for peer, place in places.items()
        if peer != site
    }
    born = {peer: SitePresence(site, peer, run, run, described) for peer in remote_links}
    for peer, link in remote_links.items():
        presence = born[peer].presence()
        await link.publish(presence.topic, presence.birth, retain=True)
    links = Links(site, places[site].broker, remote_links, described, born)
    folder = participants.folder / f"{site}.neighbours"  # not in the run's folder: a replay is never resumed
    identity = SiteIdentity(site, sites.names, run, folder, sites.deadline_s)

    async def keep(record: AnyRecord) -> None:
        store.append(record)

    means = SiteServices(
        keep=keep,
        decide_case=partial(decide, plan.optimizer) if plan.optimizer else lambda _case: Decision(),
        policy=LinkConfig().policy(MOST_MODEL_BYTES),
        clock=server.clock,
        worker=server.worker,
    )
    async with join_peers(plan, identity, links, means, store.records()) as neighbours:
        yield neighbours
