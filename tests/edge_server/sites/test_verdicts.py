"""Gossip edge: both ends agree despite lost, repeated or late messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.sites import verdicts
from edge_server.sites.verdicts import LATE, THEIRS, UNHEARD, EdgeState

DEEDS = st.sampled_from(["fetch", "say", "judge", "late", "deliver", "refuse"])
STEPS = st.lists(st.tuples(st.sampled_from(["owner", "other"]), DEEDS, st.integers(0, 9)), max_size=60)
FAR = {"owner": "other", "other": "owner"}


class Ends:
    """Both ends of an edge, and every word that was ever said to each."""

    def __init__(self) -> None:
        self.states = {"owner": EdgeState(owns=True), "other": EdgeState(owns=False)}
        self.said: dict[str, list[tuple[bool, bool | None]]] = {"owner": [], "other": []}

    def do(self, end: str, deed: str, pick: int) -> EdgeState:
        """Return an end's state after it did something, or heard any of the words again."""
        before = self.states[end]
        match deed:
            case "fetch":
                return verdicts.receive_model(before)
            case "refuse":
                return verdicts.refuse(before, "shape") if pick == 0 else before
            case "judge" | "late":
                return verdicts.judge(before, is_late=deed == "late")
            case "deliver" if self.said[end]:
                has, on = self.said[end][pick % len(self.said[end])]
                return verdicts.receive_verdict(before, has=has, on=on)
            case "say":
                self.said[FAR[end]].append((before.has, before.on))
        return before


@settings(max_examples=400, derandomize=True, deadline=None)
@given(STEPS)
def test_no_order_of_words_makes_the_ends_differ_unknown_to_both(steps):
    """Words may never be delivered, or again and again, in any order; each end may be late at any time."""
    ends = Ends()
    for end, deed, pick in steps:
        before = ends.states[end]
        ends.states[end] = after = ends.do(end, deed, pick)
        assert before.on is None or after.on == before.on, "a settled edge stays as it is"
    owner, other = ends.states["owner"], ends.states["other"]
    if owner.on is not None and other.on is not None and owner.on != other.on:
        assert owner.on
        assert other.cause in (UNHEARD, "shape")
    if owner.on:
        assert owner.has
    if other.on:
        assert owner.on
        assert other.has


def test_the_usual_way():
    """The owner has both words and settles; the other end waits for that."""
    owner, other = EdgeState(owns=True), EdgeState(owns=False)
    other = verdicts.judge(verdicts.receive_model(other), is_late=False)
    assert other.on is None
    owner = verdicts.judge(verdicts.receive_verdict(verdicts.receive_model(owner), has=True, on=None), is_late=False)
    assert owner.on is True
    other = verdicts.judge(verdicts.receive_verdict(other, has=True, on=owner.on), is_late=False)
    assert other.on is True
    assert not verdicts.is_contradicted(other)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (EdgeState(owns=True, has=True), LATE),
        (EdgeState(owns=False, has=True, is_delivered=True), UNHEARD),
        (EdgeState(owns=True, has=True, is_delivered=True, peer_verdict=False), THEIRS),
        (EdgeState(owns=False, peer_verdict=False, cause="not-finite"), "not-finite"),
    ],
)
def test_why_an_edge_is_off(state, cause):
    after = verdicts.judge(state, is_late=True)
    assert (after.on, after.cause) == (False, cause)


def test_an_owner_hears_that_the_other_end_gave_up():
    """It settled the edge as on, and its word came too late: it can say so."""
    owner = EdgeState(owns=True, has=True, is_delivered=True, on=True)
    assert verdicts.is_contradicted(verdicts.receive_verdict(owner, has=True, on=False, cause=UNHEARD))
    assert verdicts.refuse(owner, "shape") == owner


def test_a_model_that_is_none_rules_the_edge_out_at_once():
    state = verdicts.judge(verdicts.refuse(EdgeState(owns=True, is_delivered=True), "not-finite"), is_late=False)
    assert (state.on, state.cause) == (False, "not-finite")
