"""`edge-server submit` and `edge-server queue`: plans that wait for the devices of a site."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from edge_server.cli.terminal import write_text
from edge_server.journal.plan_queue import PlanQueue, QueuedJob
from edge_server.plan.devices import expand_devices
from edge_server.plan.server_config import ServerConfig, load, plugin_entries
from shared import registry
from shared.errors import ConfigError
from shared.projects.working_folder import find_active
from shared.runtime import processes
from shared.runtime.command_line import add_command, add_config
from shared.runtime.extras import find_packaged_config
from shared.runtime.processes import loading
from shared.runtime.text_table import TextColumn, TextTable

CONFIG_HELP = "server's configuration file, for its site, folder of runs and data sets"
MOST_NAMED = 4
"""Devices named in the list."""
NUMBER_HELP = "number of a job in the list"


def submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `submit`."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan file; the queue stores a copy")
    help_ = "jobs with a higher priority come first, those with the same in the order of submission; default: 0"
    parser.add_argument("--priority", type=int, default=0, metavar="N", help=help_)
    add_config(parser, "server.toml", CONFIG_HELP)


def queue_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `queue`, which lists the jobs without a verb."""
    usual = find_packaged_config("server.toml")
    parser.add_argument("--config", type=Path, default=usual, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    rm = add_command(verbs, "rm", "remove jobs; the run of a running job is interrupted")
    rm.add_argument("jobs", nargs="+", type=int, metavar="JOB", help=NUMBER_HELP)
    move = add_command(verbs, "move", "move a waiting job to another place")
    move.add_argument("job", type=int, metavar="JOB", help=NUMBER_HELP)
    place = move.add_mutually_exclusive_group(required=True)
    place.add_argument("--priority", type=int, metavar="N", help="its new priority")
    place.add_argument("--first", action="store_true", help="before all other waiting jobs")
    for verb in (rm, move):
        verb.add_argument("--config", type=Path, default=argparse.SUPPRESS, metavar="FILE", help=CONFIG_HELP)


def submit(options: argparse.Namespace) -> int:
    """Check a plan and add it to the queue.

    Raises:
        ConfigError: The plan or the server's file is invalid.
    """
    with loading():
        from edge_server.fleet.membership import Membership  # noqa: PLC0415
        from edge_server.rounds import check_plan  # noqa: PLC0415
        from edge_server.rounds.check_data import require_fitting_data  # noqa: PLC0415
        from edge_server.trial.peers import members_of  # noqa: PLC0415
        from edge_server.trial.wait_for_devices import require_enough  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    config = load(options.config)
    registry.allow([*registry.allowed_entries(), *plugin_entries(config)])
    plan = check_plan.load(options.plan, Path(config.data_root), several_sites=True)
    require_enough(plan, Membership(members_of(config, plan)))
    require_fitting_data(plan, is_shared=False)
    jobs = _queue_of(config)
    project = find_active(plan.project) if plan.project else None
    job = jobs.submit(plan, options.priority, str(project.folder) if project else "")
    before = [other for other in jobs.list_jobs() if other.state == "waiting" and other.rank < job.rank]
    sys.stdout.write(f"job {job.number}: plan {plan.name!r} waits, {len(before)} waiting jobs are before it\n")
    if not jobs.is_served():
        packaged = options.config == find_packaged_config("server.toml")
        command = "sudo systemctl start fieldfleet-server" if packaged else f"edge-server run --config {options.config}"
        sys.stdout.write(f"no server is at work at this site; start it: `{command}`\n")
    return 0


def queue(options: argparse.Namespace) -> int:
    """List, remove or move jobs.

    Raises:
        ConfigError: A job does not exist, or may not be moved.
    """
    processes.configure("warning", options.verbose)
    if options.config is None:
        raise ConfigError("queue: the server's file is missing; give it with --config FILE")
    jobs = _queue_of(load(options.config))
    match options.verb:
        case "rm":
            for job in jobs.remove(options.jobs):
                sys.stdout.write(f"removed job {job.number}: plan {job.plan.name!r}, {job.state}\n")
        case "move":
            job = jobs.set_priority(options.job, None if options.first else options.priority)
            sys.stdout.write(f"job {job.number}: priority {job.priority}\n")
        case _:
            _list(jobs, options.format)
    return 0


def _queue_of(config: ServerConfig) -> PlanQueue:
    return PlanQueue(Path(config.data_dir), config.site)


def _list(jobs: PlanQueue, form: str) -> None:
    entries, is_served = jobs.list_jobs(), jobs.is_served()
    if form == "json":
        content = {
            "site": jobs.site,
            "is_served": is_served,
            "jobs": [_job_json(job, is_served=is_served) for job in entries],
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n")
        return
    headings = ("job", "plan", "priority", "state", "run", "devices", "submitted", "cause")
    rows = [_row(job, is_served=is_served) for job in entries]
    caption = "" if is_served else "no server is at work at this site"
    columns = [TextColumn(heading, right=heading in ("job", "priority")) for heading in headings]
    write_text(sys.stdout, [TextTable(columns, rows, f"Queue of site {jobs.site}", caption)])


def _job_json(job: QueuedJob, *, is_served: bool) -> dict[str, object]:
    """Return a job with the names of its plan and devices."""
    fields = {name: getattr(job, name) for name in QueuedJob.__struct_fields__}
    devices = [device.name for device in expand_devices(job.plan.device)]
    return {**fields, "plan": job.plan.name, "state": _state(job, is_served=is_served), "devices": devices}


def _row(job: QueuedJob, *, is_served: bool) -> list[str]:
    names = [device.name for device in expand_devices(job.plan.device)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    devices = ", ".join(names[:MOST_NAMED]) + more if names else "any"
    state = _state(job, is_served=is_served)
    return [
        *(str(job.number), job.plan.name, str(job.priority), state, job.run or "-", devices),
        *(job.submitted, job.cause or "-"),
    ]


def _state(job: QueuedJob, *, is_served: bool) -> str:
    """Return the state for people: an ended job has its outcome, one without a server was interrupted."""
    if job.state == "ended":
        return job.outcome
    return "interrupted" if job.state == "running" and not is_served else job.state
