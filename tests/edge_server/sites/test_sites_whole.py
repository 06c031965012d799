"""Hierarchical FedAvg on two sites with real agents, in one virtual time; `trial/chaos` kills it over real brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from edge_server.allocation.coordinator import decide
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.decision import Coordinated, Decision
from edge_server.journal.records import (
    AnyRecord,
    EdgeSettled,
    Gossiped,
    RoundClosed,
    RoundOpened,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_plan import load
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.run import run_plan
from edge_server.sites.graph import graph_edges
from edge_server.sites.identity import SiteIdentity
from edge_server.sites.link import Links, SitePresence, encode_plan
from edge_server.sites.matrix import mixing_rows
from edge_server.sites.mixing import mix_trees
from edge_server.sites.model_payload import pack_model, require_model
from edge_server.sites.neighbours import SiteServices, join_peers
from edge_server.sites.overview import summarise_sites
from shared.errors import WireError
from shared.runtime.executor import inline
from shared.tensors.tree import State
from tests.edge_server.fleets import FRAME_BYTES, RUN, Network, Site, Stopping
from tests.edge_server.harness import beginning, virtual, write_examples, write_plan
from tests.edge_server.textbook import require_equal, textbook_round

pytestmark = pytest.mark.virtual_time

HOMES = {"north": "a", "south": "b"}
ROUNDS, EDGE_ROUNDS = 4, 2
TOGETHER = f"""
[sites]
edge_rounds = {EDGE_ROUNDS}
graph = "full"
deadline_s = 600.0
clusters = {{ north = ["a"], south = ["b"] }}
[[device]]
name = "a"
[[device]]
name = "b"
"""


def planned(folder: Path, more: str = "") -> Plan:
    """Write a plan of two sites with a device each; return it as a server reads it."""
    path = write_plan(
        folder,
        rounds=ROUNDS,
        model='name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }',
        hyper="local_epochs = 1\nbatch_size = 8\nlearning_rate = 0.2",
        cohort="min_devices = 1",
        evaluation="every = 1",
        data=write_examples(folder),
        partition='kind = "even"',
        more=TOGETHER + more,
    )
    return load(path, folder, several_sites=True)


@dataclass
class Region:
    """Two sites in one virtual time, each with its broker, its agent and its folder."""

    plan: Plan
    folder: Path

    def __post_init__(self) -> None:
        self.sites = {name: Site(Network(), self.plan, self.folder / name, name) for name in HOMES}
        self.processes = 0
        self.hostile: dict[str, Callable[[Neighbours], Neighbours]] = {}

    async def serve(self, name: str, store: SqliteStore | None = None) -> tuple[State, list[AnyRecord]]:
        """Be the server of a site, from where its folder says it stands."""
        clock, brokers = asyncio.get_running_loop().time, {one: site.network.memory for one, site in self.sites.items()}
        away = {other: memory for other, memory in brokers.items() if other != name}
        store, self.processes = store or SqliteStore(self.sites[name].folder / RUN, durable=False), self.processes + 1
        links = Links(name, brokers[name], away, encode_plan(self.plan))
        for other, memory in away.items():
            born = SitePresence(name, other, RUN, str(self.processes), links.plan).presence()
            await memory.publish(born.topic, born.birth, retain=True)
        config = LinkConfig(frame_bytes=FRAME_BYTES)

        async def keep(record: AnyRecord) -> None:
            store.append(record)

        decides = partial(decide, self.plan.optimizer) if self.plan.optimizer else lambda _case: Decision()
        means = SiteServices(keep, decides, config.policy(1 << 20), clock, inline)
        us = SiteIdentity(name, tuple(HOMES), RUN, store.folder, self.plan.sites.deadline_s)
        server = Server(name, brokers[name], clock, inline, was_run=lambda run: run == RUN)
        join = partial(join_peers, self.plan, us, links, means, store.records())
        try:
            async with server.listening(), join() as neighbours:
                others = self.hostile.get(name, lambda one: one)(neighbours)
                about = {"started": "", "members": frozenset(HOMES[name]), "neighbours": others}
                state = await run_plan(self.plan, RUN, server, store, config, **about)
            return state, store.records()
        finally:
            store.close()

    async def serve_twice(self, name: str, cut) -> tuple[State, list[AnyRecord]]:
        """Be a server that ends when `cut` says so of what it wrote, and another that goes on."""
        await self.serve_until(name, cut)
        return await self.serve(name)

    async def serve_until(self, name: str, cut) -> None:
        """Be a server that ends, without a word, when `cut` says so of what it wrote."""

        async def cut_short() -> None:
            await self.serve(name, Stopping(self.sites[name].folder / RUN, cut))

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(cut_short())

    def play(self, cut=None) -> dict[str, tuple[State, list[AnyRecord]]]:
        """Run the plan; the northern server is ended once where `cut` says so."""

        async def routine():
            async with AsyncExitStack() as stack:
                for name, site in self.sites.items():
                    await stack.enter_async_context(site.devices(HOMES[name]))
                north = self.serve_twice("north", cut) if cut else self.serve("north")
                return dict(zip(HOMES, await asyncio.gather(north, self.serve("south")), strict=True))

        return virtual(routine())


def require_whole(records: list[AnyRecord], device: str, peer: str) -> None:
    """Check that a site's record is as if nothing had happened: every round and update once, every edge on."""
    assert [(one.round, one.arrived) for one in closed_rounds(records)] == [
        (number, (device,)) for number in range(1, ROUNDS + 1)
    ]
    taken = [(one.round, one.device) for one in records if isinstance(one, UpdateAccepted)]
    assert taken == [(number, device) for number in range(1, ROUNDS + 1)]
    settled = {(one.round, one.site): one.on for one in records if isinstance(one, EdgeSettled)}
    assert settled == dict.fromkeys([(number, peer) for number in (2, 4)], True)
    assert isinstance(records[-1], RunClosed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> State:
    """What both sites end with where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ends = Region(planned(folder), folder).play()
    for name, peer in (("north", "south"), ("south", "north")):
        require_whole(ends[name][1], HOMES[name], peer)
    require_equal(ends["north"][0].tree, ends["south"][0].tree)
    return ends["north"][0]


def test_edge_models_are_equal_after_each_gossip_of_a_full_graph(undisturbed, tmp_path):
    """And differ in between; `sites` tells who mixed."""
    ends = Region(planned(tmp_path), tmp_path).play()
    accuracy = {name: [one.test_loss for one in closed_rounds(records)] for name, (_, records) in ends.items()}
    assert accuracy["north"][1::2] == accuracy["south"][1::2]
    assert accuracy["north"][0] != accuracy["south"][0]
    found = summarise_sites(ends["north"][1])
    assert (found.round, found.rounds) == ("1.1", (4, 4))
    [peer] = found.peers
    assert (peer.site, peer.mixed, peer.missed, peer.last, peer.cause) == ("south", 2, 0, "1.1", "")
    assert peer.bytes_up > 0
    require_equal(ends["north"][0].tree, undisturbed.tree)


OPTIMIZER = """
[optimizer]
name = "bandwidth"
options = { up_bits_per_s = 1e7 }
"""


def test_one_site_decides_for_the_devices_of_both(tmp_path):
    """It is recorded by the coordinator with all devices, by each site with its own; after a kill, too."""
    ends = Region(planned(tmp_path, OPTIMIZER), tmp_path).play(lambda written: isinstance(written, Coordinated))
    for name, (_, records) in ends.items():
        opened = [one for one in records if isinstance(one, RoundOpened)]
        assert [one.decision.coordinator for one in opened] == ["north"] * ROUNDS
        assert all(set(one.decision.devices) == {HOMES[name]} for one in opened)
    [*all_of_them] = [one for one in ends["north"][1] if isinstance(one, Coordinated)]
    assert [(one.round, one.term) for one in all_of_them] == [(number, 0) for number in range(1, ROUNDS + 1)]
    assert all(set(one.decision.devices) == {"a", "b"} for one in all_of_them)
    assert summarise_sites(ends["south"][1]).coordinator == "north"


async def test_a_site_that_is_gone_for_good_leaves_the_others_training(tmp_path):
    """It coordinated, and nobody says that it is gone: one deadline for a decision, and two for a gossip's last word.

    The other one takes over, and keeps the weight of its neighbour: from there it is FedAvg of its own device.
    """
    plan = planned(tmp_path, OPTIMIZER)
    plan = msgspec.structs.replace(plan, sites=msgspec.structs.replace(plan.sites, deadline_s=60.0))
    region = Region(plan, tmp_path)
    async with AsyncExitStack() as stack:
        for name, site in region.sites.items():
            await stack.enter_async_context(site.devices(HOMES[name]))
        north = region.serve_until("north", is_second_closed)
        _, (state, records) = await asyncio.gather(north, region.serve("south"))
        seconds = asyncio.get_running_loop().time()
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
    assert [(one.round, one.off) for one in records if isinstance(one, Gossiped)] == [
        (2, {}),
        (4, {"north": "unheard"}),
    ]
    opened = [one for one in records if isinstance(one, RoundOpened)]
    assert [one.decision.coordinator for one in opened] == ["north", "north", "south", "south"]
    assert seconds < 3 * plan.sites.deadline_s + 60
    sizes, trees = dict.fromkeys(HOMES, 1), dict.fromkeys(HOMES, beginning(plan))
    for number in (1, 2):
        trees = {name: textbook_round(plan, number, trees[name], [device]) for name, device in HOMES.items()}
    mixed = mix_trees(mixing_rows(sizes, graph_edges(plan.sites))["south"], trees)
    require_equal(state.tree, textbook_round(plan, 4, textbook_round(plan, 3, mixed, ["b"]), ["b"]))


def is_second_closed(written: object) -> bool:
    return isinstance(written, RoundClosed) and written.round == EDGE_ROUNDS


def like() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(2, 3), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"w": torch.zeros(3, 2)}, "shape"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, "dtype"),
        ({"w": torch.full((2, 3), float("nan"))}, "not-finite"),
        ({"more": torch.zeros(1)}, "unknown-tensor"),
        ({"b": None}, "shape"),
    ],
)
def test_a_neighbours_model_that_is_not_like_ours(change, reason):
    """By the same words as a device's update."""
    tree = {key: leaf for key, leaf in (like() | change).items() if leaf is not None}
    with pytest.raises(WireError) as caught:
        require_model(memoryview(bytearray().join(pack_model(tree))), like())
    assert caught.value.reason == reason
    require_model(memoryview(bytearray().join(pack_model(like()))), like())


def is_settled(written: object) -> bool:
    return isinstance(written, EdgeSettled)


def is_gossiped(written: object) -> bool:
    return isinstance(written, Gossiped)


def is_taken_before_gossip(written: object) -> bool:
    return isinstance(written, UpdateAccepted) and written.round == EDGE_ROUNDS


@pytest.mark.parametrize("cut", [is_taken_before_gossip, is_settled, is_gossiped, 2])
def test_a_server_that_ends_in_a_gossip_goes_on_to_the_same_bits(undisturbed, tmp_path, cut):
    """Before it, once an edge is settled, once all are, and once the mixed model is stored."""
    ends = Region(planned(tmp_path), tmp_path).play(cut if callable(cut) else lambda written: written == cut)
    for name, peer in (("north", "south"), ("south", "north")):
        require_whole(ends[name][1], HOMES[name], peer)
        require_equal(ends[name][0].tree, undisturbed.tree)
