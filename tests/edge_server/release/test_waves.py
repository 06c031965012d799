"""Waves of a rollout as mathematics: who comes next, when it stops, and that boards that are away do not matter."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from edge_server.journal.rollouts.file import (
    BoardGivenUp,
    BoardReported,
    RolloutOrdered,
    RolloutPlan,
    WaveOpened,
)
from edge_server.journal.rollouts.state import RolloutState, board_standing
from edge_server.release.rollout.step_limits import StepTimer, offline_limit, step_limit, step_limits
from edge_server.release.rollout.waves import (
    AwaitBoards,
    Board,
    EndRollout,
    IssueOrder,
    OpenWave,
    boards_to_roll_back,
    decide,
)
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.packages import AGENT, MOST_BUSY_S
from tests.naming import names_all

PLAN = RolloutPlan(deployment="0001-net-2-aaaa", release="net/2", sha256="", canary=1, waves=(0.1, 0.5, 1.0))
AT = "20260101T000000Z"


def said(state: str, *, committed: int = 1, plan: RolloutPlan = PLAN, reason: str = "") -> ModelStatus:
    """Return what a board says that was offered version 2 and served version 1."""
    return ModelStatus(
        name=plan.name,
        committed=committed,
        previous=1 if committed == 2 else 0,
        candidate=2,
        state=state,
        deployment=plan.deployment,
        reason=reason,
    )


OLD = ModelStatus(name="net", committed=1)
OTHER = RolloutPlan(deployment="0000-net-2-bbbb", release="net/2", sha256="")


class Site:
    """Boards that do what a test says, and the state of a rollout among them."""

    def __init__(self, profiles: Mapping[str, str], plan: RolloutPlan = PLAN) -> None:
        self.boards = {device: Board(profile, online=True, status=OLD) for device, profile in profiles.items()}
        self.state = RolloutState(plan)
        self.opened: list[OpenWave] = []

    def say(self, device: str, status: ModelStatus) -> None:
        """Have a board say how it stands; the journal knows it, as it does before anything is decided."""
        self.boards[device] = self.boards[device]._replace(status=status)
        if device in self.state.offered_boards:
            self.state.apply(BoardReported(at=AT, device=device, status=status))

    def turn(self, device: str, *, online: bool) -> None:
        self.boards[device] = self.boards[device]._replace(online=online)

    def decide(self) -> OpenWave | IssueOrder | EndRollout | AwaitBoards:
        """Decide, and write a wave down."""
        found = decide(self.state, self.boards)
        if isinstance(found, OpenWave):
            for device in found.devices:
                status = self.boards[device].status
                if status:
                    self.state.apply(BoardReported(at=AT, device=device, status=status))
            self.state.apply(WaveOpened(at=AT, devices=found.devices, canary=found.canary))
            self.opened.append(found)
        return found

    def commit_all(self) -> None:
        for device in self.state.offered_boards:
            if self.boards[device].online:
                self.say(device, said("committed", committed=2, plan=self.state.plan))


def fleet(count: int, profiles: tuple[str, ...] = ("pi-4",)) -> dict[str, str]:
    return {f"d{number:02d}": profiles[number % len(profiles)] for number in range(count)}


def test_first_one_board_of_each_profile_then_shares_of_all():
    site = Site(fleet(20, ("pi-3", "pi-4")))
    sizes = []
    while isinstance(found := site.decide(), OpenWave):
        sizes.append((len(found.devices), found.canary))
        assert isinstance(site.decide(), AwaitBoards)
        site.commit_all()
    assert found == EndRollout("finished", ())
    assert sizes == [(2, True), (8, False), (10, False)]  # two are 10 % of twenty already
    assert set(site.opened[0].devices.values()) == {"pi-3", "pi-4"}
    assert len(site.state.offered_boards) == 20


def test_the_next_wave_waits_for_every_board_that_is_there():
    site = Site(fleet(4))
    assert site.decide() == OpenWave({"d00": "pi-4"}, canary=True)
    for state in ("offered", "fetched", "verified", "staged", "trial"):
        site.say("d00", said(state))
        assert isinstance(site.decide(), AwaitBoards)
    site.commit_all()
    assert site.decide() == OpenWave({"d01": "pi-4"}, canary=False)


@pytest.mark.parametrize("state", ["offered", "fetched", "verified", "staged", "trial"])
def test_a_board_that_takes_a_version_of_the_agent_is_waited_for_while_it_restarts(state):
    """Its trial takes it away: else each board after it would be offered what the first has not come back from."""
    site = Site(fleet(4), RolloutPlan(**{**_fields(PLAN), "release": f"{AGENT}/2"}))
    assert site.decide() == OpenWave({"d00": "pi-4"}, canary=True)
    site.say("d00", said(state, plan=site.state.plan))
    site.turn("d00", online=False)
    assert isinstance(site.decide(), AwaitBoards)
    site.turn("d00", online=True)
    site.say("d00", said("rolled-back", plan=site.state.plan, reason="it did not connect"))
    assert site.decide() == IssueOrder("stop", "d00: it did not connect")
    assert list(site.state.offered_boards) == ["d00"]


@pytest.mark.parametrize("state", ["refused", "rolled-back"])
def test_a_canary_that_fails_stops_it_and_no_other_board_is_offered_anything(state):
    site = Site(fleet(8))
    site.decide()
    site.say("d00", said(state, reason="finite: NaN in conv1"))
    assert site.decide() == IssueOrder("stop", "d00: finite: NaN in conv1")
    site.state.apply(RolloutOrdered(at=AT, order="stop", cause="d00"))
    assert site.decide() == EndRollout("stopped", ())
    assert list(site.state.offered_boards) == ["d00"]


def test_it_goes_on_below_the_failures_that_it_may_have_and_stops_at_them():
    plan = RolloutPlan(**{**_fields(PLAN), "max_failures": 2})
    site = Site(fleet(8), plan)
    assert site.decide() == OpenWave({"d00": "pi-4"}, canary=True)
    site.say("d00", said("refused", plan=plan, reason="slow"))
    assert site.decide() == OpenWave({"d01": "pi-4"}, canary=True), "nothing of the profile has shown that it works"
    site.say("d01", said("committed", committed=2, plan=plan))
    found = site.decide()
    assert isinstance(found, OpenWave)
    assert not found.canary
    site.say(next(iter(found.devices)), said("rolled-back", plan=plan, reason="errors"))
    assert isinstance(site.decide(), IssueOrder)


def test_whoever_orders_to_go_on_passes_over_the_failures_that_are_known():
    site = Site(fleet(3))
    site.decide()
    site.say("d00", said("refused"))
    assert isinstance(site.decide(), IssueOrder)
    for order in ("stop", "resume"):
        site.state.apply(RolloutOrdered(at=AT, order=order))
    assert site.decide() == OpenWave({"d01": "pi-4"}, canary=True)
    site.say("d01", said("refused"))
    assert isinstance(site.decide(), IssueOrder)


def test_boards_that_are_away_neither_count_nor_block():
    site = Site(fleet(6))
    for device in ("d00", "d05"):
        site.turn(device, online=False)
    assert site.decide() == OpenWave({"d01": "pi-4"}, canary=True)
    site.commit_all()
    assert site.decide() == OpenWave({"d02": "pi-4"}, canary=False)  # half of the four that are there
    site.turn("d02", online=False)
    found = site.decide()
    assert isinstance(found, OpenWave)
    assert set(found.devices) == {"d03", "d04"}
    site.commit_all()
    assert site.decide() == EndRollout("finished", ("d00", "d02", "d05"))
    for device in ("d00", "d02", "d05"):
        site.turn(device, online=True)
    assert isinstance(site.decide(), AwaitBoards), "who was offered it and is back is waited for again"
    site.say("d02", said("committed", committed=2))
    found = site.decide()
    assert isinstance(found, OpenWave)
    assert set(found.devices) == {"d00", "d05"}
    site.commit_all()
    assert site.decide() == EndRollout("finished", ())


def test_first_boards_that_go_away_one_after_the_other_are_not_replaced_for_ever():
    """So that what takes boards off the network does not walk through all of them."""
    site = Site(fleet(9))
    for _ in range(9):
        found = site.decide()
        if not isinstance(found, OpenWave):
            break
        for device in found.devices:
            site.turn(device, online=False)
    assert isinstance(found, AwaitBoards)
    assert len(site.state.offered_boards) == 2
    site.turn("d01", online=True)
    site.say("d01", said("committed", committed=2))
    assert isinstance(site.decide(), OpenWave)


def test_a_profile_that_comes_later_gets_a_canary_of_its_own():
    site = Site(fleet(4))
    while isinstance(site.decide(), OpenWave):
        site.commit_all()
    site.boards |= {"jetson-1": Board("jetson", online=True, status=OLD), "jetson-2": Board("jetson", online=True)}
    assert site.decide() == OpenWave({"jetson-1": "jetson"}, canary=True)
    site.commit_all()
    assert site.decide() == OpenWave({"jetson-2": "jetson"}, canary=False)


def test_boards_that_have_the_release_or_another_name_are_left_alone():
    plan = RolloutPlan(**{**_fields(PLAN), "devices": "d0[0-3]"})
    site = Site(fleet(8), plan)
    site.say(
        "d00", ModelStatus(name="net", committed=2, previous=1, candidate=2, state="committed", deployment="older")
    )
    opened: set[str] = set()
    while isinstance(found := site.decide(), OpenWave):
        opened |= found.devices.keys()
        site.commit_all()
    assert opened == {"d01", "d02", "d03"}
    assert not site.opened[0].canary, "a board of the profile has it already"


def test_pause_opens_no_wave_and_resume_goes_on():
    site = Site(fleet(4))
    site.decide()
    site.state.apply(RolloutOrdered(at=AT, order="pause"))
    assert isinstance(site.decide(), AwaitBoards)
    site.commit_all()
    assert isinstance(site.decide(), AwaitBoards)
    site.state.apply(RolloutOrdered(at=AT, order="resume"))
    assert isinstance(site.decide(), OpenWave)


def test_taking_it_back_waits_for_those_that_are_there_and_leaves_alone_who_had_it_before():
    site = Site(fleet(4))
    site.boards["d03"] = Board("pi-4", online=True, status=said("committed", committed=2, plan=OTHER))
    while isinstance(site.decide(), OpenWave):
        site.commit_all()
    site.state.apply(RolloutOrdered(at=AT, order="back"))
    assert boards_to_roll_back(site.state, site.boards) == ["d00", "d01", "d02"]
    site.turn("d02", online=False)
    assert isinstance(site.decide(), AwaitBoards)
    for device in ("d00", "d01"):
        site.say(device, said("rolled-back", committed=1))
    assert site.decide() == EndRollout("taken-back", ("d02",))


def test_a_first_release_that_is_committed_has_nothing_to_go_back_to():
    site = Site(fleet(1))
    site.boards["d00"] = Board("pi-4", online=True)
    site.decide()
    first = ModelStatus(name="net", committed=2, candidate=2, state="committed", deployment=PLAN.deployment)
    site.say("d00", first)
    site.state.apply(RolloutOrdered(at=AT, order="back"))
    assert site.decide() == EndRollout("taken-back", ())


def test_without_any_board_it_waits():
    assert isinstance(decide(RolloutState(PLAN), {}), AwaitBoards)


def test_a_status_of_another_deployment_says_nothing_of_this_one():
    other = ModelStatus(name="net", committed=1, candidate=2, state="refused", deployment="0000-net-2-bbbb")
    assert board_standing(PLAN, other) == "waiting"
    assert board_standing(PLAN, said("superseded")) == "superseded"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_boards_do_it_ends_and_never_passes_its_limits(seed):
    """Boards come, go, commit and fail at random: no wave passes its share, failures stop it at once."""
    draw = random.Random(seed)
    plan = RolloutPlan(**{**_fields(PLAN), "max_failures": 1 + seed % 3, "canary": seed % 3})
    site = Site(fleet(30, ("a", "b", "c")), plan)
    for _ in range(2000):
        found = site.decide()
        if isinstance(found, IssueOrder):
            assert len(site.state.failures) >= plan.max_failures
            return
        assert len(site.state.failures) < plan.max_failures
        if isinstance(found, EndRollout):
            lacking = {one for one, board in site.boards.items() if board_standing(plan, board.status) != "committed"}
            failed = set(site.state.failures)
            assert lacking - failed == set(found.behind)
            return
        device = draw.choice(sorted(site.boards))
        site.turn(device, online=draw.random() < 0.9)
        if device in site.state.offered_boards and site.boards[device].online:
            good = draw.random() < 0.97
            site.say(device, said("committed", committed=2, plan=plan) if good else said("refused", plan=plan))
    pytest.fail("it does not end")


def _fields(plan: RolloutPlan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def test_every_step_of_a_board_has_its_time_and_what_it_is_away_does_not_count():
    patience, device = StepTimer(), "d00"

    def taken(status: ModelStatus, seconds: range) -> list[int]:
        """Return the first of these seconds at which it has taken too long."""
        limits = {device: step_limit(PLAN, status, size=1_600_000)}
        return [now for now in seconds if patience.overdue(limits, float(now))][:1]

    offered, fetched, trial = (said(one) for one in ("offered", "fetched", "trial"))
    assert taken(OLD, range(200)) == []
    patience.overdue({}, 10_000.0)
    assert taken(offered, range(10_000, 10_100)) == [10_022], "FETCH_S and 100 s at 16 kB/s, of which 199 have passed"
    assert taken(fetched, range(11_000, 14_000)) == [11_000 + 1921]
    assert taken(trial, range(14_000, 17_000)) == [14_000 + 3 * 600 + 60 + 120 + 1]
    assert step_limit(PLAN, said("committed", committed=2), 1) is None
    assert step_limit(PLAN, said("refused"), 1) is None


def test_a_step_that_a_board_comes_back_to_goes_on_where_it_was():
    """Else one that is there and away by turns would hold the others for ever."""
    patience = StepTimer()
    given_up = []
    for now in range(4_000):
        step = step_limit(PLAN, said("fetched" if now % 20 < 10 else "trial"), 1)
        given_up += [(now, cause) for cause in patience.overdue({"d00": step}, float(now)).values()]
    assert given_up[0][0] == 3841
    assert names_all(given_up[0][1], "1920 s")


@pytest.mark.parametrize("state", ["offered", "fetched", "verified", "staged", "trial"])
def test_who_took_a_version_of_the_agent_and_stays_away_has_its_time_too(state):
    site = Site(fleet(4), RolloutPlan(**{**_fields(PLAN), "release": f"{AGENT}/2", "soak_s": 120.0}))
    site.decide()
    site.say("d00", said(state, plan=site.state.plan))
    site.turn("d00", online=False)
    [limit] = step_limits(site.state, site.boards, lambda _device: 0).values()
    assert (limit.step, limit.seconds) == ("trial", 3 * 120 + 180)
    assert names_all(limit.cause, "540 s", "device-agent upgrade status", "edge-server rollout resume")
    patience = StepTimer()
    assert next(now for now in range(600) if patience.overdue({"d00": limit}, float(now))) == 541
    site.boards["d00"] = site.boards["d00"]._replace(until="2026-01-01T00:09:00Z")
    found = site.decide()
    assert isinstance(found, AwaitBoards)
    assert names_all(found.why, "d00", "2026-01-01T00:09:00Z")
    site.state.apply(BoardGivenUp(at=AT, device="d00", cause=limit.cause))
    assert step_limits(site.state, site.boards, lambda _device: 0) == {}
    assert site.decide() == IssueOrder("stop", f"d00: {limit.cause}")
    site.state.apply(RolloutOrdered(at=AT, order="resume"))
    assert site.decide() == OpenWave({"d01": "pi-4"}, canary=True), "nobody has shown that it does no harm"


def test_a_board_that_is_away_holds_nobody_up_with_a_model_and_before_it_said_that_it_takes_it():
    agent = RolloutPlan(**{**_fields(PLAN), "release": f"{AGENT}/2"})
    assert offline_limit(PLAN, said("trial")) is None
    for status in (None, OLD, said("committed", committed=2, plan=agent), said("rolled-back", plan=agent)):
        assert offline_limit(agent, status) is None


def test_a_board_that_waits_for_its_own_task_refuses_a_version_of_the_agent_before_the_gateway_gives_it_up():
    agent = RolloutPlan(**{**_fields(PLAN), "release": f"{AGENT}/2"})
    for state in ("fetched", "verified", "staged"):
        limit = step_limit(agent, said(state, plan=agent), 1)
        assert (limit.step, limit.seconds) == ("gates", MOST_BUSY_S + 300)


def test_a_board_that_was_given_up_has_failed_until_it_says_that_it_made_it():
    site = Site(fleet(4))
    site.decide()
    site.say("d00", said("offered"))
    site.state.apply(BoardGivenUp(at=AT, device="d00", cause="too slow"))
    assert site.decide() == IssueOrder("stop", "d00: too slow")
    site.say("d00", said("committed", committed=2))
    assert site.state.failures == {}
    assert isinstance(site.decide(), OpenWave)
