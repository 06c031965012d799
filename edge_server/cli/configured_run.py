"""Begin or resume the run of the plan in `server.toml`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from edge_server.journal.plan_queue import PlanQueue, runs_of_jobs
from edge_server.journal.runs import (
    StoredRun,
    describe_edits,
    find_ended_run,
    find_unfinished,
    make_run_name,
    run_exists,
)
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.rounds import check_plan
from edge_server.trial.job_runner import ConfiguredRun
from shared.errors import ConfigError

log = logging.getLogger("edge_server.cli.commands")


def choose_run(
    config: ServerConfig, path: Path, queue: PlanQueue, *, again: bool
) -> tuple[ConfiguredRun | None, StoredRun | None]:
    """Return the run to begin or resume, or else the one in which the plan has ended; neither without a plan.

    Args:
        path: The server's file, for messages.
        again: Whether to begin a new run of a plan that has ended.

    Raises:
        ConfigError: The plan is invalid, or the file names a run that has ended.
    """
    if not config.plan:
        return None, None
    data_dir, of_jobs = Path(config.data_dir), runs_of_jobs(queue.list_jobs())
    is_begun = partial(_is_begun, config, of_jobs, again=again)
    plan = check_plan.load(Path(config.plan), Path(config.data_root), several_sites=True, is_resumed=is_begun)
    name = config.run or find_unfinished(data_dir, plan, of_jobs) or ""
    if ended := find_ended_run(data_dir, plan, name):
        if not again:
            log.warning("plan %r has ended as run %s; use `--again` to start it again", plan.name, ended.folder.name)
            return None, ended
        if config.run:
            raise ConfigError(f"{path}: run {config.run!r} has ended: name another, or remove `run`")
    elif name:
        _describe_resumption(config, path, name, again=again)
    return ConfiguredRun(plan, name or _new_name(data_dir, plan)), None


def _describe_resumption(config: ServerConfig, path: Path, name: str, *, again: bool) -> None:
    """Log that a run is resumed, unless the file names it and nobody asked for another."""
    if again and run_exists(Path(config.data_dir), name):
        rm = f"`edge-server runs rm {name} --config {path}` first, to start again"
        log.warning("run %s is not finished: resuming it; %s", name, rm)
    elif not config.run:
        log.info("resuming run %s, which is not finished", name)


def _new_name(data_dir: Path, plan: Plan) -> str:
    name = make_run_name(plan)
    if edited := describe_edits(data_dir, plan):
        log.warning("%s: starting run %s", edited, name)
    return name


def _is_begun(config: ServerConfig, of_jobs: frozenset[str], plan: Plan, *, again: bool) -> bool:
    """Return true if a run would be resumed or refused instead of begun."""
    data_dir = Path(config.data_dir)
    if config.run:
        return run_exists(data_dir, config.run)
    return bool(find_unfinished(data_dir, plan, of_jobs) or (not again and find_ended_run(data_dir, plan, "")))
