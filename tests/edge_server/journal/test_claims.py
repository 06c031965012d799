"""Which joules are believed: what the server's clock and the other devices leave room for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.journal.claims import Claims, DeviceClaims, PartTotal
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, CostSettled, RoundClosed, RoundOpened, ServerBegan, UpdateAccepted
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper, Update
from shared.protocol.plausible import FIGURES

TOLD = Assignment(seed=0, hyper=Hyper())
BEGAN = ServerBegan(at=100.0)


def opened(number: int, *names: str, at: float | None) -> RoundOpened:
    return RoundOpened(round=number, assignments=dict.fromkeys(names, TOLD), at=at)


def came(name: str, joules: float, at: float | None, number: int = 1) -> UpdateAccepted:
    update = Update(run="r", round=number, device=name, params=None, cost=Cost(compute_joules=joules))
    return UpdateAccepted(round=number, device=name, update=update, bytes_up=1, at=at)


def doubted(*records: AnyRecord) -> list[str]:
    claims = Claims()
    claims.take(records)
    return [one.device for one in claims.rejected_figures()]


def fleet(**tasks: tuple[float, float]) -> list[AnyRecord]:
    """One round of devices with so many joules in so many seconds."""
    return [
        BEGAN,
        opened(1, *tasks, at=100.0),
        *(came(name, joules, 100.0 + seconds) for name, (joules, seconds) in tasks.items()),
    ]


@pytest.mark.parametrize(
    ("joules", "seconds", "is_believed"),
    [
        (30.0, 10.0, True),  # as the others
        (290.0, 10.0, True),  # less than ten times as much
        (330.0, 10.0, False),
        (3000.0, 1000.0, True),  # a large share of the data, at the same 3 W
        (200.0, 0.0, True),  # a fast processor
        (1e18, 10.0, False),
        (1e18, 1e18, False),
        (math.inf, 10.0, False),
        (-1.0, 10.0, False),
    ],
)
def test_what_is_far_beyond_the_others_in_joules_and_in_watts_is_not_believed(joules, seconds, is_believed):
    found = doubted(*fleet(a=(30.0, 10.0), b=(33.0, 10.0), x=(joules, seconds), c=(30.0, 10.0)))
    assert found == ([] if is_believed else ["x"])


@pytest.mark.parametrize(("joules", "is_believed"), [(2000.0 * 11, True), (2001.0 * 11, False)])
def test_alone_a_device_is_held_to_what_any_may_draw(joules, is_believed):
    assert doubted(*fleet(x=(joules, 10.0))) == ([] if is_believed else ["x"])


@pytest.mark.parametrize(("seconds", "is_believed"), [(79.0, True), (81.0, False), (1e18, False)])
def test_seconds_that_the_server_did_not_see_pass_are_not_believed(seconds, is_believed):
    """Ten passed: twice as many and a minute are 80."""
    records = [
        *fleet(a=(30.0, 10.0)),
        CostSettled(round=1, device="a", cost=Cost(upload_s=seconds, compute_joules=3.0)),
    ]
    assert doubted(*records) == ([] if is_believed else ["a"])
    assert costs_by_round(records)[1]["a"] == Cost(upload_s=seconds if is_believed else None, compute_joules=3.0)


def task(name: str, number: int, seconds: float, **cost: float) -> list[AnyRecord]:
    """One task of a round that opens at 100 times its number and whose update comes so much later."""
    update = Update(run="r", round=number, device=name, params=None, cost=Cost(**cost))
    at = 100.0 * number + seconds
    return [UpdateAccepted(round=number, device=name, update=update, bytes_up=1, at=at)]


def rounds_of(*tasks: tuple[int, str, float, dict[str, float]]) -> list[AnyRecord]:
    """Rounds in order, each with its tasks: number, device, seconds, cost."""
    records: list[AnyRecord] = [ServerBegan(at=1.0)]
    for number in sorted({number for number, *_ in tasks}):
        own = [one for one in tasks if one[0] == number]
        records.append(opened(number, *(name for _, name, *_ in own), at=100.0 * number))
        records += [record for _, name, seconds, cost in own for record in task(name, number, seconds, **cost)]
    return records


IDLE = {"download_joules": 0.01, "download_s": 0.05, "compute_joules": 0.0, "compute_s": 0.0}
STEPS = {"download_joules": 0.01, "download_s": 0.05, "compute_joules": 2.0, "compute_s": 0.5}


@pytest.mark.parametrize("step_rounds", [(2,), (2, 3), (9,), (1, 9)])
def test_tasks_without_a_step_do_not_make_those_with_steps_doubtful(step_rounds):
    """HCEF asks for no step in most rounds: such a task costs its download alone."""
    records = rounds_of(
        *((n, name, 0.6, STEPS if n in step_rounds else IDLE) for n in range(1, 10) for name in ("a", "b", "c"))
    )
    assert doubted(*records) == []


def test_one_task_of_many_steps_is_not_doubtful_beside_tasks_of_one():
    """Fifty steps take fifty times the joules and the seconds of one; the rest of each task is the upload."""
    one = {"compute_joules": 0.2, "compute_s": 0.05}
    fifty = {"compute_joules": 10.0, "compute_s": 2.5}
    assert doubted(*rounds_of(*((1, name, 1.0, one) for name in "abc"), (1, "x", 3.5, fifty))) == []


def test_a_claim_of_one_part_stands_out_although_another_part_is_dear():
    """100 J of download beside 0.01 J of the others, in tasks whose computing takes 50 J."""
    costs = {name: {"download_joules": 0.01, "download_s": 0.05, "compute_joules": 50.0} for name in "abx"}
    costs["x"]["download_joules"] = 100.0
    assert doubted(*rounds_of(*((1, name, 10.0, cost) for name, cost in costs.items()))) == ["x"]


def test_seconds_that_a_device_states_do_not_make_its_joules_plausible():
    """They count up to what the server saw pass."""
    honest = {"compute_joules": 3.0, "compute_s": 1.0}
    assert doubted(
        *rounds_of(
            *((1, name, 2.0, honest) for name in "abc"), (1, "x", 2.0, {"compute_joules": 900.0, "compute_s": 50.0})
        )
    ) == ["x"]


def test_what_was_measured_before_round_1_is_not_usual():
    """A second of steps beside tasks of one step each, and the other way round."""
    measured = {"compute_joules": 0.001, "compute_s": 0.001}
    train = {"compute_joules": 4.0, "compute_s": 1.0}
    names = "abc"
    records = rounds_of(*((0, name, 1.0, measured) for name in names), *((1, name, 1.2, train) for name in names))
    assert doubted(*records) == []


def test_half_of_the_fleet_does_not_make_the_other_half_liars():
    """Two kinds of boards: what is usual lies between them."""
    assert doubted(*fleet(a=(2.0, 1.0), b=(2.0, 1.0), c=(15.0, 2.0), d=(15.0, 2.0))) == []


def test_without_the_servers_clock_only_what_no_task_can_take_is_doubted():
    """Of old journals, and of a round that was open while the server was away, nobody knows for how long."""
    old = [opened(1, "a", "x", at=None), came("a", 3.0, None), came("x", 5e5, None)]
    assert doubted(*old) == []
    assert doubted(*old[:2], came("x", 1e10, None)) == ["x"]
    away = [BEGAN, opened(1, "a", at=100.0), ServerBegan(at=5.0, run_s=0.0), came("a", 1e5, 6.0)]
    assert doubted(*away) == []
    known = [
        ServerBegan(at=100.0, utc_s=1000.0),
        *(opened(1, "a", at=100.0), ServerBegan(at=5.0, run_s=50.0, utc_s=1050.0), came("a", 1.9e5, 55.0)),
    ]
    assert doubted(*known) == []
    assert doubted(*known[:-1], came("a", 2.1e5, 55.0)) == ["a"]


def test_of_a_task_that_was_never_answered_the_time_until_its_cost_came_counts():
    """At 40 s the next round is opened; the cost of the first one comes after that."""
    late = CostSettled(round=1, device="a", cost=Cost(compute_joules=8e4))
    records = [BEGAN, opened(1, "a", at=100.0), opened(2, "a", at=140.0)]
    assert doubted(*records, late) == []
    assert doubted(*records[:2], late) == ["a"]


def test_who_was_given_no_task_spends_nothing():
    """Neither in a round that it was not asked in, nor in one that is yet to come."""
    claims = Claims()
    cost = Cost(compute_joules=5.0)
    claims.take(
        [
            BEGAN,
            opened(1, "a", at=100.0),
            came("a", 3.0, 105.0),
            RoundClosed(round=1, outcome="aggregated", arrived=("a",), seconds=5.0, at=105.0),
        ]
    )
    claims.take([CostSettled(round=1, device="b", cost=cost), CostSettled(round=2, device="a", cost=cost)])
    assert {(device, task) for device, one in claims.accounts.items() for task in one.tasks} == {("a", (0, 1))}


tells = st.lists(st.tuples(st.integers(1, 3), st.none() | st.floats(0, 1e4), st.none() | st.floats(0, 50)), max_size=9)


@given(tells)
def test_sums_are_those_of_what_was_told_last(told):
    """A settled cost stands for the update's, also where it is less or tells nothing."""
    account, last = DeviceClaims(), dict[int, tuple[float | None, float | None]]()
    for number, joules, wall_s in told:
        account.ask((0, number))
        account.tell((0, number), Cost(compute_joules=joules), wall_s)
        last[number] = joules, wall_s
    figures = [
        j
        for j, wall_s in last.values()
        if j is not None and (wall_s is None or j <= FIGURES["cost_w"][1] * (wall_s + 1))
    ]
    for doubted in ((), {((9, 9), "compute_joules")}):
        total = account.totals(doubted).get("compute_joules", PartTotal())
        assert (total.asked, total.told, total.most) == (len(last), len(figures), max(figures, default=0.0))
        assert total.joules == pytest.approx(math.fsum(figures), abs=1e-9)
