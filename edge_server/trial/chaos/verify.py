"""Audit of a disturbed run: every update, round and model accounted for."""

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
    drop_void,
)
from edge_server.plan.plan import Plan
from edge_server.sites.graph import graph_edges, neighbours_of
from edge_server.sites.pledges import coordinator_of
from edge_server.trial.chaos.log_reader import LogLine
from shared.tensors.tree import State

ROUNDING = 1e-9
"""Relative rounding error of sums of joules."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Audit of one run, or of several together.

    Attributes:
        counted_twice: Updates that count more than once; must be 0.
        duplicates: Offers refused because the update was already accepted.
        retrained: Trainings repeated because the trainer died.
        repeated: Trainings repeated because a killed server restarted their split round, as PROTOCOL.md specifies.
        trained_twice: Trainings repeated for neither reason; must be 0.
        rounds_lost: Planned rounds without a model; must be 0.
        difference: Largest absolute difference of a final parameter from the expected one; must be 0.
        edges_off: With several sites, due mixings with a neighbour that did not happen; must be 0.
        undecided: With several sites, rounds whose decision is missing from or differs in the coordinator's journal;
            must be 0.
        alone: With several sites, rounds that it decided alone because it was offline when the others decided.
        overdrawn: With several sites, rounds in which it was granted joules and all grants exceeded the pledges; must
            be 0.
        terms: With several sites, how often another site became coordinator.
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
        """True if nothing was lost, and nothing was done or counted twice."""
        losses = self.updates - self.accepted, self.counted_twice, self.trained_twice, self.rounds_lost
        return not any((*losses, self.edges_off, self.undecided, self.overdrawn)) and self.difference == 0.0


def audit_run(
    run: str, records: Sequence[AnyRecord], log_lines: Sequence[LogLine], *, rounds: int, final: State, expected: State
) -> Account:
    """Return the audit of a run.

    Args:
        log_lines: Phases from all processes' logs, in order for each process.
        rounds: Planned rounds, without the measurement before and the evaluation after them.
        final: State at the end.
        expected: Final state of an undisturbed run.
    """
    relevant = [
        record
        for record in drop_void(records)
        if not isinstance(record, RoundOpened | UpdateAccepted) or 0 < record.round <= rounds
    ]
    counted = Counter((record.round, record.device) for record in relevant if isinstance(record, UpdateAccepted))
    restarts = Counter(record.round for record in records if isinstance(record, Rewound) and record.reopened)
    retrained, repeated, twice = count_retrainings(log_lines, run, restarts)
    return Account(
        run=run,
        updates=sum(len(record.assignments) for record in relevant if isinstance(record, RoundOpened)),
        accepted=len(counted),
        counted_twice=sum(times - 1 for times in counted.values()),
        duplicates=sum(line.facts.get("run") == run for line in log_lines if line.phase in ("duplicate", "late")),
        retrained=retrained,
        repeated=repeated,
        trained_twice=twice,
        rounds_lost=rounds - sum(record.outcome == "aggregated" for record in closed_rounds(records)),
        difference=max_difference(final, expected),
    )


def audit_sites(account: Account, plan: Plan, site: str, records: Mapping[str, Sequence[AnyRecord]]) -> Account:
    """Return a site's audit with its edges and the decisions that it followed.

    Args:
        account: Audit from its own journal alone.
    """
    site_records, sites = records[site], plan.sites
    assert sites
    edges = {(record.round, record.site): record.on for record in site_records if isinstance(record, EdgeSettled)}
    due = [number for number in range(1, plan.rounds + 1) if sites.is_mixed(number)]
    neighbours = neighbours_of(site, graph_edges(sites))
    coordinator_decisions, site_decisions = decisions_by_term(records), decisions(site_records, plan.rounds)
    alone = [
        decision
        for decision in site_decisions.values()
        if coordinator_of(sites.names, decision.term) != site == decision.coordinator
    ]
    others = {number: decision for number, decision in site_decisions.items() if decision not in alone}
    return msgspec.structs.replace(
        account,
        edges_off=sum(not edges.get((number, peer)) for number in due for peer in neighbours),
        undecided=sum(
            not _matches(decision, coordinator_decisions.get((decision.coordinator, number, decision.term)))
            for number, decision in others.items()
        ),
        overdrawn=len(
            find_overdrawn(records)
            & {(record.round, record.term) for record in site_records if isinstance(record, Granted)}
        ),
        alone=len(alone),
        terms=sum(isinstance(record, TermBegan) for record in site_records),
    )


def decisions(records: Sequence[AnyRecord], rounds: int) -> dict[int, Decision]:
    """Return the coordinators' decisions that a site followed, by round.

    Args:
        rounds: Of the plan; evaluations have later numbers.
    """
    openings = [record for record in drop_void(records) if isinstance(record, RoundOpened) and record.round <= rounds]
    return {
        opening.round: opening.decision for opening in openings if opening.decision and opening.decision.coordinator
    }


def decisions_by_term(records: Mapping[str, Sequence[AnyRecord]]) -> dict[tuple[str, int, int], Decision]:
    """Return the decisions in the coordinators' journals, by site, round and term."""
    return {
        (site, record.round, record.term): record.decision
        for site, site_records in records.items()
        for record in site_records
        if isinstance(record, Coordinated) and record.decision
    }


def find_overdrawn(records: Mapping[str, Sequence[AnyRecord]]) -> set[tuple[int, int]]:
    """Return the rounds and terms whose grants exceed the pledges."""
    joule_records = [
        record for site_records in records.values() for record in site_records if isinstance(record, Granted | Pledged)
    ]
    keys = {(record.round, record.term) for record in joule_records}
    sums = {
        (kind, key): math.fsum(
            record.joules for record in joule_records if isinstance(record, kind) and (record.round, record.term) == key
        )
        for key in keys
        for kind in (Granted, Pledged)
    }
    return {key for key in keys if sums[Granted, key] > sums[Pledged, key] * (1 + ROUNDING)}


def _matches(part: Decision, complete: Decision | None) -> bool:
    """Return True if a site's devices were assigned what the coordinator's journal says."""
    return complete is not None and all(
        device in complete.devices and complete.devices[device].values == choice.values
        for device, choice in part.devices.items()
    )


def count_retrainings(log_lines: Iterable[LogLine], run: str, restarts: Mapping[int, int]) -> tuple[int, int, int]:
    """Count repeated trainings by cause: trainer death, restarted round, neither.

    A trainer died during a training if the next trainer of its device starts (`importing`) before that training was
    committed or failed. After a restarted round, each of its devices may train once more per restart.

    Args:
        log_lines: Phases from all processes' logs, in order for each process.
        restarts: Restarts by split round.
    """
    under_way: dict[str, tuple[str, str]] = {}
    died: dict[tuple[str, str], bool] = {}
    repeats = Counter[tuple[str, str]]()
    retrained = repeated = twice = 0
    for line in log_lines:
        if line.by == "trainer" and line.phase == "training" and line.facts["run"] == run:
            key = under_way[line.name] = line.name, line.facts["round"]
            retrained += died.get(key) is True
            if died.get(key) is False:
                is_anew = repeats[key] < restarts.get(int(key[1]), 0)
                repeats[key] += is_anew
                repeated, twice = repeated + is_anew, twice + (not is_anew)
            died[key] = False
        elif line.by == "trainer" and line.phase in ("committed", "failed"):
            under_way.pop(line.name, None)
        elif line.by == "trainer" and line.phase == "importing" and line.name in under_way:
            died[under_way.pop(line.name)] = True
    return retrained, repeated, twice


def max_difference(state: State, other: State) -> float:
    """Return the largest absolute difference between two states; infinite if they are not comparable."""
    if {key: leaf.shape for key, leaf in state.tree.items()} != {key: leaf.shape for key, leaf in other.tree.items()}:
        return math.inf
    differences = [float((leaf.double() - other.tree[key].double()).abs().max()) for key, leaf in state.tree.items()]
    return max((math.inf if math.isnan(value) else value for value in differences), default=math.inf)
