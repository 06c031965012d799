"""Summary of a study: a row per cell, statistics per setting."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import NONE, Amount, amount_or_unknown, sum_known, worst_quality
from edge_server.replay.study.grid import Cell, describe_setting
from edge_server.replay.study.result import Result
from edge_server.report.digest import SPLIT_TRAFFIC, Digest, DigestPart, RoundDigest, SpentByRound, ValueOrUnset
from edge_server.report.targets import best_value, last_evaluated, round_reaching

MIN_SPREAD = 2


class CellCost(DigestPart, frozen=True, kw_only=True):
    """Cost of a run: rounds, virtual seconds, joules of all devices, bytes of frames in both directions.

    Attributes:
        exchanged: Bytes of split sessions' features and gradients, included in `bytes`.
    """

    rounds: Amount = NONE
    seconds: Amount = NONE
    joules: Amount = NONE
    bytes: Amount = NONE
    exchanged: Amount = NONE


class CellRow(DigestPart, frozen=True, kw_only=True):
    """Row of one cell.

    Attributes:
        setting: Text shared by cells that differ only in their seeds: variant and values.
        state: `finished`; `stopped` by a missed round or divergence; `failed`; or `waiting` to be run.
        accuracy: Accuracy of the last evaluated model.
        best: Best accuracy, or other compared metric, of any evaluated model.
        metric: The metric by which models are compared; unset for the accuracy.
        whole: Cost of the complete run.
        target: Cost until the study's target; None if it was not reached or there is none.
    """

    cell: str
    setting: str
    variant: str
    settings: dict[str, Any]
    seeds: dict[str, Any]
    state: Literal["finished", "stopped", "failed", "waiting"]
    cause: str = ""
    accuracy: float | None = None
    best: float | None = None
    metric: str | msgspec.UnsetType = msgspec.UNSET
    value: ValueOrUnset = msgspec.UNSET
    whole: CellCost = CellCost()
    target: CellCost | None = None


def is_complete(row: CellRow) -> bool:
    """Return true if the run ended as its plan provides."""
    return row.state in ("finished", "stopped")


class SeedSpread(DigestPart, frozen=True, kw_only=True):
    """Mean of a figure's known values over the seeds, and their number.

    Attributes:
        std: Sample standard deviation; None for fewer than two values.
    """

    mean: Amount
    std: float | None
    count: int


class CostSpread(DigestPart, frozen=True, kw_only=True):
    """Cost of several runs."""

    rounds: SeedSpread
    seconds: SeedSpread
    joules: SeedSpread
    bytes: SeedSpread
    exchanged: SeedSpread


class Group(DigestPart, frozen=True, kw_only=True):
    """Cells of one setting.

    Attributes:
        ended: Number of completed cells, on which all figures are based.
        accuracy, best: Of the cells' models; of the metric `metric` where it is set.
        reached: Number of cells that reached the target, on which `target` is based; None without a target.
    """

    setting: str
    variant: str
    settings: dict[str, Any]
    cells: int
    ended: int
    accuracy: SeedSpread
    best: SeedSpread
    metric: str | msgspec.UnsetType = msgspec.UNSET
    whole: CostSpread
    reached: int | None = None
    target: CostSpread | None = None


class StudySummary(DigestPart, frozen=True, kw_only=True):
    """Summary of a study.

    Attributes:
        target: Value to which `reached` and `target` refer.
        versions: Software versions of the cells; with more than one, results may not be comparable.
    """

    study: str
    target: float | None
    versions: list[dict[str, str]]
    groups: list[Group]
    rows: list[CellRow]

    @property
    def is_complete(self) -> bool:
        """True if every cell is complete."""
        return all(is_complete(row) for row in self.rows)


def summarise(
    study: str,
    cells: Sequence[Cell],
    results: Mapping[str, Result],
    causes: Mapping[str, str],
    target: float | None = None,
) -> StudySummary:
    """Summarise the results of a study: `results` of the completed cells and `causes` of the failed ones, by name."""
    rows = [_row(cell, results.get(cell.name), causes.get(cell.name), target) for cell in cells]
    groups: dict[str, list[CellRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    versions = [
        dict(pairs) for pairs in sorted({tuple(sorted(result.versions.items())) for result in results.values()})
    ]
    grouped = [_group(rows_of_setting, target) for rows_of_setting in groups.values()]
    return StudySummary(study=study, target=target, versions=versions, groups=grouped, rows=rows)


def _row(cell: Cell, result: Result | None, cause: str | None, target: float | None) -> CellRow:
    who: dict[str, Any] = {"cell": cell.name, "setting": describe_setting(cell)}
    who |= {name: getattr(cell, name) for name in ("variant", "settings", "seeds")}
    if result is None:
        return CellRow(**who, state="waiting" if cause is None else "failed", cause=cause or "")
    run = result.digest
    final, reached = last_evaluated(run), round_reaching(run, target) if target is not None else None
    return CellRow(
        **who,
        state="stopped" if run.outcome in ("stopped", "diverged") else "finished",
        cause=run.cause,
        accuracy=final.metric_value() if final and run.metric == ACCURACY else None,
        best=best_value(run),
        metric=msgspec.UNSET if run.metric == ACCURACY else run.metric.name,
        value=msgspec.UNSET if run.metric == ACCURACY else (final.metric_value() if final else None),
        whole=_cost_until(run, run.rounds[-1] if run.rounds else None),
        target=_cost_until(run, reached) if reached else None,
    )


def _cost_until(run: Digest, until: RoundDigest | None) -> CellCost:
    if until is None:
        return CellCost()
    costs: SpentByRound = until.until
    rounds = amount_or_unknown(float(run.rounds.index(until) + 1))
    exchanged = sum_known(getattr(costs, name) for name in SPLIT_TRAFFIC)
    return CellCost(rounds=rounds, seconds=costs.seconds, joules=costs.joules, bytes=costs.bytes, exchanged=exchanged)


def _group(rows: Sequence[CellRow], target: float | None) -> Group:
    first, ended = rows[0], [row for row in rows if is_complete(row)]
    reached = [row.target for row in ended if row.target]
    return Group(
        setting=first.setting,
        variant=first.variant,
        settings=first.settings,
        cells=len(rows),
        ended=len(ended),
        accuracy=spread_of_seeds(amount_or_unknown(row.metric_value()) for row in ended),
        best=spread_of_seeds(amount_or_unknown(row.best) for row in ended),
        metric=next((row.metric for row in ended), msgspec.UNSET),
        whole=_outlay([row.whole for row in ended]),
        reached=None if target is None else len(reached),
        target=_outlay(reached) if reached else None,
    )


def _outlay(costs: Sequence[CellCost]) -> CostSpread:
    return CostSpread(
        **{name: spread_of_seeds(getattr(cost, name) for cost in costs) for name in CostSpread.__struct_fields__}
    )


def spread_of_seeds(amounts: Iterable[Amount]) -> SeedSpread:
    """Return mean and deviation of the known amounts."""
    known_amounts = [amount for amount in amounts if amount.value is not None]
    values = [amount.value for amount in known_amounts if amount.value is not None]
    return SeedSpread(
        mean=Amount(
            value=statistics.fmean(values) if values else None,
            whole=bool(known_amounts) and all(amount.whole for amount in known_amounts),
            quality=worst_quality(amount.quality for amount in known_amounts),
        ),
        std=statistics.stdev(values) if len(values) >= MIN_SPREAD else None,
        count=len(values),
    )
