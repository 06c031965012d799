"""What became of every update, round and model of a run that was disturbed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan
from edge_server.journal.records import (
    AnyRecord,
    EdgeSettled,
    Rewound,
    RoundOpened,
    UpdateAccepted,
    closed_rounds,
    valid,
)
from edge_server.plan.plan import Plan
from edge_server.sites.graph import graph_edges, neighbours_of
from edge_server.sites.pledges import coordinator_of
from edge_server.trial.chaos.log_reader import LogLine
from shared.tensors.tree import State

ROUNDING = 1e-9
"""Of sums of joules."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or several together.

    Attributes:
        updates: Updates that were asked for.
        counted_twice: Updates that count more than once; must be 0.
        duplicates: Offers refused because that update had been settled before.
        retrained: Trainings begun again because their trainer died.
        repeated: Trainings begun again since a killed server began their split round anew, as PROTOCOL.md says.
        trained_twice: Trainings begun again for neither reason; must be 0.
        rounds_lost: Rounds of the plan that gave no model; must be 0.
        difference: Largest absolute difference of a parameter of the final model; must be 0.
        edges_off: Of several sites: neighbours with whom this one did not mix when that was due; must be 0.
        undecided: Likewise: rounds whose decision stands in no coordinator's journal, or otherwise; must be 0.
        alone: Likewise: rounds that it decided alone, since it was away when they were decided for all.
        overdrawn: Likewise: rounds for which all sites together were granted more joules than they had pledged, of
            those that this one was granted some for; must be 0.
        terms: Likewise: how often another site began to coordinate.
    """

    run: str
    updates: int
    accepted: int
    counted_twice: int
    duplicates: int
    retrained: int
    trained_twice: int
    rounds_lost: int
    difference: float
    repeated: int = 0
    edges_off: int = 0
    undecided: int = 0
    overdrawn: int = 0
    alone: int = 0
    terms: int = 0

    @property
    def holds(self) -> bool:
        """Tell whether nothing was lost and nothing was done or counted twice."""
        lost = self.updates - self.accepted, self.counted_twice, self.trained_twice, self.rounds_lost
        return not any((*lost, self.edges_off, self.undecided, self.overdrawn)) and self.difference == 0.0


def account(
    run: str, records: Sequence[AnyRecord], said: Sequence[LogLine], *, rounds: int, final: State, expected: State
) -> Account:
    """Return what became of a run.

    Args:
        said: What all processes said, in order for each.
        rounds: How many it was to have; the devices' measurement before them and evaluation after them count as none.
        final: The state it ended with.
        expected: The state an undisturbed run ends with.
    """
    kept = [
        one for one in valid(records) if not isinstance(one, RoundOpened | UpdateAccepted) or 0 < one.round <= rounds
    ]
    counted = Counter((one.round, one.device) for one in kept if isinstance(one, UpdateAccepted))
    anew = Counter(one.round for one in records if isinstance(one, Rewound) and one.reopened)
    retrained, repeated, twice = trainings(said, run, anew)
    return Account(
        run=run,
        updates=sum(len(one.assignments) for one in kept if isinstance(one, RoundOpened)),
        accepted=len(counted),
        counted_twice=sum(times - 1 for times in counted.values()),
        duplicates=sum(one.facts.get("run") == run for one in said if one.phase in ("duplicate", "late")),
        retrained=retrained,
        repeated=repeated,
        trained_twice=twice,
        rounds_lost=rounds - sum(one.outcome == "aggregated" for one in closed_rounds(records)),
        difference=difference(final, expected),
    )


def between_sites(found: Account, plan: Plan, site: str, records: Mapping[str, Sequence[AnyRecord]]) -> Account:
    """Return the account of a site's run with what became of its edges and of the decisions that it went by.

    Args:
        found: What it is of its own journal.
        records: The journal of each site.
    """
    own, sites = records[site], plan.sites
    assert sites
    edges = {(one.round, one.site): one.on for one in own if isinstance(one, EdgeSettled)}
    due = [number for number in range(1, plan.rounds + 1) if sites.is_mixed(number)]
    near = neighbours_of(site, graph_edges(sites))
    decided, taken = coordinated(records), decisions(own, plan.rounds)
    alone = [one for one in taken.values() if coordinator_of(sites.names, one.term) != site == one.coordinator]
    others = {number: one for number, one in taken.items() if one not in alone}
    return msgspec.structs.replace(
        found,
        edges_off=sum(not edges.get((number, peer)) for number in due for peer in near),
        undecided=sum(
            not _is_of(one, decided.get((one.coordinator, number, one.term))) for number, one in others.items()
        ),
        overdrawn=len(overdrawn(records) & {(one.round, one.term) for one in own if isinstance(one, Granted)}),
        alone=len(alone),
        terms=sum(isinstance(one, TermBegan) for one in own),
    )


def decisions(records: Sequence[AnyRecord], rounds: int) -> dict[int, Decision]:
    """Return what was decided for a site's devices by the sites, by the number of the round.

    Args:
        rounds: Of the plan; the devices' evaluation has later numbers.
    """
    opened = [one for one in valid(records) if isinstance(one, RoundOpened) and one.round <= rounds]
    return {one.round: one.decision for one in opened if one.decision and one.decision.coordinator}


def coordinated(records: Mapping[str, Sequence[AnyRecord]]) -> dict[tuple[str, int, int], Decision]:
    """Return what each site has decided for all, by its name, round and term."""
    return {
        (site, one.round, one.term): one.decision
        for site, own in records.items()
        for one in own
        if isinstance(one, Coordinated) and one.decision
    }


def overdrawn(records: Mapping[str, Sequence[AnyRecord]]) -> set[tuple[int, int]]:
    """Return the rounds and terms for which the sites were granted more joules than they had pledged."""
    told = [one for own in records.values() for one in own if isinstance(one, Granted | Pledged)]
    keys = {(one.round, one.term) for one in told}
    sums = {
        (kind, key): math.fsum(one.joules for one in told if isinstance(one, kind) and (one.round, one.term) == key)
        for key in keys
        for kind in (Granted, Pledged)
    }
    return {key for key in keys if sums[Granted, key] > sums[Pledged, key] * (1 + ROUNDING)}


def _is_of(part: Decision, whole: Decision | None) -> bool:
    """Tell whether a site's devices were given what its coordinator's journal has for them."""
    return whole is not None and all(
        device in whole.devices and whole.devices[device].values == given.values
        for device, given in part.devices.items()
    )


def trainings(said: Iterable[LogLine], run: str, anew: Mapping[int, int]) -> tuple[int, int, int]:
    """Return how often a training of a run was begun again: since its trainer died, since its round was, for less.

    A trainer died of a training where the next one of its device begins (`importing`) before that was committed or
    failed. A round that its server began anew is trained again by each of its devices, at most once each time.

    Args:
        said: What all processes said, in order for each.
        anew: How often its server began each split round anew.
    """
    under_way: dict[str, tuple[str, str]] = {}
    died: dict[tuple[str, str], bool] = {}
    again = Counter[tuple[str, str]]()
    retrained = repeated = twice = 0
    for one in said:
        if one.by == "trainer" and one.phase == "training" and one.facts["run"] == run:
            key = under_way[one.name] = one.name, one.facts["round"]
            retrained += died.get(key) is True
            if died.get(key) is False:
                is_anew = again[key] < anew.get(int(key[1]), 0)
                again[key] += is_anew
                repeated, twice = repeated + is_anew, twice + (not is_anew)
            died[key] = False
        elif one.by == "trainer" and one.phase in ("committed", "failed"):
            under_way.pop(one.name, None)
        elif one.by == "trainer" and one.phase == "importing" and one.name in under_way:
            died[under_way.pop(one.name)] = True
    return retrained, repeated, twice


def difference(one: State, other: State) -> float:
    """Return the largest absolute difference of two states' leaves; infinite where they cannot be compared."""
    if {key: leaf.shape for key, leaf in one.tree.items()} != {key: leaf.shape for key, leaf in other.tree.items()}:
        return math.inf
    apart = [float((leaf.double() - other.tree[key].double()).abs().max()) for key, leaf in one.tree.items()]
    return max((math.inf if math.isnan(each) else each for each in apart), default=math.inf)
