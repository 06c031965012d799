"""Runs of a site: found by name, listed, summarised; the versions that a run's record names."""

from __future__ import annotations

import logging
import platform
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Measured,
    RoundOpened,
    RunClosed,
    RunOpened,
    closed_rounds,
    valid,
)
from edge_server.journal.sqlite import JOURNAL, last_record, read, salvageable_records
from edge_server.plan.data_folder import check_data_folder, claim_data_folder
from edge_server.plan.plan import Plan, is_same_plan, plan_differences
from edge_server.plan.sites import round_name
from shared.errors import ConfigError, CorruptFile, NoSuchRun
from shared.runtime.clock import utc_of_stamp, utc_stamp
from shared.runtime.durable import explain_disk_errors
from shared.runtime.folder_lock import is_held
from shared.spelling import guess

log = logging.getLogger(__name__)

LAST = "last"
"""Stands for the run that was begun last."""
SITES = "sites"
"""In a folder of runs: a folder for each site that a trial with several had on this machine, which holds its runs."""
LOCAL = "local"
"""In the folder of a run with agents on this machine, where their files and logs lie."""
MOST_NAMED = 5
MOST_ENDED = 64
"""Runs that devices are told are over; each is a name in every task."""

ORDER = "order"
"""File of a folder of runs: their names in the order in which they were begun, whatever the clock said."""

DISTRIBUTIONS = ("fieldfleet", "numpy", "torch")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a line."""

    run: str
    plan: str
    algorithm: str
    started: str
    rounds: int
    of: int
    accuracy: float | None
    outcome: str


@dataclass(frozen=True)
class Run:
    """A run's folder and its journal."""

    folder: Path
    records: list[AnyRecord]

    @property
    def opened(self) -> RunOpened | None:
        """Return the record of its beginning."""
        return next((record for record in self.records if isinstance(record, RunOpened)), None)

    @property
    def closed(self) -> RunClosed | None:
        """Return the record of its end, None while there is none."""
        return next((record for record in self.records if isinstance(record, RunClosed)), None)


def name_rounds(records: Iterable[AnyRecord]) -> Callable[[int], str]:
    """Return what people are shown of a run's rounds: their numbers, and where its plan has sites, `global.edge`."""
    plan = next((one.plan for one in records if isinstance(one, RunOpened)), None)
    if plan is None or not plan.sites:
        return str
    rounds, edge_rounds = plan.rounds, plan.sites.edge_rounds
    return lambda number: round_name(number, edge_rounds) if 1 <= number <= rounds else str(number)


def new_name(plan: Plan) -> str:
    """Return a name that no other run has."""
    return f"{plan.name[:32]}-{utc_stamp()}-{uuid.uuid4().hex[:4]}"


def note_begun(folder: Path, *, anew: bool = False) -> None:
    """Write down that a run was begun after all that are there; once, unless it is a replay that is written anew.

    Args:
        anew: Whether it takes the place of an earlier one of its name.
    """
    parents = folder.parents
    data_dir = parents[2] if parents[1].name == SITES else parents[0]
    path = data_dir / ORDER
    if not anew and folder.name in _begun_order(data_dir):
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{folder.name}\n")
    except OSError as error:  # a full disk keeps no run from its rounds
        log.warning("%s: %s: the order of runs goes by calendar time", path, error.strerror)


def _begun_order(data_dir: Path) -> dict[str, int]:
    """Return the place of each run that was noted in the order in which they were begun."""
    try:
        names = (data_dir / ORDER).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: place for place, name in enumerate(names)}


def by_beginning(data_dir: Path) -> Callable[[Run], tuple[int, float]]:
    """Return the key by which runs stand in the order in which they were begun.

    Those of versions that noted no order come before all others, by calendar time.
    """
    order = _begun_order(data_dir)
    return lambda run: (order.get(run.folder.name, -1), _begun_utc_s(run))


def make_folder(data_dir: Path) -> Path:
    """Return a folder of runs that is there, and that this version has written down to write in.

    Raises:
        ConfigError: It cannot be made, or nothing in it; or a newer version wrote there.
        Unwritable: The disk takes nothing more.
    """
    try:
        claim_data_folder(data_dir)
        with explain_disk_errors(data_dir):
            tempfile.TemporaryFile(dir=data_dir).close()
    except OSError as error:
        raise ConfigError(f"{data_dir}: {error.strerror}; name a folder of runs that you may write in") from error
    return data_dir


def exists(data_dir: Path, run: str) -> bool:
    """Tell whether a run of that name was ever begun here."""
    return _holds_run(data_dir / run)


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / JOURNAL).exists()
    except OSError:  # a name longer than file systems take, a folder that we may not look into
        return False


def is_empty(folder: Path) -> bool:
    """Tell whether a run never began: its journal is not there or has no record, and there is nothing to lose."""
    if any(path.is_file() for kind in ("checkpoints", "updates") for path in (folder / kind).rglob("*")):
        return False
    if not _holds_run(folder):
        return True
    try:
        return not read(folder)
    except CorruptFile:
        return False


def find(data_dir: Path, run: str) -> Run:
    """Return a run by its name, by what only its name begins with, by the path of its folder, or the `last` one.

    Raises:
        ConfigError: There is none, several begin so, its journal cannot be read, or a newer version wrote there.
    """
    folder = next(filter(_holds_run, (data_dir / run, Path(run))), None) or _abbreviated(data_dir, run)
    check_data_folder(folder.parent)
    try:
        return Run(folder, read(folder))
    except CorruptFile as error:
        raise ConfigError(f"{error}; restore the file from a copy, or go on with what of the run is whole") from error


def find_all(data_dir: Path, run: str) -> list[Run]:
    """Return a run, found as `find` does, or those of all sites: by what their names begin with, or by their folder.

    The `last` run of a plan with sites stands for those of all of them that were made with it.

    Raises:
        ConfigError: As `find`; or a folder has other runs than those of one plan's sites.
    """
    folder = next((one for one in (data_dir / run, Path(run)) if run and one.is_dir() and not _holds_run(one)), None)
    if folder is not None and (held := folders_of_runs(folder)):
        found = [find(folder, str(one.relative_to(folder))) for one in held]
        names = {base for one in found if (base := name_of_sites(one))}
        if len(names) == 1 and all(name_of_sites(one) for one in found):
            return _in_order(found)
        raise ConfigError(f"{folder}: a folder of {len(found)} runs that are not those of one plan's sites; name a run")
    if run == LAST:
        last = find(data_dir, run)
        base = name_of_sites(last)
        return _of_sites(data_dir, base) or [last] if base else [last]
    return _of_sites(data_dir, run) or [find(data_dir, run)]


def name_of_sites(run: Run) -> str:
    """Return what the names of all sites' runs begin with, by that of one; empty where the plan has no sites."""
    sites = run.opened.plan.sites if run.opened else None
    ends = [site for site in sites.names if run.folder.name.endswith(f"-{site}")] if sites else []
    return run.folder.name.removesuffix(f"-{max(ends, key=len)}") if ends else ""


def _of_sites(data_dir: Path, base: str) -> list[Run]:
    """Return the runs whose name is that of one plan's sites together, or begins so where all are of one plan's."""
    alike = [folder for folder in folders_of_runs(data_dir) if base and folder.name.startswith(base)]
    if any(folder.name == base for folder in alike) or len(alike) <= 1:
        return []
    found = [find(data_dir, str(folder.relative_to(data_dir))) for folder in alike]
    names = {name_of_sites(one) for one in found}
    chosen = found if len(names) == 1 and "" not in names else [one for one in found if name_of_sites(one) == base]
    return _in_order(chosen)


def _in_order(runs: Iterable[Run]) -> list[Run]:
    """Return the runs of sites in the order of the plan's sites."""

    def place(run: Run) -> int:
        sites = run.opened.plan.sites if run.opened else None
        return (sites.names if sites else ()).index(run.folder.name.removeprefix(f"{name_of_sites(run)}-"))

    return sorted(runs, key=place)


def _abbreviated(data_dir: Path, run: str) -> Path:
    """Return the folder of the only run whose name begins so, or of the one that was begun last."""
    if run == LAST and (begun := all_runs(data_dir)):
        return begun[0].folder
    there = folders_of_runs(data_dir)
    alike = [folder for folder in there if folder.name == run]
    alike = alike or [folder for folder in there if run and folder.name.startswith(run)]
    if len(alike) > 1:
        some = ", ".join(folder.name for folder in alike[:MOST_NAMED]) + ", …" * (len(alike) > MOST_NAMED)
        raise ConfigError(f"{run!r} may be any of {len(alike)} runs in {data_dir}: {some}; give more of the name")
    if not alike:
        meant = guess(run, [folder.name for folder in there])
        raise NoSuchRun(f"no run {run!r} in {data_dir}; `edge-server runs` lists those there are{meant}")
    return alike[0]


def folders_of_runs(data_dir: Path) -> list[Path]:
    """Return the folders with a journal, those of sites on this machine too, in the order of their names."""
    found = [*data_dir.glob(f"*/{JOURNAL}"), *data_dir.glob(f"{SITES}/*/*/{JOURNAL}")]
    return sorted((path.parent for path in found), key=lambda folder: (folder.name, folder))


def all_runs(data_dir: Path) -> list[Run]:
    """Return every readable run, newest first; what cannot be read is reported and left alone."""
    runs = []
    for folder in folders_of_runs(data_dir):
        try:
            runs.append(find(data_dir, str(folder.relative_to(data_dir))))
        except ConfigError as error:
            log.warning("%s", error)
    return sorted(runs, key=by_beginning(data_dir), reverse=True)


def _begun_utc_s(run: Run) -> float:
    """Return when a run was begun; of one without calendar time, as a replay, when its folder was last written."""
    stamp = run.opened.started if run.opened else ""
    known = utc_of_stamp(stamp)
    return run.folder.stat().st_mtime if known is None else known


def ended_runs(data_dir: Path) -> tuple[str, ...]:
    """Return the runs that are over, the one that was begun last first; of many the newest."""
    ended, order = [], _begun_order(data_dir)
    for folder in folders_of_runs(data_dir):
        try:
            if isinstance(last_record(folder), RunClosed):
                ended.append((order.get(folder.name, -1), (folder / JOURNAL).stat().st_mtime, folder.name))
        except (CorruptFile, FileNotFoundError):
            continue
    return tuple(name for *_, name in sorted(ended, reverse=True)[:MOST_ENDED])


FOLDER, CHECKPOINTS, BEST = "checkpoints", "round-*.safetensors", "best-*.safetensors"
"""Where in a run's folder its states lie, what they are called, and the most accurate where it is older than these."""


def checkpoint_path(folder: Path, number: int) -> Path:
    """Return where the state after round `number` lies."""
    return folder / f"round-{number:06d}.safetensors"


def best_path(folder: Path, number: int) -> Path:
    """Return where the most accurate state lies, that after round `number`, once it is older than those that stay."""
    return folder / f"best-{number:06d}.safetensors"


def require_record(folder: Path) -> None:
    """Refuse to begin a run where one was, of which states are there and no record.

    Raises:
        ConfigError: There are such states.
    """
    paths = list((folder / FOLDER).glob("*.safetensors"))
    names = [path.stem.rpartition("-")[2] for path in paths]
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    if number or "good" in names:
        until = f" up to round {number}" if number else ""
        raise ConfigError(
            f"{folder}: there are checkpoints{until}, and {JOURNAL} holds no run: put that file (and "
            f"{JOURNAL}-wal, if there was one) back from a copy; or move the folder away to begin anew"
        )


def _require_records(data_dir: Path, plan: Plan) -> None:
    """Refuse to begin a plan anew beside a run of its name whose record is lost; see `require_record`."""
    named = re.compile(re.escape(plan.name[:32]) + r"-\d{8}T\d{6}Z-[0-9a-f]{4}")
    for path in data_dir.glob(f"*/{FOLDER}"):
        if named.fullmatch(path.parent.name) and not salvageable_records(path.parent / JOURNAL):
            require_record(path.parent)


def is_local(folder: Path) -> bool:
    """Tell whether a run's devices were agents on this machine, which nobody goes on with but who names it."""
    return (folder / LOCAL).is_dir()


def _runs_with_devices(data_dir: Path) -> list[Run]:
    """Return the runs with the devices of a site."""
    folders = [folder for folder in folders_of_runs(data_dir) if not is_local(folder)]
    return [Run(folder, salvageable_records(folder / JOURNAL)) for folder in folders]


def has_rounds(folder: Path) -> bool:
    """Tell whether a round of a run was ever opened, or nobody can tell."""
    try:
        records = salvageable_records(folder / JOURNAL)
    except (CorruptFile, ConfigError):
        return True
    return any(isinstance(one, RoundOpened | Measured) for one in records)


def unfinished(data_dir: Path, plan: Plan) -> str | None:
    """Return the name of the latest live run of this very plan that has not ended; a replay has no calendar time.

    One with agents on this machine is left alone: real devices never saw what it learnt, nor do its rounds count.

    Raises:
        ConfigError: As `require_record` of a run that by its name is one of this plan.
    """
    _require_records(data_dir, plan)
    runs = _runs_with_devices(data_dir)
    for run in sorted(runs, key=by_beginning(data_dir), reverse=True):
        if (
            run.opened
            and run.opened.started
            and is_same_plan(run.opened.plan, plan)
            and not (run.closed or run.opened.imported)
        ):
            return run.opened.run
    return None


def edited_from(data_dir: Path, plan: Plan) -> str:
    """Return which run of a plan of this name was begun last and where that plan differs; empty where it does not.

    Args:
        plan: What is to be done now.
    """
    runs = sorted(_runs_with_devices(data_dir), key=by_beginning(data_dir))
    begun = [run.opened for run in runs if run.opened and run.opened.started and not run.opened.imported]
    last = next((one for one in reversed(begun) if one.plan.name == plan.name), None)
    if last is None or is_same_plan(last.plan, plan):
        return ""
    return f"the plan differs from that of run {last.run} ({describe_differences(last.plan, plan)})"


def describe_differences(begun: Plan, plan: Plan) -> str:
    """Return in which keys two plans differ, not too many of them."""
    found = plan_differences(begun, plan)
    return ", ".join(found[:MOST_NAMED]) + f" and {len(found) - MOST_NAMED} more" * (len(found) > MOST_NAMED)


def ended_run(data_dir: Path, plan: Plan, name: str) -> Run | None:
    """Return the run of that name if it has ended; without a name, the latest live run of this very plan that has.

    Args:
        name: Of the run; empty for any.
    """
    named = [Run(data_dir / name, salvageable_records(data_dir / name / JOURNAL))] if name else None
    runs = _runs_with_devices(data_dir) if named is None else named
    same = [run for run in runs if run.closed and run.opened and is_same_plan(run.opened.plan, plan)]
    live = [run for run in same if run.opened and run.opened.started and not run.opened.imported]
    return max(live, key=by_beginning(data_dir), default=None)


def summarise_run(run: Run) -> RunSummary:
    """Return a run in a line; its accuracy is the last that anybody measured of its model, or of its devices' own."""
    closed, opened = closed_rounds(run.records), run.opened
    on_devices = [record for record in valid(run.records) if isinstance(record, Evaluated)]
    own = [record.accuracy for record in on_devices if record.personal]
    shared = [record.accuracy for record in closed]
    besides = [*(record.device_accuracy for record in closed), *(record.accuracy for record in on_devices)]
    measured = next((kind for kind in map(_known, (own, shared, besides)) if kind), [])
    return RunSummary(
        run=opened.run if opened else run.folder.name,
        plan=opened.plan.name if opened else "",
        algorithm=opened.plan.algorithm.name if opened else "",
        started=opened.started if opened else "",
        rounds=len(closed),
        of=opened.plan.rounds if opened else 0,
        accuracy=measured[-1] if measured else None,
        outcome=outcome_of(run),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def outcome_of(run: Run) -> str:
    """Return how a run ended, or that it is `running`, or `dead`: it has not ended, and no server is at work on it.

    `missed` where it came to its end, and no round of it had enough updates, so that its model is untrained.
    """
    if run.opened is None:
        return "empty"
    if run.closed is None:
        return "running" if is_held(run.folder, unknown=True) else "dead"
    closed = closed_rounds(run.records)
    is_missed = run.closed.outcome == "finished" and closed and all(one.outcome == "missed" for one in closed)
    return "missed" if is_missed else run.closed.outcome


def versions() -> dict[str, str]:
    """Return the version of Python and of every distribution that decides what numbers come out, if it is there."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - only where a run begins

    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # imported from a folder that was never installed
    return found
