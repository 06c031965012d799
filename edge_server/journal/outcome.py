"""What a run came to, in a few lines: its end, its accuracy, where its best model lies, which devices failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from edge_server.journal.records import AnyRecord, Gossiped, closed_rounds, measured_rounds
from edge_server.journal.runs import FOLDER, Run, best_path, checkpoint_path, name_rounds, outcome_of

MOST_NAMED = 4
TRIES_TO_WAIT = 3
"""After so many misses one after the other time alone will hardly mend it."""
REMEDY = (
    "time alone will hardly mend it: `device-agent doctor` on a device that is named says what it lacks; a mistake in "
    "the plan is corrected after Ctrl-C. Once devices are mended, the run goes on by itself"
)

REFUSALS = frozenset({"norm", "not-finite", "shape", "dtype", "unknown-tensor", "digest", "codec"})
"""Causes for which this site refuses a neighbour's model, beside those by which an edge is merely late."""

NEIGHBOUR_REMEDY = "look at that site's log and data; it trains apart from this one"


def frequent_cause(failed: Mapping[str, str]) -> str:
    """Return the cause that most of the failed devices told, with their names; empty where none failed."""
    if not failed:
        return ""
    [(cause, count)] = Counter(dict(sorted(failed.items())).values()).most_common(1)
    names = sorted(device for device, told in failed.items() if told == cause)
    more = f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
    others = f"; {len(failed) - count} failed otherwise" if len(failed) > count else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}: {cause}{others}"


def grouped_causes(failed: Mapping[str, str]) -> list[str]:
    """Return each cause once, with the names of the devices that told it; of many causes the most frequent ones."""
    devices: dict[str, list[str]] = {}
    for device, cause in sorted(failed.items()):
        devices.setdefault(cause, []).append(device)
    ranked = sorted(devices.items(), key=lambda one: -len(one[1]))
    lines = [f"{name_some(names)}: {cause}" for cause, names in ranked[:MOST_NAMED]]
    rest = sum(len(names) for _, names in ranked[MOST_NAMED:])
    return [*lines, *([f"and {rest} more failed"] if rest else [])]


def name_some(names: Sequence[str]) -> str:
    """Return the first few names of a list, and how many there are beside them."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


class RefusedModels(msgspec.Struct, frozen=True, kw_only=True):
    """A neighbour whose models this site refused.

    Attributes:
        gossips: In which its model was refused; `of` is how many there were.
        causes: By how many of them.
    """

    site: str
    gossips: int
    of: int
    causes: dict[str, int]

    @property
    def line(self) -> str:
        """What people are told."""
        why = ", ".join(self.causes)
        return f"models of site {self.site} were refused in {self.gossips} of {self.of} gossips ({why})"


def refused_models(records: Iterable[AnyRecord]) -> list[RefusedModels]:
    """Return the neighbours whose models a site refused, by its journal; who was merely late is not among them."""
    gossips = {record.round: record for record in records if isinstance(record, Gossiped)}
    found: dict[str, Counter[str]] = {}
    for gossip in gossips.values():
        for site, cause in gossip.off.items():
            if cause in REFUSALS:
                found.setdefault(site, Counter())[cause] += 1
    return [
        RefusedModels(site=site, gossips=causes.total(), of=len(gossips), causes=dict(causes.most_common()))
        for site, causes in sorted(found.items())
    ]


class RoundAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model after a round, on the server's test data.

    Attributes:
        named: The round as people are shown it, where that is not its number: `global.edge` of a plan with sites.
        model: The checkpoint; empty where it is not kept.
    """

    round: int
    named: str = ""
    accuracy: float
    model: str = ""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to.

    Attributes:
        outcome: See `edge_server.journal.runs.outcome_of`.
        of: That the plan asks for.
        missed: Of those that ended, without a model.
        failed: Devices whose last task failed, with the cause.
        refused: Neighbours whose models were refused.
    """

    outcome: str
    rounds: int
    of: int
    missed: int
    last: RoundAccuracy | None = None
    best: RoundAccuracy | None = None
    failed: dict[str, str] = {}
    refused: list[RefusedModels] = []


def summarise_outcome(records: Sequence[AnyRecord], folder: Path) -> RunOutcome:
    """Return what a run came to."""
    closed = closed_rounds(records)
    run = Run(folder, list(records))
    measured = measured_rounds(records)
    failed = dict[str, str]()
    for one in closed:
        failed = {device: cause for device, cause in failed.items() if device not in one.arrived} | one.failed
    return RunOutcome(
        outcome=outcome_of(run),
        rounds=len(closed),
        of=run.opened.plan.rounds if run.opened else 0,
        missed=sum(one.outcome == "missed" for one in closed),
        last=_accuracy(measured[-1], run) if measured else None,
        best=_accuracy(max(measured), run) if measured else None,
        failed=dict(sorted(failed.items())),
        refused=refused_models(records),
    )


def _accuracy(measured: tuple[float, int], run: Run) -> RoundAccuracy:
    accuracy, number = measured
    paths = (path(run.folder / FOLDER, number) for path in (checkpoint_path, best_path))
    kept = next((str(path) for path in paths if path.exists()), "")
    named = name_rounds(run.records)(number)
    return RoundAccuracy(round=number, named=named if named != str(number) else "", accuracy=accuracy, model=kept)


def outcome_lines(outcome: RunOutcome, folder: Path) -> list[str]:
    """Return what a run came to for people, with what to type next.

    Args:
        outcome: What it came to.
    """
    missed = f", {outcome.missed} of them missed" if outcome.missed else ""
    lines = [f"{outcome.outcome}: {outcome.rounds} of {outcome.of} rounds{missed}"]
    if outcome.last and outcome.best:
        kept = f", kept in {outcome.best.model}" if outcome.best.model else ""
        last_round, best_round = (one.named or one.round for one in (outcome.last, outcome.best))
        best = f"best {outcome.best.accuracy:.4f} after round {best_round}{kept}"
        lines.append(f"accuracy {outcome.last.accuracy:.4f} after round {last_round}; {best}")
    lines += [f"{one.line}: {NEIGHBOUR_REMEDY}" for one in outcome.refused]
    lines.append(f"next: edge-server report {folder}")
    lines.append(f"record: {folder}")
    return lines
