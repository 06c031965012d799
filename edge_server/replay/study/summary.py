"""What a study came to: a row for every cell, and over the seeds of a setting their mean and spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from edge_server.replay.study.grid import Cell, setting_of
from edge_server.replay.study.result import Result
from edge_server.report.digest import (
    Amount,
    Digest,
    RoundDigest,
    SpentByRound,
    amount_or_unknown,
    sum_known,
    worst_quality,
)
from edge_server.report.targets import best_accuracy, last_evaluated, round_reaching

MIN_SPREAD = 2
NOTHING = Amount()


class SummaryPart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a summary."""


class CellCost(SummaryPart, frozen=True, kw_only=True):
    """What a run took: rounds, virtual seconds of them, joules of all devices, bytes of frames both ways.

    Attributes:
        exchanged: Of these bytes, those of split sessions' features and gradients.
    """

    rounds: Amount = NOTHING
    seconds: Amount = NOTHING
    joules: Amount = NOTHING
    bytes: Amount = NOTHING
    exchanged: Amount = NOTHING


class CellRow(SummaryPart, frozen=True, kw_only=True):
    """One cell.

    Attributes:
        setting: What it shares with the cells that differ from it in nothing but their seeds: variant and values.
        state: `finished`, or `stopped` as its plan says of a missed round or since it diverged; `failed`, or `waiting`
            to be run.
        cause: Why it stopped or failed.
        accuracy: Of the last model that was evaluated.
        best: The highest there was.
        whole: What the whole run took.
        target: What it took until the study's target; None where it never reached it or there is none.
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
    whole: CellCost = CellCost()
    target: CellCost | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended by its plan."""
        return self.state in ("finished", "stopped")


class SeedSpread(SummaryPart, frozen=True, kw_only=True):
    """A figure over several runs.

    Attributes:
        mean: Of those that know it; unknown where none does.
        std: Sample standard deviation, of at least two.
        count: How many know it.
    """

    mean: Amount
    std: float | None
    count: int


class Outlay(SummaryPart, frozen=True, kw_only=True):
    """What several runs took."""

    rounds: SeedSpread
    seconds: SeedSpread
    joules: SeedSpread
    bytes: SeedSpread
    exchanged: SeedSpread


class Group(SummaryPart, frozen=True, kw_only=True):
    """The cells of one setting.

    Attributes:
        cells: How many there are.
        ended: How many of them have ended by their plan; all figures are of these.
        reached: How many of them reached the target; `target` is of these. None where the study has no target.
    """

    setting: str
    variant: str
    settings: dict[str, Any]
    cells: int
    ended: int
    accuracy: SeedSpread
    best: SeedSpread
    whole: Outlay
    reached: int | None = None
    target: Outlay | None = None


class StudySummary(SummaryPart, frozen=True, kw_only=True):
    """A whole study.

    Attributes:
        target: The accuracy that `reached` and `target` below are of.
        versions: Those that its cells were computed with; more than one is a reason to run it anew elsewhere.
    """

    study: str
    target: float | None
    versions: list[dict[str, str]]
    groups: list[Group]
    rows: list[CellRow]

    @property
    def whole(self) -> bool:
        """Whether every cell has ended by its plan."""
        return all(row.ended for row in self.rows)


def summarise(
    study: str,
    cells: Sequence[Cell],
    results: Mapping[str, Result],
    causes: Mapping[str, str],
    target: float | None = None,
) -> StudySummary:
    """Return what a study came to.

    Args:
        results: What of them has ended, by cell.
        causes: Why others failed, by cell.
        target: An accuracy that it asks about.
    """
    rows = [_row(cell, results.get(cell.name), causes.get(cell.name), target) for cell in cells]
    groups: dict[str, list[CellRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    versions = [
        dict(versions_of_cell)
        for versions_of_cell in sorted({tuple(sorted(result.versions.items())) for result in results.values()})
    ]
    grouped = [_group(rows_of_setting, target) for rows_of_setting in groups.values()]
    return StudySummary(study=study, target=target, versions=versions, groups=grouped, rows=rows)


def _row(cell: Cell, result: Result | None, cause: str | None, target: float | None) -> CellRow:
    who: dict[str, Any] = {
        "cell": cell.name,
        "setting": setting_of(cell),
        "variant": cell.variant,
        "settings": cell.settings,
        "seeds": cell.seeds,
    }
    if result is None:
        return CellRow(**who, state="waiting" if cause is None else "failed", cause=cause or "")
    run = result.digest
    final, reached = last_evaluated(run), round_reaching(run, target) if target is not None else None
    return CellRow(
        **who,
        state="stopped" if run.outcome in ("stopped", "diverged") else "finished",
        cause=run.cause,
        accuracy=final.accuracy if final else None,
        best=best_accuracy(run),
        whole=_cost_until(run, run.rounds[-1] if run.rounds else None),
        target=_cost_until(run, reached) if reached else None,
    )


def _cost_until(run: Digest, until: RoundDigest | None) -> CellCost:
    if until is None:
        return CellCost()
    costs: SpentByRound = until.until
    rounds = amount_or_unknown(float(run.rounds.index(until) + 1))
    exchanged = sum_known([costs.features_bytes, costs.gradient_bytes])
    return CellCost(rounds=rounds, seconds=costs.seconds, joules=costs.joules, bytes=costs.bytes, exchanged=exchanged)


def _group(rows: Sequence[CellRow], target: float | None) -> Group:
    first, ended = rows[0], [row for row in rows if row.ended]
    reached = [row.target for row in ended if row.target]
    return Group(
        setting=first.setting,
        variant=first.variant,
        settings=first.settings,
        cells=len(rows),
        ended=len(ended),
        accuracy=spread_of_seeds(amount_or_unknown(row.accuracy) for row in ended),
        best=spread_of_seeds(amount_or_unknown(row.best) for row in ended),
        whole=_outlay([row.whole for row in ended]),
        reached=None if target is None else len(reached),
        target=_outlay(reached) if reached else None,
    )


def _outlay(costs: Sequence[CellCost]) -> Outlay:
    return Outlay(**{name: spread_of_seeds(getattr(cost, name) for cost in costs) for name in Outlay.__struct_fields__})


def spread_of_seeds(amounts: Iterable[Amount]) -> SeedSpread:
    """Return the mean of what is known of some amounts, and how far they lie apart."""
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
