"""Study cell digest: merge the run digests of all sites.

The accuracy is the mean over the sites' models, in rounds after which every site tested its model, as in HCEF's paper.
A round lasts until the last site has ended it, and its costs are those of all devices.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge_server.journal.sqlite import read_records
from edge_server.plan.plan import Plan
from edge_server.record.amounts import sum_known
from edge_server.report.digest import ARRIVALS, Digest, RoundDigest, SpentByRound, Traffic
from edge_server.report.summarise import digest_run

# From worst to best: a cell's outcome is that of its worst site.
OUTCOMES = ("diverged", "stopped", "unfinished", "finished")
COUNTS = ("selected", *ARRIVALS)
MEANS = ("accuracy", "test_loss", "loss", "device_accuracy")


def digest_cell(folder: Path, plan: Plan) -> Digest:
    """Return the digest of a cell from its journals.

    Raises:
        ConfigError: As `digest_run`, or there is no journal.
    """
    if not plan.sites:
        return digest_run(read_records(folder))
    return merge_digests(
        folder.name, plan, {site: digest_run(read_records(folder / site)) for site in plan.sites.names}
    )


def merge_digests(run: str, plan: Plan, by_site: Mapping[str, Digest]) -> Digest:
    """Merge the digests of all sites of a run."""
    digests = list(by_site.values())
    worst = min(digests, key=lambda digest: OUTCOMES.index(digest.outcome) if digest.outcome in OUTCOMES else -1)
    notes = {note: None for digest in digests for note in digest.notes}
    refused = sum((Counter(digest.refused) for digest in digests), Counter[str]())
    rounds = _merge_rounds([digest.rounds for digest in digests])
    ended = {row.round for row in rounds}  # under a budget, sites may end after different rounds
    tasks = [task for digest in digests for task in digest.tasks if task.round in ended]
    return Digest(
        run=run,
        live=any(digest.live for digest in digests),
        started=min(digest.started for digest in digests),
        outcome=worst.outcome,
        cause=worst.cause,
        versions=digests[0].versions,
        servers=sum(digest.servers for digest in digests),
        went_back=sum(digest.went_back for digest in digests),
        notes=list(notes),
        refused=dict(sorted(refused.items())),
        compared=digests[0].compared,
        classes=digests[0].classes,
        personal=any(digest.personal for digest in digests),
        measuring=sum_known(digest.measuring for digest in digests),
        plan=plan,
        rounds=rounds,
        devices=[device for digest in digests for device in digest.devices],
        tasks=sorted(tasks, key=lambda task: task.round),
    )


def _merge_rounds(by_site: Sequence[Sequence[RoundDigest]]) -> list[RoundDigest]:
    """Return the rounds that every site has ended."""
    numbered = [{row.round: row for row in rounds} for rounds in by_site]
    ended = sorted(set.intersection(*(set(rounds) for rounds in numbered)))
    merged_rounds, before_s = list[RoundDigest](), 0.0
    for number in ended:
        merged_round = _merge_round([rounds[number] for rounds in numbered], before_s)
        before_s += merged_round.seconds
        merged_rounds.append(merged_round)
    return merged_rounds


def _merge_round(sites: Sequence[RoundDigest], before_s: float) -> RoundDigest:
    """Merge one round of all sites, which began when all sites had ended the previous one."""
    until = _merge_spent([row.until for row in sites])
    fields: dict[str, Any] = {name: sum(getattr(row, name) for row in sites) for name in COUNTS}
    fields |= {name: _mean(getattr(row, name) for row in sites) for name in MEANS}
    if all(row.value is not msgspec.UNSET for row in sites):
        fields |= {"value": _mean(row.metric_value() for row in sites)}
        fields |= {"device_value": _mean(row.metric_value("device") for row in sites)}
    fields |= {name: sum_known(getattr(row, name) for row in sites) for name in ("joules", *Traffic.__struct_fields__)}
    return RoundDigest(
        round=sites[0].round,
        outcome=next((row.outcome for row in sites if row.outcome != "aggregated"), "aggregated"),
        online=None if any(row.online is None for row in sites) else sum(row.online or 0 for row in sites),
        seconds=max(0.0, (until.seconds.value or 0.0) - before_s),
        until=until,
        **fields,
    )


def _merge_spent(sites: Sequence[SpentByRound]) -> SpentByRound:
    sums = {name: sum_known(getattr(site, name) for site in sites) for name in SpentByRound.__struct_fields__}
    longest = max((site.seconds.value for site in sites if site.seconds.value is not None), default=None)
    return SpentByRound(**sums | {"seconds": msgspec.structs.replace(sums["seconds"], value=longest)})


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean over the sites; None if a value is unknown at a site."""
    every = list(values)
    return None if None in every else statistics.fmean(value for value in every if value is not None)
