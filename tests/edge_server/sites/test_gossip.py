"""Gossip over memory in virtual time: models arrive whole and edges agree, whatever is late, wrong or killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from random import Random

import pytest

from edge_server.journal.records import EdgeSettled, Gossiped, Noted
from edge_server.plan.network import ModelPlan
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.plan.sites import SitesPlan
from edge_server.sites.link import describe_differences, encode_plan
from edge_server.sites.model_files import round_folder
from edge_server.sites.overview import HEARD, read_rounds, write_rounds
from shared.protocol import payload, wire
from shared.protocol.messages import Transfer, Want
from shared.protocol.peers import EdgeWord, Hello, ModelOffer
from shared.protocol.topics import peer_topic
from shared.runtime import clock as virtual_clock
from shared.transport.simulated_link import Rate
from tests.edge_server.harness import DEADLINE_S, Country, Town, country, model_of, virtual
from tests.naming import log_messages, names_all

pytestmark = pytest.mark.virtual_time

SLOW = Rate(1e6, 1e6, 0.01)
FEDAVG, MLP = Chosen(name="fedavg"), ModelPlan(name="mlp")


def clock() -> float:
    return asyncio.get_running_loop().time()


def agreed(one: Country, number: int) -> dict[frozenset[str], set[bool]]:
    """Return how both ends settled each edge after a round."""
    found: dict[frozenset[str], set[bool]] = {}
    for site in one.order:
        for record in one.of(site, EdgeSettled):
            if record.round == number:
                found.setdefault(frozenset({site, record.site}), set()).add(record.on)
    return found


@pytest.mark.parametrize("rate", [Rate(), SLOW, Rate(1e6, 1e6, 0.01, 0.1)], ids=["at once", "slow", "lossy"])
def test_neighbours_have_each_others_models(tmp_path, rate):
    """Of a ring of four; what is not a neighbour sends nothing. Each model passes once, but for what the link loses."""

    async def routine() -> Country:
        one = country(tmp_path, "abcd", ["ab", "bc", "cd", "da"], rate=rate)
        async with one.all() as towns:
            found = await asyncio.gather(*(town.exchange(2) for town in towns.values()))
        for site, came in zip(one.order, found, strict=True):
            near = {peer for peer in one.order if frozenset({site, peer}) in one.edges}
            assert came == {peer: bytes(model_of(peer, 2)[0]) for peer in near}
        return one

    one = virtual(routine())
    assert all(on == {True} for on in agreed(one, 2).values())
    assert len(agreed(one, 2)) == 4
    for site in one.order:
        [record] = one.of(site, Gossiped)
        assert set(record.bytes_up) == set(record.on)
        if not rate.loss:
            assert all(40_000 < count < 1.02 * 40_000 for count in record.bytes_up.values())


async def test_a_neighbour_that_never_comes_costs_one_deadline(tmp_path):
    """The owner's end waits once the deadline, the other end twice; both journals say why the edge is off."""
    one = country(tmp_path, "abc", ["ab", "bc"])
    a, b = await one.start("a"), await one.start("b")
    began = clock()
    ends = await asyncio.gather(timed(a.exchange(1)), timed(b.exchange(1)))
    assert one.of("b", Gossiped)[0].off == {"c": "deadline"}
    c = await one.start("c")
    assert await c.exchange(1) == {}
    assert one.of("c", Gossiped)[0].off == {"b": "deadline"}
    for town in (a, b, c):
        await town.stack.aclose()
    first, second = ends[0] - began, ends[1] - began
    assert first < 5.0
    assert DEADLINE_S <= second < DEADLINE_S + 5.0


async def test_a_deadline_passes_whenever_it_began(tmp_path, monkeypatch):
    """Also where floats leave a rest of it that is less than time moves by; in virtual time that was for ever."""
    monkeypatch.setattr(virtual_clock, "MOST_TURNS", 20_000)
    one, took, draws = country(tmp_path, "abc", ["ab", "bc"]), [], Random(1)
    b = await one.start("b")
    for number in range(1, 21):
        await asyncio.sleep(draws.random())
        began = clock()
        assert await b.exchange(number) == {}
        took.append(clock() - began)
    await b.stack.aclose()
    assert took == pytest.approx([2 * DEADLINE_S] * 20, abs=1e-5)


async def test_nobody_waits_for_a_site_whose_run_has_ended(tmp_path):
    """Not its neighbour, be that the edge's owner or not; nor does a will that comes behind that word take it back."""
    one = country(tmp_path, "abc", ["ab", "bc"])
    async with one.all() as towns:
        await asyncio.gather(*(town.exchange(1) for town in towns.values()))
        began = clock()
        for site in "ac":
            await towns[site].gossip.wait_for_verdicts()
            await towns[site].links.end()
            await one.kill(towns[site])
        assert await towns["b"].exchange(2) == {}
        took = [clock() - began]
        assert one.of("b", Gossiped)[-1].off == {"a": "ended", "c": "ended"}
        again = await one.start("a")  # gone on with after all: it is heard
        await asyncio.sleep(0.1)
        assert not towns["b"].links.is_gone("a")
        await again.stack.aclose()
        assert max(took) < DEADLINE_S / 2


async def timed(work) -> float:
    await work
    return clock()


async def test_who_is_late_is_told_what_the_owner_settled(tmp_path):
    """It was away, and comes after the deadline: both ends have the edge as off, and the next gossip is whole."""
    one = country(tmp_path, "ab", ["ab"])
    a = await one.start("a")
    assert await a.exchange(1) == {}
    b = await one.start("b")
    assert await b.exchange(1) == {}
    assert one.of("b", EdgeSettled)[0].cause == "deadline"
    found = await asyncio.gather(a.exchange(2), b.exchange(2))
    assert [set(one) for one in found] == [{"b"}, {"a"}]
    for town in (a, b):
        await town.stack.aclose()
    assert one.of("a", Noted) == []


@pytest.mark.parametrize("killed", ["a", "b"])
@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.5, 0.9, 2.5])
async def test_a_server_that_is_killed_in_the_middle_goes_on(tmp_path, killed, after_s):
    """At any moment, the owner or the other end: the edge is on at both, and both have the whole models."""
    one = country(tmp_path, "ab", ["ab"], rate=SLOW)
    towns = {site: await one.start(site) for site in one.order}
    work = {site: asyncio.create_task(town.exchange(1)) for site, town in towns.items()}
    await asyncio.sleep(after_s)
    work[killed].cancel()
    await asyncio.gather(work[killed], return_exceptions=True)
    await one.kill(towns[killed])
    await asyncio.sleep(10.0)
    towns[killed] = await one.start(killed)
    work[killed] = asyncio.create_task(towns[killed].exchange(1))
    for site, other in (("a", "b"), ("b", "a")):
        assert await work[site] == {other: bytes(model_of(other, 1)[0])}
    for town in towns.values():
        await town.stack.aclose()
    assert agreed(one, 1) == {frozenset("ab"): {True}}
    assert all(len({record.on for record in one.of(site, EdgeSettled)}) == 1 for site in one.order)


async def test_a_neighbour_that_is_killed_late_still_gets_the_model(tmp_path):
    """The other end said that it has the model, was killed, and asks again when the owner is rounds ahead."""
    one = country(tmp_path, "ab", ["ab"])
    a, b = await one.start("a"), await one.start("b")
    await asyncio.gather(a.exchange(1), b.exchange(1))
    one.records["b"].clear()  # it was killed before it had journaled anything of that
    await one.kill(b)
    b = await one.start("b")
    assert await b.exchange(1) == {"a": bytes(model_of("a", 1)[0])}
    for town in (a, b):
        await town.stack.aclose()


async def test_a_model_that_the_disk_does_not_take_is_fetched_once_it_does(tmp_path):
    """Something is in the place of its file for ten seconds; that is counted, and ends nothing."""
    one = country(tmp_path, "ab", ["ab"])
    async with one.all() as towns:
        wrong = round_folder(tmp_path / "a", 1) / "_b"
        wrong.mkdir(parents=True)
        work = asyncio.gather(*(town.exchange(1) for town in towns.values()))
        await asyncio.sleep(10.0)
        assert not work.done()
        wrong.rmdir()
        assert [set(found) for found in await work] == [{"b"}, {"a"}]
        seconds = clock()
    assert seconds < 15.0
    assert one.of("a", Gossiped)[0].refused["disk"] > 0


async def until_heard(town: Town, peer: str) -> None:
    for _ in range(1000):
        if town.links.run_of(peer):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


@pytest.mark.parametrize(
    ("data", "cause"), [(b"short", "shape"), (bytes(500_000), "deadline"), (bytes(39_999), "shape")], ids=len
)
async def test_what_is_no_model_of_ours_is_refused(tmp_path, data, cause):
    """Of another size: at once by the check, or not even fetched; the edge is off at both ends, the run goes on."""
    one = country(tmp_path, "ab", ["ab"])
    async with one.all() as towns:
        found = await asyncio.gather(towns["a"].exchange(1), towns["b"].exchange(1, [memoryview(data)]))
        assert found == [{}, {}]
    assert agreed(one, 1) == {frozenset("ab"): {False}}
    [record] = one.of("a", Gossiped)
    assert record.off == {"b": cause}
    assert record.refused.get("shape", 0) >= 1


async def test_a_site_with_another_plan_is_refused_with_the_key_that_differs(tmp_path, caplog):
    """Both say so; neither waits for its deadline."""
    one = country(tmp_path, "ab", ["ab"])
    a, b = await one.start("a"), await one.start("b", plan=b'{"name":"towns","rounds":5}')
    assert await asyncio.gather(a.exchange(1), b.exchange(1)) == [{}, {}]
    assert one.of("a", EdgeSettled)[0].cause == "other-plan"
    for town in (a, b):
        await town.stack.aclose()
    assert clock() < DEADLINE_S
    for peer in "ab":
        assert log_messages(caplog, peer, "rounds", 4, 5, level="ERROR")


async def test_another_run_of_a_peer_is_not_mixed_into_ours(tmp_path, caplog):
    """Once a model of its run was."""
    one = country(tmp_path, "ab", ["ab"])
    a, b = await one.start("a"), await one.start("b")
    await asyncio.gather(a.exchange(1), b.exchange(1))
    await one.kill(b)
    one.records["b"].clear()
    (one.folder / "b").rename(one.folder / "earlier")
    b = await one.start("b", run="another")
    assert await asyncio.gather(a.exchange(2), b.exchange(2)) == [{}, {}]
    for town in (a, b):
        await town.stack.aclose()
    assert one.of("a", Gossiped)[-1].off == {"b": "other-run"}
    assert log_messages(caplog, "b", "another", "run-of-b", level="ERROR")


async def test_what_peers_must_not_say_is_counted_by_reason(tmp_path):
    """A stranger's name, a message for a device, a word about a gossip that is over, a frame that is damaged."""
    one = country(tmp_path, "ab", ["ab"])
    async with one.all() as towns:
        a = towns["a"]
        await until_heard(a, "b")
        transfer = Transfer(digest=bytes(16), size=40_000, frame_bytes=16 << 10)
        us = {"site": "b", "run": "run-of-b", "round": 1}
        for channel, data in [
            ("gossip", wire.encode(ModelOffer(site="c", run="run-of-b", round=1, params=transfer))),
            ("gossip", wire.encode(ModelOffer(site="b", run="no-run", round=1, params=transfer))),
            ("gossip", wire.encode(Hello(site="b", session=1, instance="x", online=True))),
            ("gossip", b"FM\1nonsense"),
            ("status", wire.encode(Hello(site="c", session=1, instance="x", online=True))),
            ("status", wire.encode(EdgeWord(**us, digest=bytes(16)))),
        ]:
            await one.brokers["a"].publish(peer_topic("a", "b", channel), data)
        await asyncio.sleep(1.0)
        found = dict(a.links.refused)
    assert found == {"identity": 2, "other-run": 1, "unexpected": 2, "malformed": 1}


async def test_an_offer_of_a_gossip_that_is_over_is_answered_with_what_was_settled(tmp_path):
    one = country(tmp_path, "ab", ["ab"])
    async with one.all() as towns:
        for number in (1, 2):
            await asyncio.gather(*(town.exchange(number) for town in towns.values()))
        async with one.brokers["a"].subscribe(peer_topic("a", "b", "gossiped")) as inbox:
            transfer = Transfer(digest=payload.digest(model_of("b", 1)), size=40_000, frame_bytes=16 << 10)
            offer = ModelOffer(site="b", run="run-of-b", round=1, params=transfer)
            await one.brokers["a"].publish(peer_topic("a", "b", "gossip"), wire.encode(offer))
            known = wire.decode_as(EdgeWord, (await anext(inbox))[1])
            late = ModelOffer(site="b", run="run-of-b", round=0, params=transfer)
            await one.brokers["a"].publish(peer_topic("a", "b", "gossip"), wire.encode(late))
            unknown = wire.decode_as(EdgeWord, (await anext(inbox))[1])
        assert (unknown.on, unknown.reason) == (False, "stale-round")
        assert known.on is True


def test_ends_that_differ_say_so(tmp_path, caplog):
    """The owner's word was lost for twice the deadline: the other end gave up, and the owner notes it once it hears."""

    async def routine() -> Country:
        one = country(tmp_path, "ab", ["ab"])
        a, b = await one.start("a"), await one.start("b")
        real = a.links.reply

        async def mute(peer, channel, message):
            return await real(peer, channel, message) if isinstance(message, Want) else True

        a.links.reply = mute
        await asyncio.gather(a.exchange(1), b.exchange(1))
        await asyncio.sleep(1.0)
        for town in (a, b):
            await town.stack.aclose()
        return one

    one = virtual(routine())
    assert one.of("a", EdgeSettled)[0].on
    assert one.of("b", EdgeSettled)[0].cause == "unheard"
    assert names_all(one.of("a", Noted)[0].what, "b")
    assert log_messages(caplog, "a", level="WARNING")


def test_plans_are_compared_without_the_folders_of_their_data():
    """Sites have the same files in other places."""

    def planned(path: str, rounds: int) -> bytes:
        return encode_plan(Plan(name="x", rounds=rounds, algorithm=FEDAVG, model=MLP, data=data_of(path)))

    assert planned("/srv/one/mnist.npz", 2) == planned("/home/two/mnist.npz", 2)
    path, rounds = describe_differences(planned("a", 2), planned("b", 3))
    assert names_all(path, "data.path", "a", "b")
    assert names_all(rounds, "rounds", 2, 3)


def test_sites_in_another_order_are_another_plan():
    """Who owns an edge, who coordinates first and who is beside whom in a ring go by it; JSON alone would sort it."""

    def planned(*sites: str) -> bytes:
        table = SitesPlan(clusters={site: (f"{site}-*",) for site in sites})
        return encode_plan(Plan(name="x", rounds=2, algorithm=FEDAVG, model=MLP, sites=table))

    assert planned("roof", "barn") == planned("roof", "barn")
    differences = describe_differences(planned("roof", "barn"), planned("barn", "roof"))
    assert len(differences) == 2
    assert all(names_all(line, f"sites.order[{place}]", "roof", "barn") for place, line in enumerate(differences))


def data_of(path: str):
    from shared.data.spec import Data  # noqa: PLC0415

    return Data(source="npz", path=path)


async def test_peers_know_which_round_another_has_begun(tmp_path):
    """Also who comes later; what another run of a site left at the broker says nothing."""

    heard: dict[str, list[dict[str, int]]] = {"a": [], "b": []}

    async def note(site: str, rounds: Mapping[str, int]) -> None:
        heard[site].append(dict(rounds))

    one = country(tmp_path, "ab", ["ab"], note_rounds=lambda site: partial(note, site))
    a = await one.start("a")
    for number in (2, 3):
        await a.links.announce_round(["b"], "run-of-a", number)
    b = await one.start("b")
    await asyncio.sleep(1.0)
    await b.links.announce_round(["a"], "run-of-b", 2)
    await a.links.announce_round(["b"], "run-of-a", 4)
    await a.links.announce_round(["b"], "another", 9)
    await asyncio.sleep(1.0)
    for town in (a, b):
        await town.stack.aclose()
    assert heard == {"a": [{"b": 2}], "b": [{"a": 3}, {"a": 4}]}


def test_rounds_that_are_written_down_are_read_again(tmp_path):
    assert read_rounds(tmp_path) == {}
    write_rounds(tmp_path, {"a": 3})
    assert read_rounds(tmp_path) == {"a": 3}
    (tmp_path / HEARD).write_text('{"a": "three"}')
    assert read_rounds(tmp_path) == {}
    write_rounds(tmp_path / HEARD, {"a": 4})  # a folder that cannot be: nobody waits for it
