"""Which jobs may begin: those that share no device with a running one, and overtake none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_server.trial.job_runner import choose_due, share_devices

GROUPS = st.none() | st.frozensets(st.sampled_from("abcd"), min_size=1)


def test_disjoint_devices_begin_at_once():
    a, b, both = frozenset("a"), frozenset("b"), frozenset("ab")
    assert choose_due([a, b], []) == [True, True]
    assert choose_due([a, b], [a]) == [False, True]
    assert choose_due([both, a, frozenset("c")], [b]) == [False, False, True], "nobody overtakes the first"
    assert choose_due([None, a], []) == [True, False], "any device that connects: all of them"
    assert choose_due([None, a], [b]) == [False, False]


def test_jobs_without_their_devices_are_overtaken():
    a, b, both = frozenset("a"), frozenset("b"), frozenset("ab")
    assert choose_due([both, a, b], [], [True, False, False]) == [True, True, True]
    assert choose_due([both, a, a], [], [True, False, False]) == [True, True, False], "one at a time"
    assert choose_due([None, a], [b], [True, False]) == [False, True]


@given(st.lists(GROUPS, max_size=6), st.lists(GROUPS, max_size=3))
def test_what_begins_shares_no_device_and_overtakes_nobody(waiting, taken):
    due = choose_due(waiting, taken)
    for place, (members, may_begin) in enumerate(zip(waiting, due, strict=True)):
        in_the_way = [*taken, *waiting[:place]]
        assert may_begin == (not any(share_devices(members, others) for others in in_the_way))
    if waiting and not taken:
        assert due[0], "the queue never stands still"
