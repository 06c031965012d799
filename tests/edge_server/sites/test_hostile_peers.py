"""Hostile peer server: other sites' runs continue and name it."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import torch
from rich.console import Console
from torch import Tensor

from edge_server.allocation.inputs import Case
from edge_server.journal import sqlite
from edge_server.journal.decision import Coordinated, Decision, DeviceDecision, Figure, Granted, TermBegan
from edge_server.journal.outcome import outcome_lines, refused_models, summarise_outcome
from edge_server.journal.records import EdgeSettled, Gossiped, RunClosed
from edge_server.report.sections import sites as section
from edge_server.report.sites.summarise import digest_sites
from edge_server.report.summarise import digest_run
from edge_server.rounds.neighbours import Neighbours
from edge_server.sites.cases import ROUND_JOULES, merge_cases, pack_case, read_case, read_decision
from edge_server.sites.model_bounds import require_near
from edge_server.sites.overview import sites_table, summarise_sites
from edge_server.sites.terms import MOST_TERMS_AHEAD, MOST_TERMS_HEARD
from edge_server.trial.progress import Display
from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.peers import EdgeWord, Hello, Ruling, Telemetry
from shared.protocol.topics import peer_topic
from shared.tensors.tree import State, Tree
from tests.edge_server.harness import beginning
from tests.edge_server.sites.test_coordinate import asked, case_of, land
from tests.edge_server.sites.test_gossip import until_heard
from tests.edge_server.sites.test_sites_whole import ROUNDS, Region, planned
from tests.edge_server.textbook import require_equal, textbook_round
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

Change = Callable[[Tensor], Tensor]


@dataclass
class Liar:
    """A server whose model is changed before each mixing step from one on."""

    honest: Neighbours
    change: Change
    first: int = 1

    async def begin(self, number: int) -> None:
        await self.honest.begin(number)

    async def decide(self, case: Case, number: int) -> Decision:
        return await self.honest.decide(case, number)

    async def mix(self, number: int, state: State) -> State:
        if number >= self.first:
            state = State({key: self.change(leaf) for key, leaf in state.tree.items()}, state.facts)
        return await self.honest.mix(number, state)

    async def leave(self) -> None:
        await self.honest.leave()


LIES: dict[str, Change] = {
    "1e30": lambda leaf: torch.full_like(leaf, 1e30),
    "-3e38": lambda leaf: torch.full_like(leaf, -3e38),
    "zeros": torch.zeros_like,
    "negative zeros": lambda leaf: -torch.zeros_like(leaf),
    "subnormal": lambda leaf: torch.full_like(leaf, 1e-42),
    "sign": torch.neg,
    "constant": lambda leaf: torch.full_like(leaf, 0.3),
    "tenfold": lambda leaf: 10 * leaf,
    "a tenth": lambda leaf: leaf / 10,
    "random": lambda leaf: torch.randn(leaf.shape, generator=torch.Generator().manual_seed(7)),
}


@pytest.mark.parametrize("first", [1, 3], ids=["from the first mixing step", "later"])
@pytest.mark.parametrize("lie", LIES)
def test_a_peers_model_that_no_training_led_to_is_not_mixed_and_the_peer_is_named(tmp_path, lie, first):
    """The honest site trains on alone, to the bits that it has without that peer; journal, table, page and end tell."""
    plan = planned(tmp_path)
    region = Region(plan, tmp_path)
    region.hostile["south"] = lambda honest: Liar(honest, LIES[lie], first)
    state, records = region.play()["north"]
    gossips = [record for record in records if isinstance(record, Gossiped)]
    refused = [one.round for one in gossips if one.off == {"south": "norm"}]
    assert refused[0] == (2 if first == 1 else 4)
    causes = {one.round: one.cause for one in records if isinstance(one, EdgeSettled) and not one.on}
    assert causes[refused[0]] == "norm"
    if first == 1 and not any(one.on for one in gossips):  # who turns its model around twice is honest again
        tree = beginning(plan)
        for number in range(1, ROUNDS + 1):
            tree = textbook_round(plan, number, tree, ["a"])
        require_equal(state.tree, tree)
    assert isinstance(records[-1], RunClosed)
    named = ("south", len(refused), 2, "norm")
    assert any(names_all(line, *named) for line in outcome_lines(summarise_outcome(records, tmp_path), tmp_path))
    assert names_all(sites_table(summarise_sites(records))[1], *named)
    digest = msgspec.structs.replace(digest_run(records), run="run-north")
    page = str(section.sites(digest_sites([(digest, records)])[0]))
    assert names_all(page, *named)
    shown = io.StringIO()
    display = Display(Console(file=shown), plan.rounds)
    for record in records:
        display.tell(record)
    assert len([line for line in shown.getvalue().splitlines() if names_all(line, "south", "norm")]) == len(refused)


def test_who_is_refused_by_a_liar_does_not_hold_it_against_itself(tmp_path):
    """The liar's end refuses too, since the honest model is as far from its own: that is no cause of ours."""
    region = Region(planned(tmp_path), tmp_path)
    region.hostile["south"] = lambda honest: Liar(honest, LIES["1e30"])
    ends = region.play()
    assert [one.site for one in refused_models(ends["north"][1])] == ["south"]
    off = [one.off["north"] for one in ends["south"][1] if isinstance(one, Gossiped)]
    assert set(off) <= {"norm", "norm-there"}


def test_honest_sites_are_mixed(tmp_path):
    ends = Region(planned(tmp_path), tmp_path).play()
    assert all(refused_models(records) == [] for _, records in ends.values())
    assert all(one.on for _, records in ends.values() for one in records if isinstance(one, EdgeSettled))


def network(scale: float = 1.0) -> Tree:
    draw = torch.Generator().manual_seed(1)
    return {
        "0.weight": scale * torch.randn(20, 10, generator=draw),
        "1.running_mean": torch.zeros(20),
        "1.running_var": torch.ones(20),
        "1.num_batches_tracked": torch.tensor(100),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"1.running_var": -torch.ones(20)},
        {"1.running_var": torch.full((20,), 1e30)},
        {"1.running_mean": torch.full((20,), -1e20)},
        {"1.num_batches_tracked": torch.tensor((1 << 63) - 1)},
        {"1.num_batches_tracked": torch.tensor(-(1 << 62))},
        {"0.weight": torch.zeros(20, 10)},
    ],
    ids=str,
)
def test_statistics_and_counters_are_bounded_beside_the_parameters(change):
    """A model that is mostly statistics hides no parameters; a variance below zero would be NaN in every output."""
    with pytest.raises(WireError) as caught:
        require_near(network() | change, network(), 0.5, 30.0)
    assert caught.value.reason == "norm"
    require_near(network() | change, network(), 0.5, 0.0)


def test_a_site_that_learnt_much_more_or_less_than_ours_is_mixed():
    """After a partition, and where ours has not moved at all since its devices were away."""
    own = network()
    draw = torch.Generator().manual_seed(2)
    step = torch.randn(20, 10, generator=draw)
    step *= own["0.weight"].norm() / step.norm()
    for share, moved in ((0.25, 0.0), (0.25, 0.01), (0.7, 0.2), (1.2, 0.6), (0.5, None)):
        theirs = own | {"0.weight": own["0.weight"] + share * step}
        size = float(own["0.weight"].norm())
        require_near(theirs, own, None if moved is None else moved * size, 30.0)
    blank = {"w": torch.zeros(4)}
    require_near({"w": torch.ones(4)}, {"w": torch.tensor([1.0, -0.5, 0.5, 0.5])}, 1.4, 30.0)
    require_near(blank, blank, 0.0, 30.0)


TELEMETRY = {"site": "b", "run": "run-of-b", "round": 1, "term": 0}


def raw(kind: str, **fields: object) -> bytes:
    """Return a message as somebody writes it who is bound by no type."""
    return wire.encode(Hello(site="b", session=1, instance="x", online=True))[:3] + msgspec.msgpack.encode(
        {"type": kind, **fields}
    )


BAD_TERMS = [(1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 41, MOST_TERMS_AHEAD + 1, MOST_TERMS_AHEAD + 2, -1, True, 1.5]


@pytest.mark.parametrize("term", BAD_TERMS, ids=str)
@pytest.mark.parametrize("kind", ["Telemetry", "Ruling"])
async def test_a_term_far_ahead_is_not_adopted(tmp_path, term, kind):
    """By a case or by a coordinator's word: the next decision is as without it, and the journal is read again."""
    one = land(tmp_path, "ab")
    async with one.all() as towns:
        await until_heard(towns["a"], "b")
        body = {"case": pack_case(case_of("b"))} if kind == "Telemetry" else {"reason": "term"}
        channel = "telemetry" if kind == "Telemetry" else "decision"
        data = raw(kind, **TELEMETRY | {"term": term}, **body)
        place = peer_topic("a", "b", channel) if kind == "Telemetry" else peer_topic("b", "a", channel)
        await one.brokers["a" if kind == "Telemetry" else "b"].publish(place, data)
        await asyncio.sleep(1.0)
        assert one.of("a", TermBegan) == []
        found = await asyncio.gather(*(asked(town, 1) for town in towns.values()))
        assert {(each.term, each.coordinator) for each in found} == {(0, "a")}
        assert sum(towns["a"].links.refused.values()) == 1
    for record in one.records["a"]:
        sqlite.encode(record)


async def test_terms_that_grow_step_by_step_fill_no_journal(tmp_path):
    one = land(tmp_path, "ab")
    async with one.all() as towns:
        await until_heard(towns["a"], "b")
        for term in range(1, 1000):
            data = raw("Ruling", **TELEMETRY | {"term": term}, reason="term")
            await one.brokers["b"].publish(peer_topic("b", "a", "decision"), data)
        await asyncio.sleep(1.0)
    assert len(one.of("a", TermBegan)) == MOST_TERMS_HEARD


async def test_a_journal_with_a_poisoned_term_is_gone_on_with(tmp_path):
    """One that a version before this has written: its server ended with every start."""
    one = land(tmp_path, "ab")
    one.records["b"].append(TermBegan(round=1, term=(1 << 64) - 1, cause="heard"))
    async with one.all() as towns:
        _, found = await asyncio.gather(*(asked(town, 1) for town in towns.values()))
        assert found.coordinator == "a"


FIGURES = [math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e300, 1e9, "1", True, None]


def telemetry(field: str, figure: object) -> dict[str, object]:
    """Return what a site tells of its case, one figure of which is another."""
    case = msgspec.msgpack.decode(pack_case(case_of("b")))
    body: dict[str, object] = {"pledge": 1.0}
    if field in {"pledge", "asks"}:
        body[field] = figure if field == "pledge" else [[1, 0, figure]]
    elif field == "figure":
        case["figures"]["b-1"]["step_s"] = [figure, "measured"]
    else:
        case["limits"][ROUND_JOULES if field == "limit" else "deadline_s"] = figure
    return body | {"case": msgspec.msgpack.encode(case)}


@pytest.mark.parametrize("figure", FIGURES, ids=str)
@pytest.mark.parametrize("field", ["pledge", "asks", "limit", "figure", "deadline"])
async def test_a_figure_that_cannot_be_is_refused_before_it_is_journaled(tmp_path, field, figure):
    """The coordinator decides for its own devices, and its journal is read by the next process."""
    one = land(tmp_path, "ab")
    a, b = await one.start("a"), await one.start("b")
    await until_heard(a, "b")
    data = raw("Telemetry", **TELEMETRY, **telemetry(field, figure))
    for _ in range(3):
        await one.brokers["a"].publish(peer_topic("a", "b", "telemetry"), data)
    await asyncio.sleep(0.1)
    await one.kill(b)
    found = await asked(a, 1)
    assert {"a-1", "a-2"} == found.devices.keys()
    await a.stack.aclose()
    [record] = one.of("a", Coordinated)
    if not (field in {"limit", "deadline"} and figure == 1e9) and not (field == "pledge" and figure is None):
        assert set(record.sites) == {"a"}
    for each in one.records["a"]:
        sqlite.encode(each)
    assert all(joules <= 200.0 for joules in record.grants.values())


def test_a_case_names_devices_of_its_own_site_alone():
    case = case_of("b")
    for devices in (("a-1",), ("b-1", "a-1"), ("../x",), ("b-1\n",), ("",)):
        told = msgspec.msgpack.decode(pack_case(case)) | {"devices": devices}
        with pytest.raises(WireError):
            read_case(msgspec.msgpack.encode(told), ("b-1", "b-2"))
    assert read_case(pack_case(case), ("b-1", "b-2")) == case


def test_a_peers_limits_press_ours_down_by_a_factor_at_most():
    own, other = case_of("a"), case_of("b")
    tight = Case(other.devices, {**other.limits, "deadline_s": 1e-9, "joules": 0.0}, other.figures)
    loose = Case(own.devices, {**own.limits, "joules": 8.0}, own.figures)
    whole = merge_cases("a", {"a": loose, "b": tight}, 7.0)
    assert whole.limits["joules"] == 2.0
    assert whole.limits["deadline_s"] == own.limits["deadline_s"] / 4
    assert whole.figures["a-1"]["deadline_s"].value == own.limits["deadline_s"]


@pytest.mark.parametrize(
    "given",
    [
        DeviceDecision(values={"steps": math.nan}),
        DeviceDecision(values={"steps": 1.5}),
        DeviceDecision(values={"sent": -0.1}),
        DeviceDecision(values={"sent": True}),
        DeviceDecision(values={"keep": "all"}),
        DeviceDecision(values={"up_bits_per_s": math.inf}),
        DeviceDecision(values={"x\ny": 0.5}),
        DeviceDecision(values={"steps": 0.5}, predicted=Cost(compute_joules=math.nan)),
        DeviceDecision(values={"steps": 0.5}, predicted=Cost(compute_joules=-1.0)),
        DeviceDecision(values={"steps": 0.5}, figures={"step_s": Figure(math.inf, "measured")}),
        DeviceDecision(values={"steps": 0.5}, multiplier=math.nan),
        DeviceDecision(values={"steps": 0.5}, binding="\x1b[2J"),
    ],
    ids=str,
)
def test_a_coordinator_gives_no_device_what_none_can_be_given(given):
    with pytest.raises(WireError):
        read_decision(msgspec.msgpack.encode(Decision(devices={"a-1": given})), ("a-1",))
    fine = Decision(devices={"a-1": DeviceDecision(values={"steps": 0.5, "sent": 1})})
    assert read_decision(msgspec.msgpack.encode(fine), ("a-1", "a-2")) == fine
    with pytest.raises(WireError):
        read_decision(msgspec.msgpack.encode(fine), ("b-1",))


@pytest.mark.parametrize("grant", [math.nan, math.inf, -1.0, 1e6, 201.0])
async def test_a_grant_beyond_the_plans_joules_is_not_credited(tmp_path, grant):
    one = land(tmp_path, "ab")
    a, b = await one.start("a"), await one.start("b")
    await until_heard(b, "a")
    await one.kill(a, silently=True)
    work = asyncio.create_task(asked(b, 1))
    await asyncio.sleep(1.0)
    fields = {"site": "a", "run": "run-of-a", "round": 1, "term": 0, "reason": "late"}
    data = raw("Ruling", **fields, grants=[[1, 0, grant]])
    await one.brokers["a"].publish(peer_topic("a", "b", "decision"), data)
    await work
    await b.stack.aclose()
    assert sum(record.joules for record in one.of("b", Granted) if record.term == 0) == 0.0


async def test_old_messages_that_are_said_again_change_nothing(tmp_path):
    """Each message of two rounds and gossips, once more in the third: nothing is decided, mixed or credited twice."""
    one = land(tmp_path, "ab")
    one.edges.add(frozenset("ab"))
    said: list[tuple[str, bytes]] = []
    async with one.all() as towns:
        names = [peer_topic("a", "b", channel) for channel in ("gossip", "telemetry", "status")]

        async def record() -> None:
            async with one.brokers["a"].subscribe(*names) as inbox:
                async for name, data in inbox:
                    said.append((name, data))

        recording = asyncio.create_task(record())
        for number in (1, 2):
            await asyncio.gather(*(asked(town, number) for town in towns.values()))
            await asyncio.gather(*(town.exchange(number) for town in towns.values()))
        recording.cancel()
        counts = [len(one.records["a"])]
        for name, data in said.copy():
            await one.brokers["a"].publish(name, data)
        await asyncio.sleep(1.0)
        counts.append(len(one.records["a"]))
        found = await asyncio.gather(*(asked(town, 3) for town in towns.values()))
        assert all(len(each.devices) == 2 for each in found)
        await asyncio.gather(*(town.exchange(3) for town in towns.values()))
    assert counts[0] == counts[1]
    assert [record.on for record in one.of("a", Gossiped)] == [("b",)] * 3


@pytest.mark.parametrize(
    ("channel", "fields"),
    [
        ("status", {"type": "Hello", "site": "b", "session": 1 << 64 - 1, "instance": "x", "online": True}),
        ("status", {"type": "Hello", "site": "../b", "session": 1, "instance": "x", "online": True}),
        ("status", {"type": "Hello", "site": "b", "session": 9, "instance": "x\nERROR all is lost", "online": True}),
        ("status", {"type": "Hello", "site": "b", "session": 9, "instance": "x", "online": True, "run": "../../run"}),
        ("status", {"type": "Hello", "site": "b", "session": 9, "instance": "x", "online": True, "digest": bytes(99)}),
        ("gossip", {"type": "ModelOffer", "site": "b", "run": "run-of-b", "round": -1, "params": {}}),
        ("gossiped", {"type": "EdgeWord", "site": "b", "run": "run-of-b", "round": 1, "digest": b"", "reason": "a\nb"}),
        ("round", {"type": "AtRound", "site": "b", "run": "run-of-b", "round": 1 << 60}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_every_field_of_a_peers_message_is_bounded_where_it_is_decoded(channel, fields, caplog):
    data = raw(fields.pop("type"), **fields)
    with pytest.raises(WireError) as caught:
        wire.decode(data)
    assert caught.value.reason == "malformed"
    assert channel
    assert str(caught.value).isprintable()


def test_the_messages_themselves_are_as_before():
    for message in (
        Telemetry(site="b", run="run-of-b", round=1, term=3, case=b"", pledge=0.0),
        Ruling(site="b", run="run-of-b", round=1, term=3, grants=((1, 0, 2.0),)),
        EdgeWord(site="b", run="run-of-b", round=1, digest=b""),
        Hello(site="b", session=0, instance="", online=False),
    ):
        assert wire.decode(wire.encode(message)) == message
