"""Energy pledges: no joule is granted twice, in any order of messages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.sites import pledges
from edge_server.sites.pledges import EnergyAccount, GrantLog, coordinator_of, next_term, share_out

ORDER = ("a", "b", "c", "d")
TOTAL = 100.0
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["raise", "send", "deliver", "decide", "ask", "answer", "next"]),
        st.integers(0, 3),
        st.integers(0, 40),
        st.floats(0.0, 1.0),
    ),
    max_size=120,
)


class Halves:
    """Four sites whose messages are delivered in any order, or never, or again; nobody shares a memory with another."""

    def __init__(self) -> None:
        self.purses = {site: EnergyAccount(TOTAL / len(ORDER)) for site in ORDER}
        self.books = {site: GrantLog() for site in ORDER}
        self.rounds = dict.fromkeys(ORDER, 1)
        self.told: dict[str, dict] = {site: {} for site in ORDER}
        self.air: dict[str, list] = {site: [] for site in ORDER}
        self.answers: dict[str, list] = {site: [] for site in ORDER}
        self.alone = dict.fromkeys(ORDER, 0.0)

    def do(self, deed: str, site: str, pick: int, share: float) -> None:
        """Have a site do something."""
        match deed:
            case "raise":
                term = next_term(ORDER, self.books[site].term, {site, ORDER[pick % 4]})
                self.books[site] = pledges.adopt_term(self.books[site], term)
            case "send":
                self.send(site, share)
            case "deliver":
                self.deliver(site, pick)
            case "decide":
                self.decide(site, share)
            case "ask":
                self.ask(site)
            case "answer":
                self.answer(site, pick)
            case "next":
                self.rounds[site] += 1

    def send(self, site: str, share: float) -> None:
        """Put a part aside for the coordinator of the site's term, and tell it."""
        key = (self.rounds[site], self.books[site].term)
        self.purses[site] = pledges.pledge(self.purses[site], key, share * self.purses[site].rights)
        self.air[coordinator_of(ORDER, key[1])].append((site, key, self.purses[site].pledged[key]))

    def deliver(self, site: str, pick: int) -> None:
        """Have a coordinator hear one of the pledges that were ever sent to it."""
        if self.air[site]:
            peer, key, joules = self.air[site][pick % len(self.air[site])]
            self.books[site] = pledges.adopt_term(self.books[site], key[1])
            if key not in self.books[site].grants and key[1] == self.books[site].term:
                self.told[site].setdefault(key, {})[peer] = joules

    def decide(self, site: str, needs: float) -> None:
        for key, known in self.told[site].items():
            wanted = {peer: needs * TOTAL * (1 + place) for place, peer in enumerate(known)}
            self.books[site] = pledges.settle(self.books[site], key, share_out(known, wanted))

    def ask(self, site: str) -> None:
        """Have coordinators say what became of every pledge; whether that arrives is another thing."""
        for key, joules in self.purses[site].pledged.items():
            granted = pledges.find_grant(self.books[coordinator_of(ORDER, key[1])], site, key, joules)
            if granted is not None:
                self.answers[site].append((key, granted))

    def answer(self, site: str, pick: int) -> None:
        if self.answers[site]:
            key, granted = self.answers[site][pick % len(self.answers[site])]
            self.purses[site] = pledges.credit(self.purses[site], key, granted)

    def check(self) -> None:
        """What all may spend, with what they have spent alone, and all grants that are still to be told."""
        rights = math.fsum(purse.rights for purse in self.purses.values())
        coming = 0.0
        for site, purse in self.purses.items():
            for key, joules in purse.list_open():
                coming += pledges.find_grant(self.books[coordinator_of(ORDER, key[1])], site, key, joules) or 0.0
            assert purse.rights >= -1e-9
        assert rights + coming <= TOTAL * (1 + 1e-9)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(DEEDS)
def test_no_joule_is_spent_twice(deeds):
    """After every single deed; terms only grow."""
    world = Halves()
    for deed, place, pick, share in deeds:
        before = {one: book.term for one, book in world.books.items()}
        world.do(deed, ORDER[place], pick, share)
        world.check()
        assert all(world.books[one].term >= term for one, term in before.items())


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.dictionaries(st.sampled_from(ORDER), st.floats(0.0, 1e6), min_size=1),
    st.dictionaries(st.sampled_from(ORDER), st.floats(0.0, 1e9)),
)
def test_grants_are_at_most_the_pledges_and_all_of_them_but_for_rounding(put, needs):
    grants = share_out(put, needs)
    total = math.fsum(put.values())
    assert grants.keys() == put.keys()
    assert math.fsum(grants.values()) <= total
    assert math.fsum(grants.values()) == pytest.approx(total, rel=1e-12, abs=1e-300)
    if math.fsum(needs.get(site, 0.0) for site in put) <= total * (1 - 1e-9):
        assert all(grants[site] >= needs.get(site, 0.0) * (1 - 1e-9) for site in put)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 1.0)), min_size=2, max_size=4), st.integers(1, 9))
def test_with_all_sites_there_the_pledges_are_the_budgets_part_of_the_round(sites, left):
    """(15c) is linear in what is left: the parts of all sites add up to the whole's."""
    spent = [math.fsum(one for one, _ in sites[: place + 1]) * share for place, (_, share) in enumerate(sites)]
    allowances = [one + spent[place] + 1.0 for place, (one, _) in enumerate(sites)]
    parts = [(allowance - used) / left for allowance, used in zip(allowances, spent, strict=True)]
    whole = remaining(math.fsum(allowances), math.fsum(spent), Place(9 - left, 9))
    assert math.fsum(parts) == pytest.approx(whole, rel=1e-9)


def test_terms_go_round_and_pass_over_who_is_gone():
    assert [coordinator_of(ORDER, term) for term in range(5)] == ["a", "b", "c", "d", "a"]
    assert next_term(ORDER, 0, {"a", "d"}) == 3
    assert next_term(ORDER, 3, {"d"}) == 7
    assert next_term(ORDER, 0, set()) == 1


def test_a_pledge_is_made_once_and_credited_once():
    purse = pledges.pledge(EnergyAccount(10.0), (1, 0), 4.0)
    assert pledges.pledge(purse, (1, 0), 6.0) == purse
    assert purse.rights == pytest.approx(6.0)
    back = pledges.credit(purse, (1, 0), 3.0)
    assert back.rights == pytest.approx(9.0)
    assert pledges.credit(back, (1, 0), 3.0) is back
    assert pledges.credit(back, (2, 0), 3.0) is back
    assert pledges.pledge(EnergyAccount(1.0), (1, 0), 5.0).rights == 0.0
    assert pledges.credit(purse, (1, 0), math.inf) is purse


def test_what_no_decision_can_take_any_more_comes_back_whole():
    book = pledges.settle(GrantLog(), (1, 0), {"a": 2.0})
    assert pledges.find_grant(book, "a", (1, 0), 3.0) == 2.0
    assert pledges.find_grant(book, "b", (1, 0), 3.0) == 3.0
    assert pledges.find_grant(book, "b", (2, 0), 3.0) is None
    assert pledges.find_grant(pledges.adopt_term(book, 4), "b", (2, 0), 3.0) == 3.0
    assert pledges.settle(pledges.adopt_term(book, 4), (2, 0), {"b": 1.0}).grants == book.grants
