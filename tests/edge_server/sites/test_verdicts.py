"""Both ends of an edge settle it alike whatever is lost, repeated or late between them, or one end knows better."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.sites import verdicts
from edge_server.sites.verdicts import LATE, THEIRS, UNHEARD, EdgeState

STEPS = st.lists(
    st.tuples(st.sampled_from(["owner", "other"]), st.sampled_from(["fetch", "say", "judge", "late", "deliver"]), st.integers(0, 9)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=400, derandomize=True, deadline=None)
@given(STEPS)
def test_no_order_of_words_makes_the_ends_differ_unknown_to_both(steps):
    """Words may be lost (never delivered), delivered again and again, and in any order; each end may be late at any time."""
    ends = {"owner": EdgeState(owns=True), "other": EdgeState(owns=False)}
    said: dict[str, list[tuple[bool, bool | None]]] = {"owner": [], "other": []}
    far = {"owner": "other", "other": "owner"}
    for end, deed, pick in steps:
        before = ends[end]
        if deed == "fetch":
            ends[end] = verdicts.receive(before)
        elif deed == "say":
            said[far[end]].append((before.has, before.on))
        elif deed == "deliver" and said[end]:
            has, on = said[end][pick % len(said[end])]
            ends[end] = verdicts.hear(before, has=has, on=on)
        elif deed in ("judge", "late"):
            ends[end] = verdicts.judge(before, is_late=deed == "late")
        assert before.on is None or ends[end].on == before.on, "a settled edge stays as it is"
    owner, other = ends["owner"], ends["other"]
    if owner.on is not None and other.on is not None and owner.on != other.on:
        assert other.cause == UNHEARD
        assert owner.on
    if owner.on:
        assert owner.has
    if other.on:
        assert owner.on
        assert other.has


def test_the_usual_way():
    """The owner has both words and settles; the other end waits for that."""
    owner, other = EdgeState(owns=True), EdgeState(owns=False)
    other = verdicts.judge(verdicts.receive(other), is_late=False)
    assert other.on is None
    owner = verdicts.judge(verdicts.hear(verdicts.receive(owner), has=True, on=None), is_late=False)
    assert owner.on is True
    other = verdicts.judge(verdicts.hear(other, has=True, on=owner.on), is_late=False)
    assert other.on is True
    assert not verdicts.differs(other)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (EdgeState(owns=True, has=True), LATE),
        (EdgeState(owns=False, has=True, given=True), UNHEARD),
        (EdgeState(owns=True, has=True, given=True, heard=False), THEIRS),
        (EdgeState(owns=False, heard=False, cause="not-finite"), "not-finite"),
    ],
)
def test_why_an_edge_is_off(state, cause):
    after = verdicts.judge(state, is_late=True)
    assert (after.on, after.cause) == (False, cause)


def test_an_owner_hears_that_the_other_end_gave_up():
    """It settled the edge as on, and its word came too late: it can say so."""
    owner = EdgeState(owns=True, has=True, given=True, on=True)
    assert verdicts.differs(verdicts.hear(owner, has=True, on=False, cause=UNHEARD))
    assert verdicts.refuse(owner, "shape") == owner
