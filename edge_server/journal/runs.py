"""Runs of a site: lookup by name, listing, summaries and outcomes."""

from __future__ import annotations

import logging
import platform
import re
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import msgspec

from edge_server.journal.compared import compared_metric, devices_value, server_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Measured,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    count_valid,
    first,
    select,
    valid_records,
)
from edge_server.journal.sqlite import JOURNAL, last_record, open_records, readable_records
from edge_server.plan.data_folder import check_data_folder, claim_data_folder
from edge_server.plan.plan import Plan, is_same_plan, plan_differences
from edge_server.plan.sites import round_name
from shared.errors import ConfigError, CorruptFile, NoSuchRun
from shared.runtime.clock import parse_utc_stamp, utc_stamp
from shared.runtime.durable import explain_disk_errors
from shared.runtime.folder_lock import is_held
from shared.spelling import guess

log = logging.getLogger(__name__)

LAST = "last"
"""Name that stands for the run that was begun last."""
SITES = "sites"
"""Subfolder of a local trial with several sites: a folder of runs for each."""
LOCAL = "local"
"""Subfolder of a run with the files and logs of agents on this machine."""
MOST_NAMED = 5
MOST_ENDED = 64
"""Ended runs that devices are told of; every task carries these names."""

ORDER = "order"
"""File with the names of a folder's runs in the order they were begun, independent of the clock."""

DISTRIBUTIONS = ("fieldfleet", "numpy", "torch")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a run.

    Attributes:
        accuracy: Last measured; None for a run that is compared by another metric.
        metric: Name of that metric; empty for the accuracy.
        value: Last value of that metric.
    """

    run: str
    plan: str
    algorithm: str
    started: str
    rounds: int
    of: int
    accuracy: float | None
    outcome: str
    metric: str | msgspec.UnsetType = msgspec.UNSET
    value: float | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def metric_value(self) -> str:
        """Last value of the compared metric with its name, `0.9431` for an accuracy; `-` without any."""
        if self.metric is msgspec.UNSET:
            return ACCURACY.format(self.accuracy)
        return "-" if not isinstance(self.value, float) else f"{self.metric} {self.value:.4g}"


@dataclass(frozen=True)
class StoredRun:
    """A run's folder and its journal."""

    folder: Path
    records: Sequence[AnyRecord]

    @cached_property
    def opened(self) -> RunOpened | None:
        """The record of its beginning."""
        return first(self.records, RunOpened)

    @cached_property
    def closed(self) -> RunClosed | None:
        """The record of its end; None before."""
        return first(self.records, RunClosed)


def make_round_namer(records: Sequence[AnyRecord]) -> Callable[[int], str]:
    """Return a function from round numbers to displayed names: `global.edge` in a plan with sites, else the number."""
    opening = first(records, RunOpened)
    if opening is None or not opening.plan.sites:
        return str
    rounds, edge_rounds = opening.plan.rounds, opening.plan.sites.edge_rounds
    return lambda number: round_name(number, edge_rounds) if 1 <= number <= rounds else str(number)


def make_run_name(plan: Plan) -> str:
    """Return a unique run name."""
    return f"{plan.name[:32]}-{utc_stamp()}-{uuid.uuid4().hex[:4]}"


def record_run_order(folder: Path, *, replace: bool = False) -> None:
    """Append a run to the order of runs, once.

    Args:
        replace: Whether it replaces an earlier run of its name, as a repeated replay does.
    """
    parents = folder.absolute().parents
    data_dir = parents[2] if parents[1].name == SITES else parents[0]
    path = data_dir / ORDER
    if not replace and folder.name in _begun_order(data_dir):
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{folder.name}\n")
    except OSError as error:  # a full disk keeps no run from its rounds
        log.warning("%s: %s; runs are ordered by calendar time instead", path, error.strerror)


def _begun_order(data_dir: Path) -> dict[str, int]:
    try:
        names = (data_dir / ORDER).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: index for index, name in enumerate(names)}


def start_order_key(data_dir: Path) -> Callable[[StoredRun], tuple[int, float]]:
    """Return a sort key for runs by beginning.

    Runs of versions that noted no order come first, by calendar time.
    """
    order = _begun_order(data_dir)
    return lambda run: (order.get(run.folder.name, -1), _begun_utc_s(run))


def create_runs_folder(data_dir: Path) -> Path:
    """Return a folder of runs, created if necessary and marked with this version.

    Raises:
        ConfigError: It cannot be created or written, or a newer version wrote there.
        Unwritable: The disk is full.
    """
    try:
        claim_data_folder(data_dir)
        with explain_disk_errors(data_dir):
            tempfile.TemporaryFile(dir=data_dir).close()
    except OSError as error:
        raise ConfigError(f"{data_dir}: {error.strerror}; choose a writable folder for runs") from error
    return data_dir


def run_exists(data_dir: Path, run: str) -> bool:
    """Return True if the folder has a run of that name."""
    return _holds_run(data_dir / run)


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / JOURNAL).exists()
    except OSError:  # a name longer than file systems take, a folder that we may not look into
        return False


def is_empty(folder: Path) -> bool:
    """Return True if a run never began: no journal or an empty one, and no files to lose."""
    if any(path.is_file() for kind in ("checkpoints", "updates") for path in (folder / kind).rglob("*")):
        return False
    if not _holds_run(folder):
        return True
    try:
        return not open_records(folder, verify=False)
    except CorruptFile:
        return False


def find_run(data_dir: Path, run: str) -> StoredRun:
    """Return a run by its name, a unique prefix of it, the path of its folder, or `last`.

    Raises:
        ConfigError: No run or several match, its journal cannot be read, or a newer version wrote there.
    """
    folder = next(filter(_holds_run, (data_dir / run, Path(run))), None) or _resolve_prefix(data_dir, run)
    check_data_folder(folder.parent)
    with explain_damage():
        return StoredRun(folder, open_records(folder))


@contextmanager
def explain_damage() -> Iterator[None]:
    """Add to the error of a damaged journal what to do.

    Raises:
        ConfigError: Its journal is damaged.
    """
    try:
        yield
    except CorruptFile as error:
        raise ConfigError(
            f"{error}; restore the file from a copy, or resume the run from its intact records"
        ) from error


def find_site_runs(data_dir: Path, run: str) -> list[StoredRun]:
    """Return a run as `find_run` does, or those of all sites of a plan: by the common prefix of their names or folder.

    The `last` run of a plan with sites stands for the runs of all sites made with it.

    Raises:
        ConfigError: As `find_run`; or a folder holds other runs than those of one plan's sites.
    """
    folder = next(
        (path for path in (data_dir / run, Path(run)) if run and path.is_dir() and not _holds_run(path)), None
    )
    if folder is not None and (folders := folders_of_runs(folder)):
        runs = [find_run(folder, str(run_folder.relative_to(folder))) for run_folder in folders]
        names = {base for site_run in runs if (base := name_of_sites(site_run))}
        if len(names) == 1 and all(name_of_sites(site_run) for site_run in runs):
            return _sort_by_site(runs)
        raise ConfigError(f"{folder}: {len(runs)} runs that are not those of one plan's sites; name a run")
    if run == LAST:
        last = find_run(data_dir, run)
        base = name_of_sites(last)
        return _runs_of_sites(data_dir, base) or [last] if base else [last]
    return _runs_of_sites(data_dir, run) or [find_run(data_dir, run)]


def name_of_sites(run: StoredRun) -> str:
    """Return the common prefix of all sites' runs from the name of one; empty if the plan has no sites."""
    sites = run.opened.plan.sites if run.opened else None
    ends = [site for site in sites.names if run.folder.name.endswith(f"-{site}")] if sites else []
    return run.folder.name.removesuffix(f"-{max(ends, key=len)}") if ends else ""


def _runs_of_sites(data_dir: Path, base: str) -> list[StoredRun]:
    """Return the runs of one plan's sites by their common name, or a prefix of it if unambiguous."""
    matches = [folder for folder in folders_of_runs(data_dir) if base and folder.name.startswith(base)]
    if any(folder.name == base for folder in matches) or len(matches) <= 1:
        return []
    runs = [find_run(data_dir, str(folder.relative_to(data_dir))) for folder in matches]
    names = {name_of_sites(run) for run in runs}
    chosen = runs if len(names) == 1 and "" not in names else [run for run in runs if name_of_sites(run) == base]
    return _sort_by_site(chosen)


def _sort_by_site(runs: Iterable[StoredRun]) -> list[StoredRun]:

    def place(run: StoredRun) -> int:
        sites = run.opened.plan.sites if run.opened else None
        return (sites.names if sites else ()).index(run.folder.name.removeprefix(f"{name_of_sites(run)}-"))

    return sorted(runs, key=place)


def _resolve_prefix(data_dir: Path, run: str) -> Path:
    """Return the folder of the only run with that prefix, or of the run begun last."""
    if run == LAST and (runs_by_age := all_runs(data_dir)):
        return runs_by_age[0].folder
    folders = folders_of_runs(data_dir)
    matches = [folder for folder in folders if folder.name == run]
    matches = matches or [folder for folder in folders if run and folder.name.startswith(run)]
    if len(matches) > 1:
        some = ", ".join(folder.name for folder in matches[:MOST_NAMED]) + ", …" * (len(matches) > MOST_NAMED)
        raise ConfigError(f"{run!r} matches {len(matches)} runs in {data_dir}: {some}; use a longer prefix")
    if not matches:
        suggestion = guess(run, [folder.name for folder in folders])
        raise NoSuchRun(f"no run {run!r} in {data_dir}; list the runs with `edge-server runs`{suggestion}")
    return matches[0]


def folders_of_runs(data_dir: Path) -> list[Path]:
    """Return the folders with a journal, sorted by name; those of sites on this machine included."""
    paths = [*data_dir.glob(f"*/{JOURNAL}"), *data_dir.glob(f"{SITES}/*/*/{JOURNAL}")]
    return sorted((path.parent for path in paths), key=lambda folder: (folder.name, folder))


def all_runs(data_dir: Path) -> list[StoredRun]:
    """Return every run, newest first, its beginning and end read; unreadable ones are logged and skipped."""
    runs = []
    for folder in folders_of_runs(data_dir):
        try:
            check_data_folder(folder.parent)
            with explain_damage():
                run = StoredRun(folder, open_records(folder, verify=False))
                _ = run.opened, run.closed
            runs.append(run)
        except ConfigError as error:
            log.warning("%s", error)
    return sorted(runs, key=start_order_key(data_dir), reverse=True)


def summarise_runs(data_dir: Path) -> list[RunSummary]:
    """Return one line about every run, newest first; unreadable ones are logged and skipped."""
    summaries = []
    for run in all_runs(data_dir):
        try:
            with explain_damage():
                summaries.append(summarise_run(run))
        except ConfigError as error:
            log.warning("%s", error)
    return summaries


def _begun_utc_s(run: StoredRun) -> float:
    """Return when a run was begun; without calendar time, as in a replay, when its folder was last written."""
    stamp = run.opened.started if run.opened else ""
    utc_s = parse_utc_stamp(stamp)
    return run.folder.stat().st_mtime if utc_s is None else utc_s


def ended_runs(data_dir: Path) -> tuple[str, ...]:
    """Return the names of ended runs, most recently begun first, at most `MOST_ENDED`."""
    ended, order = [], _begun_order(data_dir)
    for folder in folders_of_runs(data_dir):
        try:
            if isinstance(last_record(folder), RunClosed):
                ended.append((order.get(folder.name, -1), (folder / JOURNAL).stat().st_mtime, folder.name))
        except (CorruptFile, FileNotFoundError):
            continue
    return tuple(name for *_, name in sorted(ended, reverse=True)[:MOST_ENDED])


FOLDER, CHECKPOINTS, BEST = "checkpoints", "round-*.safetensors", "best-*.safetensors"
"""Subfolder of a run's checkpoints, their file names, and that of the most accurate one once it is older."""


def checkpoint_path(folder: Path, number: int) -> Path:
    """Return the path of the state after a round."""
    return folder / f"round-{number:06d}.safetensors"


def best_path(folder: Path, number: int) -> Path:
    """Return the path of the most accurate state, that after round `number`, once it is older than the latest few."""
    return folder / f"best-{number:06d}.safetensors"


def require_journal(folder: Path) -> None:
    """Refuse to begin a run in a folder with checkpoints but without a journal.

    Raises:
        ConfigError: There are such checkpoints.
    """
    paths = list((folder / FOLDER).glob("*.safetensors"))
    names = [path.stem.rpartition("-")[2] for path in paths]
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    if number or "good" in names:
        until = f" up to round {number}" if number else ""
        raise ConfigError(
            f"{folder}: checkpoints{until} exist, but {JOURNAL} holds no run; restore that file (and "
            f"{JOURNAL}-wal, if it existed) from a copy, or move the folder away to start again"
        )


def _require_records(data_dir: Path, plan: Plan) -> None:
    """Refuse to begin a plan again beside one of its runs whose journal is lost; see `require_journal`."""
    named = re.compile(re.escape(plan.name[:32]) + r"-\d{8}T\d{6}Z-[0-9a-f]{4}")
    for path in data_dir.glob(f"*/{FOLDER}"):
        if named.fullmatch(path.parent.name) and not readable_records(path.parent):
            require_journal(path.parent)


def is_local(folder: Path) -> bool:
    """Return True if a run's devices were agents on this machine; such a run is resumed only by name."""
    return (folder / LOCAL).is_dir()


def _runs_with_devices(data_dir: Path) -> list[StoredRun]:
    folders = [folder for folder in folders_of_runs(data_dir) if not is_local(folder)]
    return [StoredRun(folder, readable_records(folder)) for folder in folders]


def has_rounds(folder: Path) -> bool:
    """Return True if a round was ever opened, or the journal cannot be read."""
    return any(select(readable_records(folder), RoundOpened, Measured))


def find_unfinished(data_dir: Path, plan: Plan, besides: Collection[str] = ()) -> str | None:
    """Return the latest live run of exactly this plan that has not ended.

    Runs with agents on this machine do not count: the site's devices took no part in them.

    Args:
        besides: Runs that do not count either, such as those of a queue.

    Raises:
        ConfigError: As `require_journal` for a run that by its name is one of this plan.
    """
    _require_records(data_dir, plan)
    runs = _runs_with_devices(data_dir)
    for run in sorted(runs, key=start_order_key(data_dir), reverse=True):
        if (
            run.opened
            and run.opened.started
            and is_same_plan(run.opened.plan, plan)
            and not (run.closed or run.opened.imported)
            and run.opened.run not in besides
        ):
            return run.opened.run
    return None


def describe_edits(data_dir: Path, plan: Plan) -> str:
    """Return the changes of this plan since the last run of a plan of its name; empty if there are none."""
    runs = sorted(_runs_with_devices(data_dir), key=start_order_key(data_dir))
    openings = [run.opened for run in runs if run.opened and run.opened.started and not run.opened.imported]
    last = next((opening for opening in reversed(openings) if opening.plan.name == plan.name), None)
    if last is None or is_same_plan(last.plan, plan):
        return ""
    return f"the plan differs from that of run {last.run} ({describe_differences(last.plan, plan)})"


def describe_differences(earlier: Plan, plan: Plan) -> str:
    """Return the keys in which two plans differ, at most `MOST_NAMED`."""
    differences = plan_differences(earlier, plan)
    return ", ".join(differences[:MOST_NAMED]) + f" and {len(differences) - MOST_NAMED} more" * (
        len(differences) > MOST_NAMED
    )


def find_ended_run(data_dir: Path, plan: Plan, name: str) -> StoredRun | None:
    """Return the run of that name if it has ended; without a name, the latest ended live run of exactly this plan.

    Args:
        name: Of the run; empty for any.
    """
    named = [StoredRun(data_dir / name, readable_records(data_dir / name))] if name else None
    runs = _runs_with_devices(data_dir) if named is None else named
    same = [run for run in runs if run.closed and run.opened and is_same_plan(run.opened.plan, plan)]
    live = [run for run in same if run.opened and run.opened.started and not run.opened.imported]
    return max(live, key=start_order_key(data_dir), default=None)


def summarise_run(run: StoredRun) -> RunSummary:
    """Return one line about a run; its figure is of the last evaluation, of personal models if there are any."""
    opening, metric = run.opened, compared_metric(run.records)
    value = _last_value(run.records, metric)
    return RunSummary(
        run=opening.run if opening else run.folder.name,
        plan=opening.plan.name if opening else "",
        algorithm=opening.plan.algorithm.name if opening else "",
        started=opening.started if opening else "",
        rounds=count_valid(run.records, RoundClosed),
        of=opening.plan.rounds if opening else 0,
        accuracy=value if metric == ACCURACY else None,
        outcome=outcome_of(run),
        metric=msgspec.UNSET if metric == ACCURACY else metric.name,
        value=msgspec.UNSET if metric == ACCURACY else value,
    )


def _last_value(records: Sequence[AnyRecord], metric: ComparedMetric) -> float | None:
    """Return the last value on personal models; without any, on the server's test data, else on devices' examples."""
    evaluations = partial(valid_records, records, Evaluated, newest_first=True)
    values = (devices_value(record, metric) for record in evaluations() if record.personal)
    if (value := _first_known(values)) is not None:
        return value
    of_rounds = None
    for record in valid_records(records, RoundClosed, newest_first=True):
        if (value := server_value(record, metric)) is not None:
            return value
        of_rounds = devices_value(record, metric) if of_rounds is None else of_rounds
    value = _first_known(devices_value(record, metric) for record in evaluations())
    return of_rounds if value is None else value


def _first_known(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def outcome_of(run: StoredRun) -> str:
    """Return a run's outcome; `running` or, without a server at work on it, `dead` before its end.

    `missed` if it ended but no round had enough updates, so that its model is untrained.
    """
    if run.opened is None:
        return "empty"
    if run.closed is None:
        return "running" if is_held(run.folder, unknown=True) else "dead"
    if run.closed.outcome != "finished":
        return run.closed.outcome
    ends = valid_records(run.records, RoundClosed)
    is_missed = (end := next(ends, None)) and all(end.outcome == "missed" for end in chain([end], ends))
    return "missed" if is_missed else "finished"


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed distributions that determine results."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - only where a run begins

    by_name = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue  # imported from a folder that was never installed
    return by_name
