"""What is killed when is a function of the seed, and nothing is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from edge_server.trial.chaos.kills import (
    AWAY_WITHIN_S,
    DECIDING,
    KINDS,
    MARK_WITHIN_S,
    MARKS,
    MIXING,
    MOMENT_WITHIN_S,
    schedule,
)

EVERY_MARK = {(kind, mark) for kind in KINDS for mark in MARKS[kind]}


def test_the_same_seed_kills_the_same_and_another_something_else():
    assert schedule(50, 7) == schedule(50, 7)
    assert schedule(50, 7) != schedule(50, 8)


@pytest.mark.parametrize("kills", [0, 1, 2, 12, 201])
def test_half_of_the_kills_wait_for_a_mark(kills):
    drawn = schedule(kills, 3)
    assert len(drawn) == kills
    assert sum(kill.mark is not None for kill in drawn) == kills // 2


def test_every_mark_comes_once_before_any_comes_again():
    """So that short phases are hit as often as long ones."""
    marked = [(kill.victim, kill.mark) for kill in schedule(8 * len(EVERY_MARK), 5) if kill.mark]
    for start in range(0, len(marked), len(EVERY_MARK)):
        assert set(marked[start : start + len(EVERY_MARK)]) == EVERY_MARK
    assert set(Counter(marked).values()) == {4}


def test_other_moments_strike_every_kind_alike_and_all_times_are_within_their_bounds():
    """With 1,000 draws from four kinds each is drawn 250 times, give or take 80 (six standard deviations)."""
    drawn = schedule(2000, 11)
    counts = Counter(kill.victim for kill in drawn if kill.mark is None)
    assert set(counts) == set(KINDS)
    assert all(abs(count - 250) < 80 for count in counts.values())
    for kill in drawn:
        assert 0 <= kill.away_s <= AWAY_WITHIN_S
        assert 0 <= kill.wait_s <= (MARK_WITHIN_S if kill.mark else MOMENT_WITHIN_S)
        assert kill.wait_s == 0 or kill.mark is None or kill.mark.by != kill.victim
    waits = sorted(kill.wait_s for kill in drawn if kill.mark and kill.mark.by != kill.victim)
    assert 0 < waits[len(waits) // 2] < MARK_WITHIN_S / 4


def test_marks_of_several_sites_come_in_turn_from_each_table():
    """Of 30 kills five are in the middle of a gossip, and five in that of a decision; the coordinator is among them."""
    tables = (MARKS, MIXING, DECIDING)
    drawn = schedule(30, 1, tables)
    marked = [(kill.victim, kill.mark) for kill in drawn if kill.mark]
    for place, table in enumerate(tables):
        assert len(marked[place::3]) == 5
        assert all(mark in table[victim] for victim, mark in marked[place::3])
        assert len(set(marked[place::3])) == 5
    assert {kill.victim for kill in schedule(300, 1, tables)} == {*KINDS, "coordinator"}
    own = [
        kill for kill in drawn if kill.mark and kill.mark.by == "server" and kill.victim in ("server", "coordinator")
    ]
    assert own
    assert all(kill.wait_s == 0 for kill in own)
