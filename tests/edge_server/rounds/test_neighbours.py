"""Run of one site among several: mixing, joint decisions, restart."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from edge_server.allocation.coordinator import decide
from edge_server.allocation.inputs import Case
from edge_server.journal import checkpoints
from edge_server.journal.decision import Decision
from edge_server.journal.records import RoundClosed, RoundOpened
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.rounds.check_plan import load
from edge_server.rounds.neighbours import plan_of_site
from shared.errors import ConfigError
from shared.tensors.tree import State, Tree
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import RUN, SITE, Puppet, Site, beginning, moved, site, write_plan
from tests.naming import naming

pytestmark = pytest.mark.virtual_time

DEVICES = '[[device]]\nname = "one"\n[[device]]\nname = "two"\n[[device]]\nname = "far"\ncount = 4'
SITES = f'[sites]\nedge_rounds = 2\nclusters = {{ {SITE} = ["one", "two"], far = ["far-*"] }}'
TABLE = OptimizerPlan(name="clusters")


@dataclass
class Script:
    """Neighbours that add 10 to every number, and decide with an objective of their own."""

    mixed: list[tuple[int, Tree]] = field(default_factory=list)
    asked: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0

    async def begin(self, number: int) -> None:
        self.begun.append(number)

    async def leave(self) -> None:
        self.left += 1

    async def decide(self, case: Case, number: int) -> Decision:
        self.asked.append((number, tuple(case.names)))
        return msgspec.structs.replace(decide(TABLE, case), objective=float(number))

    async def mix(self, number: int, state: State) -> State:
        self.mixed.append((number, state.tree))
        self.going.set()
        await self.open.wait()
        return State({key: leaf + 10 for key, leaf in state.tree.items()}, state.facts)


def willing() -> Script:
    script = Script()
    script.open.set()
    return script


def keys(**sections: str) -> dict[str, object]:
    return {"rounds": 4, "more": f"{SITES}\n{DEVICES}"} | sections


async def answered(here: Site, *puppets: Puppet, by: float = 0.5) -> None:
    for puppet in puppets:
        await puppet.answer(await puppet.task(), moved(here.plan, by))


async def test_the_last_edge_round_of_a_global_round_ends_with_a_mixing(tmp_path):
    """Before its model is kept and before the next round begins: rounds 2 and 4 of 4."""
    script = willing()
    async with site(tmp_path, neighbours=script, **keys()) as here:
        one, two = await here.device("one"), await here.device("two")
        for _ in range(4):
            await answered(here, one, two)
        state, rounds = await here.ended()
        first = beginning(here.plan)
    assert [number for number, _ in script.mixed] == [2, 4]
    assert script.begun == [1, 2, 3, 4]
    for key, leaf in first.items():
        torch.testing.assert_close(script.mixed[0][1][key], leaf + 1.0)
        torch.testing.assert_close(script.mixed[1][1][key], leaf + 12.0)
        torch.testing.assert_close(state.tree[key], leaf + 22.0)
    kept = checkpoints.load(tmp_path / RUN / "checkpoints", 4).tree
    assert all(torch.equal(kept[key], leaf) for key, leaf in state.tree.items())
    assert [closed.outcome for closed in rounds] == ["aggregated"] * 4
    assert script.asked == [], "nothing is decided without an optimizer"


async def test_a_server_that_is_killed_while_it_mixes_mixes_the_same_again(tmp_path):
    """Its devices are not asked again: their updates are stored, and their sum has the same bits."""
    broker, script = MemoryTransport(), Script()
    async with site(tmp_path, broker, neighbours=script, **keys(rounds=2)) as here:
        one, two = await here.device("one"), await here.device("two")
        await answered(here, one, two)
        await answered(here, one, two)
        await script.going.wait()
        assert not [one for one in here.store.records() if isinstance(one, RoundClosed) and one.round == 2]
    again = willing()
    async with site(tmp_path, broker, neighbours=again, **keys(rounds=2)) as here:
        one = await here.device("one", online=False)
        state, rounds = await here.ended()
        assert not [*one.tasks.drain()]
    assert [number for number, _ in script.mixed + again.mixed] == [2, 2]
    for key, leaf in script.mixed[0][1].items():
        assert torch.equal(leaf, again.mixed[0][1][key])
        torch.testing.assert_close(state.tree[key], leaf + 10)
    assert [closed.outcome for closed in rounds] == ["aggregated"] * 2


async def test_a_missed_round_mixes_nothing(tmp_path):
    """The model is as it was; where the round is repeated, it ends with the mixing after all."""
    script = willing()
    rule = 'deadline_s = 5.0\nmin_updates = 2\non_missed = "continue"'
    async with site(tmp_path, neighbours=script, **keys(rounds=4, round=rule)) as here:
        one, two = await here.device("one"), await here.device("two")
        await answered(here, one, two)
        await answered(here, one)
        await two.task()
        await answered(here, one, two)
        await answered(here, one, two)
        _, rounds = await here.ended()
    assert [closed.outcome for closed in rounds] == ["aggregated", "missed", "aggregated", "aggregated"]
    assert [number for number, _ in script.mixed] == [4]


async def test_decisions_come_from_the_neighbours(tmp_path):
    """Asked once a round, with the case of this site's devices; what they say is recorded and told."""
    script = willing()
    more = f'{SITES}\n[optimizer]\nname = "clusters"\n{DEVICES}'
    async with site(tmp_path, neighbours=script, **keys(rounds=2, more=more)) as here:
        one, two = await here.device("one"), await here.device("two")
        for _ in range(2):
            await answered(here, one, two)
        await here.ended()
        opened = [one for one in here.store.records() if isinstance(one, RoundOpened)]
    assert script.asked == [(1, ("one", "two")), (2, ("one", "two"))]
    assert [one.decision.objective for one in opened if one.decision] == [1.0, 2.0]
    assert all(one.decision and one.decision.devices.keys() == {"one", "two"} for one in opened)


def test_each_site_acts_by_its_devices_share_of_the_joules(tmp_path):
    """The shares of all sites are the budget; a site that the plan does not know is refused."""
    plan = load(
        write_plan(tmp_path, more=f"{SITES}\n[budget]\njoules = 60.0\ntime_s = 9.0\n{DEVICES}"),
        tmp_path,
        several_sites=True,
    )
    assert [plan_of_site(plan, name).budget.joules for name in (SITE, "far")] == [20.0, 40.0]
    assert plan_of_site(plan, "far").budget.time_s == 9.0
    with pytest.raises(ConfigError, match=naming("attic", "lab", "far")):
        plan_of_site(plan, "attic")
    alone = load(write_plan(tmp_path), tmp_path)
    assert plan_of_site(alone, "attic") is alone
