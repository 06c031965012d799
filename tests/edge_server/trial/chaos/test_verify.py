"""The account of a disturbed run: what counts as lost, as done twice, as different."""

from __future__ import annotations

import io
import math

import pytest
import torch

from edge_server.cli.chaos import accounts_table, kills_table, total
from edge_server.journal.decision import Coordinated, Decision, DeviceDecision, Granted, Pledged, TermBegan
from edge_server.journal.records import EdgeSettled, RoundClosed, RoundOpened, UpdateAccepted
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.plan.sites import SitesPlan
from edge_server.trial.chaos.log_reader import LogLine
from edge_server.trial.chaos.study import KillResult
from edge_server.trial.chaos.verify import Account, audit_run, audit_sites, count_retrainings, max_difference
from shared.protocol.messages import Assignment, Hyper, Update
from shared.runtime.text_table import write_text
from shared.tensors.tree import State

MODEL = State({"weight": torch.tensor([1.0, 2.0])})


def said(*words: str, name: str = "a") -> list[LogLine]:
    """Return what a trainer said: a phase, or `training:RUN:ROUND`."""
    lines = []
    for word in words:
        phase, _, about = word.partition(":")
        facts = dict(zip(("run", "round"), about.split(":"), strict=True)) if about else {}
        lines.append(LogLine("trainer", name, phase, facts))
    return lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["importing", "training:r:1", "committed", "training:r:2", "committed"], (0, 0, 0)),
        (["training:r:1", "importing", "training:r:1", "committed"], (1, 0, 0)),
        (["training:r:1", "importing", "training:r:1", "importing", "training:r:1", "committed"], (2, 0, 0)),
        (["training:r:1", "committed", "training:r:1", "committed"], (0, 0, 1)),
        (["training:r:1", "committed", "importing", "training:r:1", "committed"], (0, 0, 1)),
        (["training:r:1", "failed", "training:r:1", "committed"], (0, 0, 1)),
        (["training:r:1", "importing", "training:r:2", "committed", "training:s:1", "committed"], (0, 0, 0)),
    ],
    ids=["undisturbed", "died", "died twice", "for nothing", "died when it was done", "failed", "another run"],
)
def test_a_training_begun_again_is_excused_only_by_a_trainer_that_died_of_it(words, expected):
    assert count_retrainings(said(*words), "r", {}) == expected


def test_two_devices_train_the_same_round_and_neither_does_it_again():
    lines = [one for pair in zip(said("training:r:1"), said("training:r:1", name="b"), strict=True) for one in pair]
    assert count_retrainings(lines, "r", {}) == (0, 0, 0)


def test_each_device_trains_a_split_round_once_more_for_each_time_that_its_server_began_it_anew():
    lines = [*said(*["training:r:1", "committed"] * 3), *said(*["training:r:1", "committed"] * 2, name="b")]
    assert count_retrainings(lines, "r", {1: 2}) == (0, 3, 0)
    assert count_retrainings(lines, "r", {1: 1}) == (0, 2, 1)
    assert count_retrainings(lines, "r", {2: 2}) == (0, 0, 3)


def records(*accepted: tuple[int, str], rounds: int = 2) -> list:
    """Return the journal of a run of two devices, with these updates."""
    told = dict.fromkeys("ab", Assignment(seed=1, hyper=Hyper()))
    kept: list = [RoundOpened(round=number, assignments=told) for number in (1, 2, 3)[:rounds]]
    for number, device in accepted:
        update = Update(run="r", round=number, device=device, params=None)
        kept.append(UpdateAccepted(round=number, device=device, update=update, bytes_up=0))
    done = [RoundClosed(round=number, outcome="aggregated", arrived=("a", "b"), seconds=1.0) for number in (1, 2)]
    return [*kept, *done]


WHOLE = ((1, "a"), (1, "b"), (2, "a"), (2, "b"))


def drawn_up(journal: list, lines: list[LogLine], rounds: int = 2, final: State = MODEL) -> Account:
    return audit_run("r", journal, lines, rounds=rounds, final=final, expected=MODEL)


def test_a_whole_run_holds_and_what_it_refused_is_counted():
    """Also where the devices measured steps before, and evaluated the final model afterwards, in rounds 0 and 3."""
    lines = [
        LogLine("server", "edge-server", "duplicate", {"run": "r"}),
        LogLine("server", "edge-server", "late", {"run": "q"}),
    ]
    found = drawn_up(
        [*records((0, "a"), *WHOLE, (3, "a"), (3, "a"))], [*lines, *said("training:r:1", "importing", "training:r:1")]
    )
    assert (found.updates, found.accepted, found.duplicates, found.retrained) == (4, 4, 1, 1)
    assert found.holds


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("accepted", drawn_up(records(*WHOLE[:3]), [])),
        ("counted_twice", drawn_up(records(*WHOLE, WHOLE[0]), [])),
        ("trained_twice", drawn_up(records(*WHOLE), said("training:r:1", "committed", "training:r:1"))),
        ("rounds_lost", drawn_up(records(*WHOLE), [], rounds=3)),
        ("difference", drawn_up(records(*WHOLE), [], final=State({"weight": torch.tensor([1.0, 2.5])}))),
    ],
)
def test_each_fault_alone_is_enough_to_fail(field, found):
    assert not found.holds
    assert getattr(found, field) == {"accepted": 3, "difference": 0.5}.get(field, 1)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [([1.0, 2.0], 0.0), ([1.0, 1.75], 0.25), ([1.0, math.nan], math.inf), ([1.0, 2.0, 3.0], math.inf)],
)
def test_the_difference_of_models(leaf, expected):
    """What cannot be compared is infinitely different, as is a model that is not there."""
    assert max_difference(State({"weight": torch.tensor(leaf)}), MODEL) == expected
    assert max_difference(State(), MODEL) == math.inf


def test_the_tables_have_every_kill_and_the_sum_of_the_runs():
    """A row a phase with its sums; the sum of the runs takes the largest difference."""
    made = [("server", "storing"), ("broker", "storing"), ("server", "starting"), ("trainer", "training")]
    struck = [KillResult(run="r", kind=kind, name=kind, phase=phase, marked=False) for kind, phase in made]
    runs = [drawn_up(records(*WHOLE), []), drawn_up(records(*WHOLE[:3]), [], final=State())]
    text = io.StringIO()
    write_text(text, [kills_table(struck), accounts_table(runs)])
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["storing", "1", "1", "2"] in rows
    assert ["all", "2", "0", "1", "1", "4"] in rows
    assert ["all", "7/8", *("0" * 6), "inf"] in rows
    assert (total(runs).accepted, total(runs).difference) == (7, math.inf)


def decided(number: int, coordinator: str = "n", term: int = 0, steps: float = 0.5) -> Decision:
    """Return what was decided for device a in a round."""
    given = DeviceDecision(values={"steps": steps, "round": number})
    return Decision(devices={"a": given}, coordinator=coordinator, term=term)


def opened(number: int, **about: object) -> RoundOpened:
    return RoundOpened(round=number, assignments={}, decision=decided(number, **about))


def coordinated(number: int, term: int = 0, decision: Decision | None = None) -> Coordinated:
    return Coordinated(round=number, term=term, decision=decision or decided(number, "", term))


def edge(number: int, site: str, *, on: bool = True) -> EdgeSettled:
    return EdgeSettled(round=number, site=site, run="r", on=on)


def granted(number: int, joules: float) -> Granted:
    return Granted(round=number, term=0, joules=joules)


TOGETHER = Plan(
    name="p",
    rounds=4,
    algorithm=Chosen(name="fedavg"),
    model=Chosen(name="mlp"),
    device=[DevicePlan(name=name) for name in "abc"],
    sites=SitesPlan(clusters={"n": ("a",), "s": ("b",), "w": ("c",)}, edge_rounds=2, graph="full"),
)
NORTH = [coordinated(number) for number in (1, 2, 3, 4)]
SOUTH = [opened(number) for number in (1, 2, 3, 4)]
EDGES = [edge(number, site) for number in (2, 4) for site in ("n", "w")]


def between(own: list, north: list = NORTH) -> Account:
    """Return the account of the southern site."""
    return audit_sites(drawn_up(records(*WHOLE), []), TOGETHER, "s", {"n": north, "s": own, "w": []})


def test_a_site_that_mixed_with_all_and_did_as_was_decided_holds():
    """Whatever the terms; what the devices' evaluation after the last round was decided to be is nobody's business."""
    own = [*SOUTH, *EDGES, TermBegan(round=2, term=1), opened(5, steps=0.1)]
    found = between(own)
    assert (found.edges_off, found.undecided, found.overdrawn, found.alone, found.terms) == (0, 0, 0, 0, 1)
    assert found.holds


def test_a_round_that_a_site_decided_alone_is_told_and_no_loss():
    """It was away: the term is the northern site's, which decided for others."""
    own = [SOUTH[0], opened(2, coordinator="s"), *SOUTH[2:], *EDGES]
    found = between(own, [NORTH[0], *NORTH[2:]])
    assert (found.alone, found.undecided, found.holds) == (1, 0, True)


@pytest.mark.parametrize(
    ("field", "own", "north"),
    [
        ("edges_off", [*SOUTH, *EDGES[:-1]], NORTH),
        ("edges_off", [*SOUTH, *EDGES[:-1], edge(4, "w", on=False)], NORTH),
        ("undecided", [*SOUTH, *EDGES], NORTH[:-1]),
        ("undecided", [*SOUTH, *EDGES], [*NORTH[:-1], coordinated(4, decision=decided(4, steps=0.25))]),
        ("undecided", [*SOUTH, *EDGES], [*NORTH[:-1], coordinated(4, term=3)]),
        (
            "overdrawn",
            [*SOUTH, *EDGES, *(Pledged(round=n, term=0, joules=2.0) for n in (1, 2)), granted(1, 2.5), granted(2, 3.0)],
            [*NORTH, *(Pledged(round=n, term=0, joules=1.0) for n in (1, 2)), granted(2, 0.5)],
        ),
        ("undecided", [*SOUTH[:-1], opened(4, coordinator="s", term=1), *EDGES], NORTH),
    ],
    ids=[
        "never settled",
        "off",
        "never journaled",
        "otherwise",
        "of another term",
        "granted too much",
        "by itself, and not journaled",
    ],
)
def test_what_went_wrong_between_sites_is_enough_to_fail(field, own, north):
    found = between(own, north)
    assert getattr(found, field) == 1
    assert not found.holds
    assert not total([found, between([*SOUTH, *EDGES])]).holds


def test_the_table_of_several_sites_says_what_was_between_them():
    """Which of one site it does not have."""
    found = between([*SOUTH, *EDGES[:-1]])
    for several_sites in (False, True):
        text = io.StringIO()
        write_text(text, accounts_table([found], several_sites=several_sites))
        assert ("edges off*" in text.getvalue()) == several_sites
    assert ["r", "4/4", *("0" * 6), "1", *("0" * 5)] in [line.split() for line in text.getvalue().splitlines()]
