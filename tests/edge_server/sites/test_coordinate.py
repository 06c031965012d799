"""Decisions over memory in virtual time: one coordinator, terms that grow, joules that are granted once."""

from __future__ import annotations

import asyncio
from itertools import product
from random import Random

import pytest

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Coordinated, Decision, DeviceDecision, Figure, Granted, Pledged, TermBegan
from edge_server.journal.records import RoundOpened
from edge_server.sites.cases import ROUND_JOULES, merge_cases, pack_case, read_case
from edge_server.sites.terms import GRACE_S
from shared.errors import WireError
from shared.protocol.measurements import Cost
from shared.runtime import clock as virtual_clock
from tests.edge_server.harness import DEADLINE_S, Country, Town, country, virtual
from tests.naming import log_messages

pytestmark = pytest.mark.virtual_time

ALLOWANCE, ROUNDS = 100.0, 4


def decide(case: Case) -> Decision:
    """Give every device the same part of the joules, and say of which devices that was decided."""
    each = case.limits.get(ROUND_JOULES, 0.0) / len(case.names) / 2
    given = DeviceDecision(values={"of": len(case.names)}, predicted=Cost(compute_joules=each))
    return Decision(devices=dict.fromkeys(case.names, given), limits=dict(case.limits))


def case_of(site: str, spent: float = 0.0) -> Case:
    """Return the case of a site with two devices."""
    devices = (f"{site}-1", f"{site}-2")
    limits = {"deadline_s": 30.0 + ord(site), ROUND_JOULES: 1.0, "spent_joules": spent}
    return Case(devices, limits, {one: {"step_s": Figure(1e6, "measured")} for one in devices})


def land(folder, order="abc") -> Country:
    return country(folder, order, [], decide=decide, allowance=ALLOWANCE)


def clock() -> float:
    return asyncio.get_running_loop().time()


async def asked(town: Town, number: int, spent: float = 0.0) -> Decision:
    return await town.coordination.decide(case_of(town.site, spent), number)


def rights(one: Country) -> float:
    """Return what all sites may spend by their journals, in all."""
    total = ALLOWANCE * len(one.order)
    for site in one.order:
        total -= sum(record.joules for record in one.of(site, Pledged))
        total += sum(record.joules for record in one.of(site, Granted))
    return total


async def test_one_site_decides_for_all_and_every_joule_comes_back(tmp_path):
    one = land(tmp_path)
    async with one.all() as towns:
        for number in range(1, ROUNDS + 1):
            found = await asyncio.gather(*(asked(town, number) for town in towns.values()))
            for site, decision in zip(one.order, found, strict=True):
                assert set(decision.devices) == {f"{site}-1", f"{site}-2"}
                assert (decision.term, decision.coordinator) == (0, "a")
                assert decision.devices[f"{site}-1"].values == {"of": 6}
                assert decision.limits[ROUND_JOULES] == pytest.approx(ALLOWANCE / (ROUNDS - number + 1))
                assert decision.limits["deadline_s"] == case_of(site).limits["deadline_s"]
    assert [len(one.of(site, Coordinated)) for site in one.order] == [ROUNDS, 0, 0]
    for record in one.of("a", Coordinated):
        assert record.decision.limits[ROUND_JOULES] == pytest.approx(3 * ALLOWANCE / (ROUNDS - record.round + 1))
    assert rights(one) == pytest.approx(3 * ALLOWANCE)


async def test_a_coordinator_that_is_killed_for_good_costs_nothing_where_that_is_known(tmp_path):
    """Its will is told: the next site takes over, in a higher term, and the first one learns that when it is back."""
    one = land(tmp_path)
    a, b, c = [await one.start(site) for site in one.order]
    await asyncio.gather(*(asked(town, 1) for town in (a, b, c)))
    await one.kill(a)
    began = asyncio.get_running_loop().time()
    found = await asyncio.gather(asked(b, 2), asked(c, 2))
    assert asyncio.get_running_loop().time() - began < 5.0
    assert [(one.term, one.coordinator) for one in found] == [(1, "b"), (1, "b")]
    a = await one.start("a")
    found = await asyncio.gather(asked(a, 3), asked(b, 3), asked(c, 3))
    assert {(one.term, one.coordinator) for one in found} == {(1, "b")}
    for town in (a, b, c):
        await town.stack.aclose()
    assert one.of("b", TermBegan)[0].cause == "gone"
    assert rights(one) <= 3 * ALLOWANCE + 1e-9


@pytest.mark.parametrize("began", [(0, 0), (0, 20), (20, 0), (0, 70), (70, 0)], ids=str)
async def test_a_coordinator_that_says_nothing_costs_one_deadline(tmp_path, began):
    """Once in the run, whoever asks it first: no will of it is told, and the others are at the round some time apart.

    The next coordinator does not wait for it anew when it hears that another site has waited, nor in later rounds.
    """
    one = land(tmp_path)
    a, b, c = [await one.start(site) for site in one.order]
    await one.kill(a, silently=True)

    async def late(town: Town, seconds: float) -> tuple[float, Decision]:
        await asyncio.sleep(seconds)
        return clock(), await asked(town, 1)

    found = await asyncio.gather(late(b, began[0]), late(c, began[1]))
    ends = [clock() - max(at for at, _ in found)]
    assert [(one.term, one.coordinator) for _, one in found] == [(1, "b"), (1, "b")]
    for number in range(2, ROUNDS + 1):
        start = clock()
        again = await asyncio.gather(asked(b, number), asked(c, number))
        assert [(one.term, one.coordinator) for one in again] == [(1, "b"), (1, "b")]
        ends.append(clock() - start)
    for town in (b, c):
        await town.stack.aclose()
    first, later = ends[:1], ends[1:]
    assert first[0] <= DEADLINE_S + GRACE_S + 1.0
    assert max(later) < 1.0
    assert [set(record.sites) for record in one.of("b", Coordinated)] == [{"b", "c"}] * ROUNDS


async def test_a_site_that_another_waited_for_in_vain_still_has_a_say(tmp_path):
    """One way alone is cut: the third site gives up on the first, which the second still reaches, and calls."""
    one = land(tmp_path)
    a, b, c = [await one.start(site) for site in one.order]
    for town, other in ((a, "c"), (c, "a")):
        town.ways[other].connected.clear()
    earlier = asyncio.create_task(asked(c, 1))
    await asyncio.sleep(20.0)
    found = await asyncio.gather(asked(a, 1), asked(b, 1), earlier)
    for town in (a, b, c):
        await town.stack.aclose()
    assert [(one.term, one.coordinator) for one in found] == [(1, "b")] * 3
    assert [one.devices[f"{site}-1"].values for site, one in zip("abc", found, strict=True)] == [{"of": 6}] * 3


async def test_two_halves_never_spend_more_than_their_shares(tmp_path):
    """The brokers of a and b are cut off from those of c and d: each half decides by its own pledges, and says so."""
    one = land(tmp_path, "abcd")
    towns = {site: await one.start(site) for site in one.order}
    await asyncio.gather(*(asked(town, 1) for town in towns.values()))
    across = [towns[one].ways[other] for one, other in product("abcd", "abcd") if (one in "ab") != (other in "ab")]
    for way in across:
        way.connected.clear()
    found = await asyncio.gather(*(asked(town, 2) for town in towns.values()))
    limits = {site: decision.limits[ROUND_JOULES] for site, decision in zip(one.order, found, strict=True)}
    assert {site for record in one.of("a", Coordinated)[-1:] for site in record.sites} == {"a", "b"}
    assert {site for record in one.of("c", Coordinated)[-1:] for site in record.sites} == {"c", "d"}
    assert limits["c"] <= 2 * ALLOWANCE / 3 + 1e-9
    for way in across:
        way.connected.set()
    again = await asyncio.gather(*(asked(town, 3) for town in towns.values()))
    assert all(decision.devices for decision in again)
    for town in towns.values():
        await town.stack.aclose()
    assert rights(one) <= 4 * ALLOWANCE + 1e-9
    for site in one.order:
        terms = [record.term for record in one.of(site, TermBegan)]
        assert terms == sorted(terms)


@pytest.mark.parametrize("killed", ["a", "b"])
@pytest.mark.parametrize("after_s", [0.001, 0.5, 3.0])
async def test_a_server_that_is_killed_in_a_decision_pledges_nothing_twice(tmp_path, killed, after_s):
    """The coordinator, or one that asks: by the journals each pledge stands once and is granted once."""
    one = land(tmp_path)
    towns = {site: await one.start(site) for site in one.order}
    work = {site: asyncio.create_task(asked(town, 1)) for site, town in towns.items() if site != "c"}
    await asyncio.sleep(after_s)
    work[killed].cancel()
    await asyncio.gather(work[killed], return_exceptions=True)
    await one.kill(towns[killed])
    towns[killed] = await one.start(killed)
    work[killed] = asyncio.create_task(asked(towns[killed], 1))
    work["c"] = asyncio.create_task(asked(towns["c"], 1))
    found = await asyncio.gather(*work.values())
    assert all(decision.devices for decision in found)
    for town in towns.values():
        await town.stack.aclose()
    for site in one.order:
        keys = [(record.round, record.term) for record in one.of(site, Pledged)]
        assert len(keys) == len(set(keys))
        granted = [(record.round, record.term) for record in one.of(site, Granted)]
        assert len(granted) == len(set(granted))
    assert rights(one) <= 3 * ALLOWANCE + 1e-9


async def test_the_same_is_answered_to_who_asks_again(tmp_path):
    """A site that lost the answer with its process gets the same decision, and its grant once."""
    one = land(tmp_path, "ab")
    a, b = [await one.start(site) for site in one.order]
    _, first = await asyncio.gather(asked(a, 1), asked(b, 1))
    await one.kill(b)
    b = await one.start("b")
    assert await asked(b, 1) == first
    for town in (a, b):
        await town.stack.aclose()
    assert len(one.of("a", Coordinated)) == 1
    assert len(one.of("b", Pledged)) == len(one.of("b", Granted)) == 1


def test_a_deadline_passes_whenever_it_began(tmp_path, monkeypatch):
    """Also where floats leave a rest of it that is less than time moves by; in virtual time that was for ever."""
    monkeypatch.setattr(virtual_clock, "MOST_TURNS", 20_000)

    async def routine(began: float) -> float:
        await asyncio.sleep(began)
        a = await land(tmp_path).start("a")
        assert (await asked(a, 1)).coordinator == "a"
        await a.stack.aclose()
        return clock() - began

    draws = Random(1)
    took = [virtual(routine(draws.uniform(0, 100))) for _ in range(20)]
    assert took == pytest.approx([DEADLINE_S] * 20, abs=1e-5)


async def test_two_sites_that_each_lead_find_each_other_again(tmp_path):
    """Each let the other's deadline pass, as where both start slowly or a link was cut: neither waits for it any more.

    What they said meanwhile is lost.
    """
    one = land(tmp_path, "ab")
    a = await one.start("a")
    alone = await asked(a, 1)
    b = await one.start("b")
    b.ways["a"].connected.clear()
    found = [[alone, await asked(b, 1)]]
    b.ways["a"].connected.set()
    found += [await asyncio.gather(asked(a, number), asked(b, number)) for number in range(2, 5)]
    for town in (a, b):
        await town.stack.aclose()
    assert [one.coordinator for one in found[0]] == ["a", "b"]
    assert [one.coordinator for one in found[-1]] == ["b", "b"]


async def test_nobody_there_a_site_decides_alone_with_its_own_joules(tmp_path, caplog):
    one = land(tmp_path)
    b = await one.start("b")
    found = await asked(b, 1)
    await b.stack.aclose()
    assert found.coordinator == "b"
    assert found.limits[ROUND_JOULES] <= ALLOWANCE / ROUNDS
    assert log_messages(caplog, "b", "a, c", level="WARNING")


def test_cases_keep_their_sites_deadlines_and_travel_whole():
    a, b = case_of("a"), case_of("b")
    whole = merge_cases("a", {"a": a, "b": read_case(pack_case(b), ("b-1", "b-2"))}, 7.0)
    assert whole.names == ["a-1", "a-2", "b-1", "b-2"]
    assert whole.limits[ROUND_JOULES] == 7.0
    assert whole.figures["b-1"]["deadline_s"].value == b.limits["deadline_s"]
    assert whole.figures["b-1"]["step_s"].value == 1e6
    with pytest.raises(WireError):
        read_case(b"nonsense", ("b-1",))


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_site_that_missed_a_decision_is_answered_by_who_takes_over_in_the_middle_of_that_round(
    tmp_path, is_restarted
):
    """The first coordinator is gone, the next has the round's decision from it and may be waiting for us to mix."""
    one = land(tmp_path)
    a, b, c = [await one.start(site) for site in one.order]
    await one.kill(c)
    _, taken = await asyncio.gather(asked(a, 1), asked(b, 1))
    one.records["b"].append(RoundOpened(round=1, assignments={}, decision=taken))
    c = await one.start("c")
    await asyncio.sleep(1.0)
    await one.kill(a)
    if is_restarted:
        await one.kill(b)
        b = await one.start("b")
    await asyncio.sleep(1.0)
    began = clock()
    found = await asked(c, 1)
    seconds = clock() - began
    for town in (b, c):
        await town.stack.aclose()
    assert (found.coordinator, found.term) == ("c", 1)
    assert seconds < 5.0


async def test_a_coordinator_that_comes_back_learns_at_once_that_another_one_took_over(tmp_path):
    """Though nobody asks for anything just then: the others are in the middle of a round, and wait to mix with it."""
    one = land(tmp_path)
    a, b, c = [await one.start(site) for site in one.order]
    await asyncio.gather(*(asked(town, 1) for town in (a, b, c)))
    await one.kill(a)
    for number in (2, 3):
        await asyncio.gather(asked(b, number), asked(c, number))
    a = await one.start("a")
    began = clock()
    found = await asked(a, 2)
    seconds = clock() - began
    for town in (a, b, c):
        await town.stack.aclose()
    assert (found.coordinator, found.term) == ("a", 1)
    assert seconds < 5.0
