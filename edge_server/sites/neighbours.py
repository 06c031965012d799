"""Neighbours of a site for its rounds: joint decisions and model mixing.

The same code runs over brokers, and over memory in virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.hcef_budget import Place
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord, Gossiped, RunOpened
from edge_server.learner import initial_network, plan_algorithm
from edge_server.plan.plan import Plan
from edge_server.plan.sites import round_position
from edge_server.sites.coordinate import Coordination
from edge_server.sites.gossip import Gossip
from edge_server.sites.graph import devices_of_sites, edges_of, neighbours_of, sizes_of
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.matrix import Row, mixing_rows, row_without
from edge_server.sites.mixing import mix_trees, sketch_tree
from edge_server.sites.model_bounds import REASON as NORM
from edge_server.sites.model_bounds import parameters_of, require_near
from edge_server.sites.model_payload import pack_model, read_model, require_model
from edge_server.sites.site_energy import SiteEnergy
from edge_server.sites.sketch import distance
from shared.algorithms.base import Mixing
from shared.errors import ConfigError
from shared.models.build import DRAW
from shared.runtime.executor import Worker, background
from shared.tensors.tree import State, Tree


@dataclass(frozen=True)
class ConnectedNeighbours:
    """Implementation of `edge_server.rounds.neighbours` over links.

    Attributes:
        row: The site's row of the mixing matrix.
        mixing: The algorithm's choice of what is mixed.
        first: Creates the run's initial state.
        last_mixed: Sketch of our parameters after the last gossip with each neighbour's model.
    """

    site: str
    row: Row
    mixing: Mixing
    gossip: Gossip
    coordination: Coordination
    worker: Worker
    most_norm: float
    first: Callable[[], State]
    last_mixed: dict[str, bytes]

    async def begin(self, number: int) -> None:
        """Announce the round to the neighbours."""
        await self.gossip.links.announce_round(self.gossip.neighbours, self.gossip.identity.run, number)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return the decision for this site's devices, by the coordinator or, if none answers, locally."""
        return await self.coordination.decide(case, number)

    async def mix(self, number: int, state: State) -> State:
        """Return the state after a gossip step."""
        model = self.mixing.shared_tree(state)
        packed, drift = await self.worker(pack_model, model), await self.worker(self._measure_drift, model)

        def require(peer: str, data: memoryview) -> None:
            require_model(data, model)
            require_near(read_model(data), model, drift[peer], self.most_norm)

        received, gossiped = await self.gossip.exchange(number, packed, require)
        mixed = await self.worker(self._mix, model, received)
        before, after = await self.worker(sketch_tree, model), await self.worker(sketch_tree, mixed)
        trained = parameters_of(mixed)
        parameters = b"" if trained.keys() == mixed.keys() else await self.worker(sketch_tree, trained)
        gossiped = msgspec.structs.replace(gossiped, before=before, after=after, parameters=parameters)
        await self.gossip.conclude(gossiped)
        self.last_mixed.update(parameters_after(gossiped))
        return self.mixing.with_mean(state, mixed)

    def _measure_drift(self, model: Tree) -> dict[str, float | None]:
        """Return the distance of the parameters from each neighbour's last model, or from the initial one."""
        if missing := set(self.gossip.neighbours) - self.last_mixed.keys():
            self.last_mixed.update(
                dict.fromkeys(missing, sketch_tree(parameters_of(self.mixing.shared_tree(self.first()))))
            )
        now = sketch_tree(parameters_of(model))
        return {peer: distance(now, self.last_mixed[peer]) for peer in self.gossip.neighbours}

    async def leave(self) -> None:
        """Announce the end of the run, once every neighbour has settled the last edges."""
        await self.gossip.wait_for_verdicts()
        await self.gossip.links.end()

    def _mix(self, model: Tree, received: Mapping[str, memoryview]) -> Tree:
        trees = {self.site: model, **{peer: read_model(data) for peer, data in received.items()}}
        row = row_without(self.row, self.site, [other for other in self.row if other not in trees])
        return mix_trees(row, trees)


def parameters_after(gossiped: Gossiped) -> dict[str, bytes]:
    """Return the sketch of our parameters after a gossip, for each neighbour whose model arrived."""
    peers = [*gossiped.on, *(peer for peer, cause in gossiped.off.items() if cause == NORM)]
    return dict.fromkeys(peers, gossiped.parameters or gossiped.after)


def require_peers(plan: Plan, site: str, peers: Iterable[str]) -> None:
    """Refuse peers that are not the plan's other sites.

    Raises:
        ConfigError: A peer or the server's own site is not in the plan, or a site has no peer.
    """
    assert plan.sites
    names, peer_sites = plan.sites.names, list(peers)
    sites = f"plan {plan.name!r} has the sites {', '.join(names)}"
    if site not in names:
        raise ConfigError(f"site: {site!r}: {sites}; name one of them")
    if unknown := [peer for peer in peer_sites if peer not in names]:
        raise ConfigError(f"peer.site: {unknown[0]!r}: {sites}; correct that [[peer]], or take it out")
    if missing := [name for name in names if name != site and name not in peer_sites]:
        raise ConfigError(f"peer: no [[peer]] with site = {missing[0]!r}: {sites}; add where its broker is")


@asynccontextmanager
async def join_peers(
    plan: Plan, identity: SiteIdentity, links: Links, services: SiteServices, records: Iterable[AnyRecord]
) -> AsyncIterator[ConnectedNeighbours]:
    """Connect a site's rounds to its peers during the block.

    Args:
        plan: The run's plan; its algorithm must support mixing.
    """
    journal, edges, mixing = list(records), edges_of(plan), plan_algorithm(plan).mixing
    assert mixing
    near = neighbours_of(identity.site, edges)
    gossip = Gossip(identity, near, links, services)
    energy = SiteEnergy(
        *(identity, services, partial(locate_round, plan)),
        allowance=compute_allowance(plan, identity.site),
        joules=plan.budget.joules or 0.0,
    )
    coordination = Coordination(identity, links, services, energy, devices_of_sites(plan))
    gossip.restore(journal)
    coordination.restore(journal)
    row = mixing_rows(sizes_of(plan), edges)[identity.site]
    last_mixed = dict[str, bytes]()
    for record in journal:
        if isinstance(record, Gossiped):
            last_mixed.update(parameters_after(record))
    async with background(*map(gossip.served.serve, near)), links.listening():
        yield ConnectedNeighbours(
            site=identity.site,
            row=row,
            mixing=mixing,
            gossip=gossip,
            coordination=coordination,
            worker=services.worker,
            most_norm=plan.round.most_norm,
            first=partial(initial_state, plan, journal),
            last_mixed=last_mixed,
        )


def initial_state(plan: Plan, records: Iterable[AnyRecord]) -> State:
    """Return the initial state of a new or recorded run."""
    draw = next((record.draw for record in records if isinstance(record, RunOpened)), DRAW)
    return plan_algorithm(plan).init(initial_network(plan, draw), plan.seed)


def locate_round(plan: Plan, number: int) -> Place:
    """Return a run's progress at the beginning of a round."""
    assert plan.sites
    edge_rounds = plan.sites.edge_rounds
    over, edge_over = round_position(min(number, plan.rounds), edge_rounds)
    return Place(over, plan.rounds // edge_rounds, edge_over, edge_rounds)


def compute_allowance(plan: Plan, site: str) -> float:
    """Return a site's share of the plan's joules, by its number of devices; 0 without a budget."""
    sizes = sizes_of(plan)
    return (plan.budget.joules or 0.0) * sizes[site] / sum(sizes.values())
