"""One site's neighbours, as its rounds see them: who decides, and with whom models are mixed, over any transports.

The same runs over brokers, and over memory in virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.hcef_problem import Place
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord, Gossiped, RunOpened
from edge_server.plan.plan import Plan
from edge_server.plan.sites import round_position
from edge_server.sites.coordinate import Coordination
from edge_server.sites.gossip import Gossip, Keep, Ourselves
from edge_server.sites.graph import devices_of_sites, edges_of, neighbours_of, sizes_of
from edge_server.sites.link import Links
from edge_server.sites.matrix import Row, mixing_rows, row_without
from edge_server.sites.mixing import mix_trees, sketch
from edge_server.sites.model_bounds import REASON as NORM
from edge_server.sites.model_bounds import parameters_of, require_near
from edge_server.sites.sketch import distance
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Mixing
from shared.codecs.dense import dense
from shared.errors import ConfigError, WireError
from shared.models.build import DRAW, build_initial
from shared.protocol.payload import pack, unpack
from shared.registry import build
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker, background
from shared.tensors.tree import State, Tree, check_like
from shared.transfer.receiver import Policy

CODEC = dense()


def require_model(data: memoryview, like: Tree) -> None:
    """Refuse bytes that are no model like ours, before any number of them is read where their outline tells.

    Raises:
        WireError: Other leaves, shapes or dtypes; or a number that is none.
    """
    found = unpack(data)
    outline = CODEC.outline(found)
    check_like(outline, like)
    if missing := sorted(like.keys() - outline.keys()):
        raise WireError(f"{missing[0]!r} and {len(missing) - 1} more tensors are missing", reason="shape")
    check_like(CODEC.decode(found).tree, like)


def packed_model(tree: Tree) -> list[memoryview]:
    """Return a model as it goes out; one that is aggregated again goes out under the same digest."""
    return pack(CODEC.encode(dict(sorted(tree.items())), None)[0])


def read_model(data: memoryview) -> Tree:
    """Return the model that `require_model` has taken; its tensors are views of the bytes."""
    return CODEC.decode(unpack(data)).tree


@dataclass(frozen=True)
class SpeakingNeighbours:
    """One site's neighbours; see `edge_server.rounds.neighbours` for what rounds ask of them.

    Attributes:
        row: What it takes of each model, in the plan's order.
        mixing: Of the method: what of a state is mixed.
        coordination: Finds who decides, and asks or decides.
        most_norm: `round.most_norm`.
        first: Makes the model that the run began with.
        last_mixed: Of each neighbour: our parameters after the last gossip in which we had its model, as a sketch.
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
        """Tell the neighbours which round has begun here."""
        await self.gossip.links.tell_round(self.gossip.neighbours, self.gossip.us.run, number)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return what is decided for this site's devices, by the coordinator of all or, where nobody is, here."""
        return await self.coordination.decide(case, number)

    async def mix(self, number: int, state: State) -> State:
        """Return the state after a gossip step; what of it is mixed says the method."""
        own = self.mixing.shared_tree(state)
        packed, moved = await self.worker(packed_model, own), await self.worker(self._moved, own)

        def require(peer: str, data: memoryview) -> None:
            require_model(data, own)
            require_near(read_model(data), own, moved[peer], self.most_norm)

        found, gossiped = await self.gossip.exchange(number, packed, require)
        mixed = await self.worker(self._mixed, own, found)
        before, after = await self.worker(sketch, own), await self.worker(sketch, mixed)
        trained = parameters_of(mixed)
        parameters = b"" if trained.keys() == mixed.keys() else await self.worker(sketch, trained)
        gossiped = msgspec.structs.replace(gossiped, before=before, after=after, parameters=parameters)
        await self.gossip.conclude(gossiped)
        self.last_mixed.update(parameters_after(gossiped))
        return self.mixing.with_mean(state, mixed)

    def _moved(self, own: Tree) -> dict[str, float | None]:
        """Return how far our parameters have moved since we last had a model of each neighbour, or since the first."""
        if missing := set(self.gossip.neighbours) - self.last_mixed.keys():
            self.last_mixed.update(dict.fromkeys(missing, sketch(parameters_of(self.mixing.shared_tree(self.first())))))
        now = sketch(parameters_of(own))
        return {peer: distance(now, self.last_mixed[peer]) for peer in self.gossip.neighbours}

    async def leave(self) -> None:
        """Say that the run has ended here, once every neighbour has heard how the last edges stand."""
        await self.gossip.linger()
        await self.gossip.links.end()

    def _mixed(self, own: Tree, found: Mapping[str, memoryview]) -> Tree:
        trees = {self.site: own, **{peer: read_model(data) for peer, data in found.items()}}
        row = row_without(self.row, self.site, [other for other in self.row if other not in trees])
        return mix_trees(row, trees)


def parameters_after(gossiped: Gossiped) -> dict[str, bytes]:
    """Return our parameters after a gossip as a sketch, for each neighbour whose model was here."""
    here = [*gossiped.on, *(peer for peer, cause in gossiped.off.items() if cause == NORM)]
    return dict.fromkeys(here, gossiped.parameters or gossiped.after)


def require_peers(plan: Plan, site: str, peers: Iterable[str]) -> None:
    """Refuse a server's peers that are no sites of the plan, or that lack one of its sites.

    Args:
        peers: Sites that its file names.

    Raises:
        ConfigError: As said, or the server's own site is none of the plan's.
    """
    assert plan.sites
    names, told = plan.sites.names, list(peers)
    known = f"plan {plan.name!r} has the sites {', '.join(names)}"
    if site not in names:
        raise ConfigError(f"site: {site!r}: {known}; name one of them")
    if unknown := [one for one in told if one not in names]:
        raise ConfigError(f"peer.site: {unknown[0]!r}: {known}; correct that [[peer]], or take it out")
    if missing := [one for one in names if one != site and one not in told]:
        raise ConfigError(f"peer: no [[peer]] with site = {missing[0]!r}: {known}; add where its broker is")


@dataclass(frozen=True)
class Means:
    """What a site's part in a run of several is made of.

    Attributes:
        decide_case: Decides a case by the plan's optimizer.
        policy: How models are received.
        clock: Seconds.
        worker: Computes, and writes files.
    """

    keep: Keep
    decide_case: Callable[[Case], Decision]
    policy: Policy
    clock: Clock
    worker: Worker


@asynccontextmanager
async def joined(
    plan: Plan, us: Ourselves, links: Links, means: Means, records: Iterable[AnyRecord]
) -> AsyncIterator[SpeakingNeighbours]:
    """Speak with a site's peers while the block lasts.

    Args:
        plan: Of the run; its method can be mixed.
        means: What it does things with.
        records: Of the run so far.
    """
    known, edges, mixing = list(records), edges_of(plan), build(ALGORITHMS, plan.algorithm, "algorithm").mixing
    assert mixing
    near, clock, worker = neighbours_of(us.site, edges), means.clock, means.worker
    gossip = Gossip(us, near, links, means.keep, means.policy, clock, worker)
    coordination = Coordination(
        *(us, links, means.keep, means.decide_case, clock, worker, partial(place_of, plan)),
        allowance=allowance_of(plan, us.site),
        joules=plan.budget.joules or 0.0,
        devices=devices_of_sites(plan),
    )
    gossip.recall(known)
    coordination.recall(known)
    row = mixing_rows(sizes_of(plan), edges)[us.site]
    mixed = dict[str, bytes]()
    for record in known:
        if isinstance(record, Gossiped):
            mixed.update(parameters_after(record))
    bound = plan.round.most_norm, partial(first_state, plan, known), mixed
    async with background(*map(gossip.serve, near)), links.listening():
        yield SpeakingNeighbours(us.site, row, mixing, gossip, coordination, worker, *bound)


def first_state(plan: Plan, records: Iterable[AnyRecord]) -> State:
    """Return the state that a run begins with, or began with by its records."""
    draw = next((record.draw for record in records if isinstance(record, RunOpened)), DRAW)
    return build(ALGORITHMS, plan.algorithm, "algorithm").init(build_initial(plan.model, plan.seed, draw), plan.seed)


def place_of(plan: Plan, number: int) -> Place:
    """Return where a run stands when a round of it begins."""
    assert plan.sites
    edge_rounds = plan.sites.edge_rounds
    over, edge_over = round_position(min(number, plan.rounds), edge_rounds)
    return Place(over, plan.rounds // edge_rounds, edge_over, edge_rounds)


def allowance_of(plan: Plan, site: str) -> float:
    """Return the joules that a site's devices may spend in a run: their share of the plan's; 0 without a budget."""
    sizes = sizes_of(plan)
    return (plan.budget.joules or 0.0) * sizes[site] / sum(sizes.values())
