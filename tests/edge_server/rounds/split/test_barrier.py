"""Step barrier, by cases and as a property: progress, and no double counting."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edge_server.rounds.split.barrier import Answer, Barrier, Reply

DEADLINE_S = 10.0


def barrier(*devices: str, steps: int = 3) -> Barrier:
    """Return a session that is about to begin."""
    return Barrier(steps=steps, deadline_s=DEADLINE_S, devices=devices or ("a", "b"))


def give(session: Barrier, device: str, now: float = 0.0) -> None:
    """Offer and deliver features of the open step."""
    assert offer(session, device, session.step) is Reply.TAKE
    session.deliver(device, b"features", now)


def absent(session: Barrier) -> set[str]:
    """Return who is not waited for."""
    return {name for name, one in session.sessions.items() if one.state == "absent"}


def offer(session: Barrier, device: str, step: int, features: bytes = b"features") -> Answer:
    """Offer features."""
    return session.offer(device, step, features)


def test_a_step_is_due_when_all_have_delivered_and_not_before():
    session = barrier()
    assert session.remaining_s(0.0) == math.inf
    give(session, "a", 1.0)
    assert session.remaining_s(3.0) == DEADLINE_S - 2.0
    give(session, "b", 3.0)
    assert session.remaining_s(3.0) == 0.0
    assert session.serve() == (["a", "b"], [])
    assert (session.step, session.missed) == (2, {})


def test_a_step_is_due_at_its_deadline_whatever_floats_make_of_the_sum():
    session = barrier()
    began, now = 5.6, 6.8999999999999995
    give(session, "a", began)
    then = now + session.remaining_s(now)
    assert began + DEADLINE_S - then > 0, "no test of anything"
    assert session.remaining_s(then) == 0.0


def test_the_deadline_counts_from_the_first_features_of_each_step():
    session = barrier()
    for at in (5.0, 100.0):
        give(session, "a", at)
        assert session.remaining_s(at + DEADLINE_S - 1.0) == 1.0
        give(session, "b", at + 2.0)
        session.serve()


def test_who_lacks_at_the_deadline_holds_up_no_later_step_until_it_is_back():
    """It is told the open step, and waited for there: as fast as the others, it would else be behind for ever."""
    session = barrier()
    give(session, "a")
    assert session.remaining_s(DEADLINE_S) == 0.0
    assert session.serve() == (["a"], []), "it had offered nothing"
    assert absent(session) == {"b"}
    give(session, "a", 20.0)
    assert session.remaining_s(20.0) == 0.0, "it waits for one who is absent"
    session.serve()
    give(session, "a", 30.0)
    assert offer(session, "b", 1) == 3, "it is told the open step"
    assert session.remaining_s(30.0) == DEADLINE_S, "who is back is waited for"
    give(session, "b", 31.0)
    assert session.serve() == (["a", "b"], [])
    assert session.missed == {"b": 2}
    assert session.is_over
    assert session.is_done("a")
    assert session.is_done("b")


def test_who_speaks_and_does_not_deliver_is_not_waited_for_again_until_it_has_delivered():
    """Otherwise one device could cost the others a deadline at every step."""
    session = barrier(steps=9)
    for late in range(1, 5):
        give(session, "a")
        assert session.remaining_s(0.0) == (DEADLINE_S if late <= 2 else 0.0)
        assert session.serve()[0] == ["a"]
        assert offer(session, "b", session.step - 1) == session.step
    give(session, "b")
    assert session.remaining_s(0.0) == DEADLINE_S, "what it delivers counts"
    give(session, "a")
    assert session.serve()[0] == ["a", "b"]
    give(session, "a")
    assert session.remaining_s(0.0) == DEADLINE_S, "it is waited for again"


def test_a_gradient_that_was_lost_is_given_again_however_far_the_others_are():
    session = barrier()
    give(session, "a")
    give(session, "b")
    session.serve()
    assert offer(session, "b", 1) is Reply.AGAIN
    give(session, "a", 1.0)
    session.serve()
    assert offer(session, "b", 1) is Reply.AGAIN, "it took part in that step"
    assert offer(session, "b", 2) == 3


def test_a_device_of_an_earlier_process_begins_anew():
    """What it offers was never open here: it is told a step behind its own."""
    session = barrier()
    assert offer(session, "a", 3) == 1
    assert offer(session, "a", 1) is Reply.TAKE
    assert not session.is_done("a"), "an update that it has from before is none of this session"


def test_a_device_that_begins_anew_in_the_same_session_is_answered_as_before():
    """One whose features are others is told where the server is: the gradient of those before is not theirs."""
    session = barrier("a", steps=5)
    for _ in range(3):
        give(session, "a")
        session.serve()
    assert [offer(session, "a", step) for step in (1, 2, 3)] == [Reply.AGAIN] * 3
    assert offer(session, "a", 4) is Reply.TAKE
    assert [offer(session, "a", step, b"others") for step in (1, 3)] == [4, 4]


def test_a_device_that_begins_anew_misses_the_steps_that_it_missed_before_and_no_others():
    session = barrier("a", "b", steps=9)
    for step in range(1, 7):
        give(session, "b")
        if step == 4:
            assert offer(session, "a", 2) == 4
        if step not in (2, 3):
            give(session, "a")
        session.serve()
    assert offer(session, "a", 1) is Reply.AGAIN
    assert offer(session, "a", 2) == 4
    assert [offer(session, "a", step) for step in (4, 5, 6)] == [Reply.AGAIN] * 3
    assert offer(session, "a", 7) is Reply.TAKE
    assert session.missed == {"a": 2}


def test_a_device_that_begins_anew_is_waited_for_on_its_way_to_the_open_step():
    """As one that is back; what it has delivered of that step before it was killed counts."""
    session = barrier("a", "b", steps=9)
    for _ in range(2):
        give(session, "a")
        give(session, "b")
        session.serve()
    give(session, "b", 10.0)
    session.serve()
    assert absent(session) == {"a"}
    assert offer(session, "a", 1) is Reply.AGAIN
    give(session, "b", 30.0)
    assert session.remaining_s(30.0) == DEADLINE_S
    assert offer(session, "a", 2) is Reply.AGAIN
    assert offer(session, "a", 3) == 4
    give(session, "a", 31.0)
    assert offer(session, "a", 1) is Reply.AGAIN, "killed once more"
    assert session.remaining_s(31.0) == 0.0
    assert session.serve() == (["a", "b"], [])
    assert [offer(session, "a", step) for step in (2, 3, 4)] == [Reply.AGAIN, 4, Reply.AGAIN]
    assert session.missed == {"a": 1}


def test_features_that_cannot_be_used_are_missed_and_hold_nobody_up():
    session = barrier()
    offer(session, "b", 1)
    session.refuse("b", 0.0)
    assert offer(session, "b", 1) is Reply.NOTHING
    give(session, "a")
    assert session.remaining_s(0.0) == 0.0
    assert session.serve() == (["a"], ["b"])
    assert (absent(session), session.missed) == (set(), {"b": 1})
    assert offer(session, "b", 1) == 2


def test_a_deadline_runs_from_the_first_features_also_if_they_are_refused():
    session = barrier()
    offer(session, "b", 1)
    session.refuse("b", 2.0)
    assert session.remaining_s(5.0) == DEADLINE_S - 3.0


def test_where_all_that_came_is_refused_the_step_is_over_all_the_same():
    session = barrier("a", steps=1)
    offer(session, "a", 1)
    session.refuse("a", 0.0)
    assert session.remaining_s(0.0) == 0.0
    assert session.serve() == ([], ["a"])
    assert session.is_over
    assert offer(session, "a", 1) == 2
    assert session.is_done("a")


def test_a_device_that_failed_is_out_for_good():
    session = barrier()
    give(session, "a")
    session.drop("b")
    assert session.remaining_s(0.0) == 0.0
    assert not session.is_member("b")
    session.serve()
    give(session, "a")
    session.drop("a")
    assert session.remaining_s(0.0) == math.inf


def test_other_features_take_the_place_of_those_that_are_here():
    session = barrier()
    give(session, "a", 0.0)
    assert offer(session, "a", 1) is Reply.NOTHING
    assert offer(session, "a", 1, b"others") is Reply.TAKE
    assert session.remaining_s(99.0) == math.inf
    session.deliver("a", b"others", 50.0)
    assert session.remaining_s(50.0) == DEADLINE_S
    session.postpone(70.0)
    assert session.remaining_s(70.0) == DEADLINE_S, "nobody could have delivered meanwhile"


DEVICES, STEPS = ("a", "b", "c"), 5


class Anything(RuleBasedStateMachine):
    """`honest` delivers every step at once; the others do whatever they like, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.session, self.now = barrier(*DEVICES, "honest", steps=STEPS), 0.0
        self.served: list[list[str]] = []

    def advance(self) -> None:
        """Let the honest device deliver, and the step be served if it is due."""
        if self.session.is_over:
            return
        if self.session.sessions["honest"].state != "delivered":
            give(self.session, "honest", self.now)
        assert self.session.remaining_s(self.now) <= DEADLINE_S
        if self.session.remaining_s(self.now) == 0.0:
            takers, in_vain = self.session.serve()
            self.served.append(takers)
            assert "honest" in takers
            assert not set(takers) & set(in_vain)

    @invariant()
    def counts(self) -> None:
        """What the barrier counts is where its sessions are."""
        sessions = self.session.sessions.values()
        assert self.session.awaited_devices == {one.device for one in sessions if one.is_waited_for}
        has_begun = any(one.state in {"delivered", "refused"} for one in sessions)
        assert math.isfinite(self.session.remaining_s(self.now)) == has_begun

    @rule(device=st.sampled_from(DEVICES), step=st.integers(1, STEPS), other=st.booleans(), delivers=st.booleans())
    def say(self, device: str, step: int, *, other: bool, delivers: bool) -> None:
        """Offer features of any step, and deliver them or not."""
        if not self.session.is_member(device):
            return
        features = b"others" if other else b"features"
        word = offer(self.session, device, step, features)
        assert word != step, "it is told the step that it is at"
        if word is Reply.AGAIN:
            assert device in self.served[step - 1], "it has no gradient of that step"
        if word is Reply.TAKE:
            assert step == self.session.step
            if delivers:
                self.session.deliver(device, features, self.now)
        self.advance()

    @rule(device=st.sampled_from(DEVICES))
    def refuse(self, device: str) -> None:
        """Offer what cannot be used."""
        open_step = self.session.step
        if (
            self.session.is_member(device)
            and open_step <= STEPS
            and offer(self.session, device, open_step) is Reply.TAKE
        ):
            self.session.refuse(device, self.now)
            self.advance()

    @rule(device=st.sampled_from(DEVICES))
    def fail(self, device: str) -> None:
        """Fail for good."""
        self.session.drop(device)
        self.advance()

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.advance()

    def teardown(self) -> None:
        """Whatever was done, the steps end, and each counts once for each device: it had part in it, or missed it."""
        for _ in range(2 * STEPS):
            self.advance()
            self.now += DEADLINE_S
        assert self.session.is_over
        assert len(self.served) == STEPS
        assert "honest" not in self.session.missed
        assert self.session.is_done("honest")
        for device in filter(self.session.is_member, DEVICES):
            took_part = sum(device in takers for takers in self.served)
            assert self.session.missed.get(device, 0) + took_part == STEPS


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
