"""Summary of a run: outcome, best model, failed devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edge_server.journal.compared import best_round, compared_metric, measured_rounds
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import AnyRecord, Gossiped, RoundClosed, select, valid_records
from edge_server.journal.runs import FOLDER, StoredRun, best_path, checkpoint_path, make_round_namer, outcome_of

MOST_NAMED = 4
TRIES_TO_WAIT = 3
"""Consecutive misses after which waiting alone is unlikely to help."""
REMEDY = (
    "waiting is unlikely to help: run `device-agent doctor` on the named devices, or stop with Ctrl-C to correct the "
    "plan. Once the devices are fixed, the run continues by itself"
)

REFUSALS = frozenset({"norm", "not-finite", "shape", "dtype", "unknown-tensor", "digest", "codec"})
"""Causes that mean a neighbour's model was refused rather than late."""

NEIGHBOUR_REMEDY = "check that site's log and data; it trains separately from this one"


def frequent_cause(failed: Mapping[str, str]) -> str:
    """Return the most frequent cause of failure with its devices; empty if none failed."""
    if not failed:
        return ""
    [(cause, count)] = Counter(dict(sorted(failed.items())).values()).most_common(1)
    names = sorted(device for device, device_cause in failed.items() if device_cause == cause)
    more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
    others = f"; {len(failed) - count} failed for other reasons" if len(failed) > count else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}: {cause}{others}"


def grouped_causes(failed: Mapping[str, str]) -> list[str]:
    """Return the most frequent causes of failure, each with its devices."""
    devices: dict[str, list[str]] = {}
    for device, cause in sorted(failed.items()):
        devices.setdefault(cause, []).append(device)
    ranked = sorted(devices.items(), key=lambda item: -len(item[1]))
    lines = [f"{name_some(names)}: {cause}" for cause, names in ranked[:MOST_NAMED]]
    omitted = sum(len(names) for _, names in ranked[MOST_NAMED:])
    return [*lines, *([f"and {omitted} more failed"] if omitted else [])]


def name_some(names: Sequence[str]) -> str:
    """Return the first few names of a list and the number of others."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


class RefusedModels(msgspec.Struct, frozen=True, kw_only=True):
    """A neighbour whose models this site refused.

    Attributes:
        gossips: Gossips in which its model was refused; `of` is the total.
        causes: Number of refusals by cause.
    """

    site: str
    gossips: int
    of: int
    causes: dict[str, int]

    @property
    def line(self) -> str:
        """One sentence for people."""
        causes = ", ".join(self.causes)
        return f"models of site {self.site} were refused in {self.gossips} of {self.of} gossips ({causes})"


def refused_models(records: Sequence[AnyRecord]) -> list[RefusedModels]:
    """Return the neighbours whose models a site refused; merely late ones are left out."""
    gossips = {record.round: record for record in select(records, Gossiped)}
    causes_by_site: dict[str, Counter[str]] = {}
    for gossip in gossips.values():
        for site, cause in gossip.off.items():
            if cause in REFUSALS:
                causes_by_site.setdefault(site, Counter())[cause] += 1
    return [
        RefusedModels(site=site, gossips=causes.total(), of=len(gossips), causes=dict(causes.most_common()))
        for site, causes in sorted(causes_by_site.items())
    ]


class RoundScore(msgspec.Struct, frozen=True, kw_only=True):
    """Model after a round on the server's test data.

    Attributes:
        named: `global.edge` in a plan with sites; empty if the round is shown by its number.
        accuracy: Of a run that is compared by it; unset for others.
        value: The compared metric of the other runs.
        model: Path of the checkpoint; empty if it was not stored.
    """

    round: int
    named: str = ""
    accuracy: float | msgspec.UnsetType = msgspec.UNSET
    value: float | msgspec.UnsetType = msgspec.UNSET
    model: str = ""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run.

    Attributes:
        missed: Ended rounds without a new model.
        failed: Devices whose last task failed, with the cause.
        refused: Neighbours whose models were refused.
        metric: Metric by which models are compared; unset for the accuracy.
    """

    outcome: str
    rounds: int
    of: int
    missed: int
    last: RoundScore | None = None
    best: RoundScore | None = None
    failed: dict[str, str] = {}
    refused: list[RefusedModels] = []
    metric: ComparedMetric | msgspec.UnsetType = msgspec.UNSET


def summarise_outcome(records: Sequence[AnyRecord], folder: Path) -> RunOutcome:
    """Return the outcome of a run."""
    run = StoredRun(folder, records)
    measured, metric = measured_rounds(records), compared_metric(records)
    best = best_round(measured, metric)
    failed, outcomes = dict[str, str](), Counter[str]()
    for end in valid_records(records, RoundClosed):
        failed = {device: cause for device, cause in failed.items() if device not in end.arrived} | end.failed
        outcomes[end.outcome] += 1
    return RunOutcome(
        outcome=outcome_of(run),
        rounds=outcomes.total(),
        of=run.opened.plan.rounds if run.opened else 0,
        missed=outcomes["missed"],
        last=_score(measured[-1], run, metric) if measured else None,
        best=_score(best, run, metric) if best else None,
        failed=dict(sorted(failed.items())),
        refused=refused_models(records),
        metric=msgspec.UNSET if metric == ACCURACY else metric,
    )


def _score(measured: tuple[float, int], run: StoredRun, metric: ComparedMetric) -> RoundScore:
    value, number = measured
    paths = (path(run.folder / FOLDER, number) for path in (checkpoint_path, best_path))
    model = next((str(path) for path in paths if path.exists()), "")
    named = make_round_namer(run.records)(number)
    figure = {"accuracy" if metric == ACCURACY else "value": value}
    return RoundScore(round=number, named=named if named != str(number) else "", model=model, **figure)


def outcome_lines(outcome: RunOutcome, folder: Path) -> list[str]:
    """Return the outcome as text, with the next command to type."""
    missed = f", {outcome.missed} of them missed" if outcome.missed else ""
    lines = [f"{outcome.outcome}: {outcome.rounds} of {outcome.of} rounds{missed}"]
    if outcome.last and outcome.best:
        location = f", stored in {outcome.best.model}" if outcome.best.model else ""
        metric = outcome.metric or ACCURACY
        last, best = (
            f"{metric.format(score.accuracy or score.value or 0.0)} after round {score.named or score.round}"
            for score in (outcome.last, outcome.best)
        )
        lines.append(f"{metric.name} {last}; best {best}{location}")
    lines += [f"{refusal.line}: {NEIGHBOUR_REMEDY}" for refusal in outcome.refused]
    lines.append(f"next: edge-server report {folder}")
    lines.append(f"record: {folder}")
    return lines
