"""Run plans from Python: in virtual time, or live with agents on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edge_server.api.background import Background, Stop
from edge_server.api.plans import NAME, PlanSource, allow_plugins
from edge_server.api.plans import plan as check_plan
from edge_server.api.progress import ProgressOption, RecordReader, RoundProgress, TextBar
from edge_server.api.runs import Run
from edge_server.journal.records import AnyRecord
from edge_server.journal.runs import create_runs_folder, make_run_name, run_exists
from edge_server.journal.sqlite import read_records
from edge_server.plan.data_folder import DATA_DIR, default_data_root
from edge_server.plan.plan import Plan
from edge_server.replay.host import Host
from edge_server.replay.run import ReplayedRun, run_replay
from edge_server.rounds.check_plan import require_one_site
from edge_server.trial.local import Local, prepare_local, require_resumable, run_local
from edge_server.trial.local_sites import local_sites, new_names, run_sites
from shared.errors import ConfigError

Folder: TypeAlias = "str | os.PathLike[str]"
Event: TypeAlias = tuple[str, AnyRecord]
"""Site, empty for the only one, and a record of its run."""


def replay(  # noqa: PLR0913 - all but the first by name
    source: PlanSource | Run,
    *,
    devices: int = 0,
    workers: int = 1,
    exact: bool = False,
    data_dir: Folder = DATA_DIR,
    data_root: Folder | None = None,
    progress: ProgressOption = True,
) -> Run:
    """Run a plan in virtual time, or replay a recorded run, and return the finished run.

    A replay depends on its inputs alone: interrupted by Ctrl-C it leaves nothing, and the same call starts again.

    Args:
        source: Plan, plan file, dict, trace folder, name or folder of a recorded run, or a run.
        devices: Number of devices; 0 for those of the plan.
        workers: Training processes; 1 for this process only, 0 for one per core. They are forked from this process, and
            a CUDA build of torch refuses this after it has computed gradients here.
        exact: Train every device separately, with the bits of a live run.
        data_dir: Folder of runs; `runs` in the current folder by default.
        data_root: Folder of data sets; None for FIELDFLEET_DATA or its default.
        progress: Whether to show a bar, or a function to call at the beginning and after each round.

    Raises:
        ConfigError: The plan cannot be replayed, or has several sites.
        Infeasible: A budget of the plan cannot be met.
    """
    root = _root(data_root)
    origin = _find_source(source, root)
    if isinstance(origin, Plan):
        require_one_site(origin, NAME)
    runs = _replay(origin, devices, workers, Path(data_dir), root, progress, exact=exact)
    if len(runs) != 1:
        raise ConfigError(f"{origin}: recorded at {len(runs)} sites; use api.replay_sites")
    return runs[0]


def replay_sites(
    source: PlanSource | Run,
    *,
    workers: int = 1,
    exact: bool = False,
    data_dir: Folder = DATA_DIR,
    data_root: Folder | None = None,
    progress: ProgressOption = True,
) -> dict[str, Run]:
    """Run a plan with several sites in virtual time; return the finished run of each site by its name.

    Args:
        source: As for `replay`; recorded runs are named by their common prefix.
        progress: As for `replay`; shows the first site.
    """
    root = _root(data_root)
    runs = _replay(_find_source(source, root), 0, workers, Path(data_dir), root, progress, exact=exact)
    return {_site_of(run): run for run in runs}


def trial(  # noqa: PLR0913 - all but the first by name
    source: PlanSource,
    *,
    agents: int = 0,
    run: str = "",
    device: str = "cpu",
    data_dir: Folder = DATA_DIR,
    data_root: Folder | None = None,
    progress: ProgressOption = True,
) -> Run:
    """Run a plan live on this machine, with a broker, a server and agents as processes; return the finished run.

    Ctrl-C ends all processes; the same call with `run` resumes the run.

    Args:
        source: Plan, plan file or dict.
        agents: Number of agents; 0 for those of the plan.
        run: Name of the run; the name of an interrupted trial of this plan resumes it. Empty for a new name.
        device: Processor of server and agents: `cpu`, which gives the bits of a replay, `cuda` or `auto`.
        data_dir: Folder of runs; `runs` in the current folder by default.
        data_root: Folder of data sets; None for FIELDFLEET_DATA or its default.
        progress: Whether to show a bar, or a function to call at the beginning and after each round.

    Raises:
        ConfigError: The plan cannot be run here, has several sites, or `run` cannot be resumed with it.
        TaskFailed: A process ended before the run did; the message names its log.
        Unreachable: The broker does not start.
    """
    local = _local_trial(source, run, agents, device, Path(data_dir), _root(data_root))
    require_one_site(local.plan, NAME)
    return _run_trial({"": local}, lambda emit: run_local(local, lambda record: emit(("", record))), progress)[""]


def trial_sites(
    source: PlanSource,
    *,
    device: str = "cpu",
    data_dir: Folder = DATA_DIR,
    data_root: Folder | None = None,
    progress: ProgressOption = True,
) -> dict[str, Run]:
    """Run a plan with several sites live on this machine; return the finished run of each site by its name.

    Args:
        source: As for `trial`; the other arguments too.
        progress: As for `trial`; shows the first site.
    """
    local = _local_trial(source, "", 0, device, Path(data_dir), _root(data_root))
    if not local.plan.sites:
        raise ConfigError(f"plan {local.plan.name!r} has one site; use api.trial")
    sites = local_sites(local)
    return _run_trial(sites, lambda emit: run_sites(sites, lambda site, record: emit((site, record))), progress)


def _root(data_root: Folder | None) -> Path:
    return (default_data_root() if data_root is None else Path(data_root)).resolve()


def _find_source(source: PlanSource | Run, root: Path) -> Plan | Path:
    """Return a checked plan, or the path of a plan, trace or run."""
    allow_plugins()
    match source:
        case Plan():
            return source
        case Run():
            return source.folder
        case str() | os.PathLike():
            return Path(source)
        case _:
            return check_plan(source, data_root=root)


def _site_of(run: Run) -> str:
    sites = run.plan.sites
    return next((site for site in sites.names if run.name.endswith(f"-{site}")), "") if sites else ""


def _replay(  # noqa: PLR0913 - options of `replay`
    source: Plan | Path, count: int, workers: int, data_dir: Path, root: Path, progress: ProgressOption, *, exact: bool
) -> list[Run]:
    _require_counts(devices=count, workers=workers)

    def work(stop: Stop, emit: Callable[[Event], None]) -> list[ReplayedRun]:
        return run_replay(
            *(source, root, data_dir, count, workers),
            exact=exact,
            tell=lambda record, _virtual_s: emit(("", record)),
            host=Host(is_owned=False, watch=stop.watch),
        )

    with _showing(progress) as show:
        return [Run(*replayed) for replayed in Background[Event, list[ReplayedRun]](work).run(show)]


def _require_counts(**counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise ConfigError(f"{name} is {count!r}; give a whole number, 0 for the default")


def _local_trial(source: PlanSource, run: str, agents: int, device: str, data_dir: Path, root: Path) -> Local:
    _require_counts(agents=agents)
    allow_plugins()
    plan = source if isinstance(source, Plan) else check_plan(source, data_root=root)
    if b'"__main__:' in msgspec.json.encode(plan):
        raise ConfigError(
            f"plan {plan.name!r} names a function of this notebook or script, which agents cannot import: "
            "move it into a module"
        )
    create_runs_folder(data_dir)
    if run and run_exists(data_dir, run):
        require_resumable(data_dir, run, plan)
    name = run or (new_names(plan) if plan.sites else make_run_name(plan))
    return prepare_local(plan, name, data_root=root, data_dir=data_dir, count=agents or plan.local, device=device)


def _run_trial(
    trials: dict[str, Local], begin: Callable[[Callable[[Event], None]], Coroutine[Any, Any, object]], progress: Any
) -> dict[str, Run]:
    """Run local trials in the background; return their runs by site."""

    def work(stop: Stop, emit: Callable[[Event], None]) -> None:
        asyncio.run(stop.watch(begin(emit)))

    try:
        with _showing(progress) as show:
            Background[Event, None](work).run(show)
    except KeyboardInterrupt as error:
        for local in trials.values():
            if run_exists(local.data_dir, local.run):
                error.add_note(f"run {local.run} is unfinished; api.trial(..., run={local.run!r}) resumes it")
        raise
    return {site: Run(local.folder, read_records(local.folder)) for site, local in trials.items()}


@contextmanager
def _showing(progress: ProgressOption) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows the records of the first site that reports."""
    if not isinstance(progress, bool) and not callable(progress):
        raise ConfigError(f"progress is {progress!r}; give True for a bar, False for none, or a function")
    bar = TextBar() if progress is True else None
    report: Callable[[RoundProgress], object] = bar.show if bar else progress if callable(progress) else _ignore
    reader, sites = RecordReader(report), set[str]()

    def show(event: Event) -> None:
        site, record = event
        sites.update([] if sites else [site])
        if site in sites:
            reader.take(record)

    try:
        yield show
    finally:
        if bar:
            bar.end()


def _ignore(_progress: RoundProgress) -> None:
    """Show nothing."""
