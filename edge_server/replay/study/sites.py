"""A cell of a plan with several sites: a run for each in a folder of its own, and of all of them one digest.

A cell's accuracy is the mean of the accuracies of the sites' models, in rounds after which every site tested its own,
which is how HCEF's paper compares methods. A round has taken as long as at the site that had it last, and what all
devices spent. Pure, but for `digest_cell`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_server.journal.sqlite import read
from edge_server.plan.plan import Plan
from edge_server.report.digest import Amount, Digest, RoundDigest, SpentByRound, sum_known
from edge_server.report.summarise import digest_run

OUTCOMES = ("diverged", "stopped", "unfinished", "finished")
"""Of runs, the worst first: a cell's is that of its worst site."""


def digest_cell(folder: Path, plan: Plan) -> Digest:
    """Return what a cell came to, by its journals.

    Raises:
        ConfigError: As `digest_run`, or there is no journal.
    """
    if not plan.sites:
        return digest_run(read(folder))
    return merged(folder.name, plan, {site: digest_run(read(folder / site)) for site in plan.sites.names})


def merged(run: str, plan: Plan, by_site: Mapping[str, Digest]) -> Digest:
    """Return what a run came to at all its sites together.

    Args:
        run: What it is called.
        by_site: What it came to at each.
    """
    found = list(by_site.values())
    worst = min(found, key=lambda one: OUTCOMES.index(one.outcome) if one.outcome in OUTCOMES else -1)
    notes = {note: None for one in found for note in one.notes}
    refused = sum((Counter(one.refused) for one in found), Counter[str]())
    rounds = _rounds([one.rounds for one in found])
    ended = {one.round for one in rounds}  # where budgets end a run, sites end it apart
    tasks = [task for one in found for task in one.tasks if task.round in ended]
    return Digest(
        run=run,
        live=any(one.live for one in found),
        started=min(one.started for one in found),
        outcome=worst.outcome,
        cause=worst.cause,
        versions=found[0].versions,
        servers=sum(one.servers for one in found),
        went_back=sum(one.went_back for one in found),
        notes=list(notes),
        refused=dict(sorted(refused.items())),
        classes=found[0].classes,
        personal=any(one.personal for one in found),
        measuring=sum_known(one.measuring for one in found),
        plan=plan,
        rounds=rounds,
        devices=[device for one in found for device in one.devices],
        tasks=sorted(tasks, key=lambda task: task.round),
    )


def _rounds(by_site: Sequence[Sequence[RoundDigest]]) -> list[RoundDigest]:
    """Return the rounds that have ended at every site."""
    numbered = [{one.round: one for one in rounds} for rounds in by_site]
    ended = sorted(set.intersection(*(set(rounds) for rounds in numbered)))
    found, before_s = list[RoundDigest](), 0.0
    for number in ended:
        one = _round([rounds[number] for rounds in numbered], before_s)
        before_s += one.seconds
        found.append(one)
    return found


def _round(sites: Sequence[RoundDigest], before_s: float) -> RoundDigest:
    """Return a round of all sites, which began when the one before had ended everywhere."""
    until = _until([one.until for one in sites])
    return RoundDigest(
        round=sites[0].round,
        outcome=next((one.outcome for one in sites if one.outcome != "aggregated"), "aggregated"),
        online=None if any(one.online is None for one in sites) else sum(one.online or 0 for one in sites),
        selected=sum(one.selected for one in sites),
        arrived=sum(one.arrived for one in sites),
        late=sum(one.late for one in sites),
        failed=sum(one.failed for one in sites),
        accuracy=_mean(sites, lambda one: one.accuracy),
        test_loss=_mean(sites, lambda one: one.test_loss),
        loss=_mean(sites, lambda one: one.loss),
        device_accuracy=_mean(sites, lambda one: one.device_accuracy),
        seconds=max(0.0, (until.seconds.value or 0.0) - before_s),
        joules=sum_known(one.joules for one in sites),
        bytes_up=sum_known(one.bytes_up for one in sites),
        bytes_down=sum_known(one.bytes_down for one in sites),
        features_bytes=sum_known(one.features_bytes for one in sites),
        gradient_bytes=sum_known(one.gradient_bytes for one in sites),
        statistics_bytes=sum_known(one.statistics_bytes for one in sites),
        until=until,
    )


def _until(sites: Sequence[SpentByRound]) -> SpentByRound:
    sums = {name: sum_known(getattr(one, name) for one in sites) for name in SpentByRound.__struct_fields__}
    longest = [one.seconds.value for one in sites if one.seconds.value is not None]
    whole = all(one.seconds.whole for one in sites)
    seconds = Amount(value=max(longest, default=None), whole=whole, quality=sums["seconds"].quality)
    return SpentByRound(**{**sums, "seconds": seconds})


def _mean(sites: Sequence[RoundDigest], figure: Callable[[RoundDigest], float | None]) -> float | None:
    """Return the mean of a figure over the sites; None where one of them does not know it."""
    known = [one for site in sites if (one := figure(site)) is not None]
    return statistics.fmean(known) if len(known) == len(sites) else None
