"""What a replay of a trace plays: which plan, and which of the trace's devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_server.journal.runs import exists
from edge_server.plan.devices import DevicePlan, expanded
from edge_server.plan.plan import Plan, placed
from edge_server.replay.trace import files
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import trace_of_run
from edge_server.rounds.check_plan import check, load
from edge_server.rounds.evaluation.running_statistics import batches_of, settle_batches
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError, NoSuchRun
from shared.registry import build

MOST_NAMED = 3
"""Devices in a message."""


def find_source(source: Path, instead: Path | None, data_dir: Path, data_root: Path) -> tuple[Plan, Trace | None]:
    """Return the plan to play and, where its devices are recorded ones, their trace.

    Args:
        source: A plan's file, a trace's folder, or a run as every command takes it.
        instead: Another plan than the trace's own; it may change all but what the devices do with work and bytes.
        data_dir: Folder of runs.
        data_root: Folder of data sets.

    Raises:
        ConfigError: There is no such thing, it cannot be used, or a plan has a plan put in its place.
    """
    if files.is_trace(source):
        trace = files.read(source)
    elif exists(data_dir, str(source)) or exists(source.parent, source.name) or not source.exists():
        trace = _run_trace(source, data_dir, data_root)
    elif source.is_dir():
        raise ConfigError(f"{source}: a folder without a trace or a run in it; name one that has, or a plan's file")
    elif instead is None:
        return load(source, data_root, several_sites=True), None
    else:
        raise ConfigError(f"{source} is no trace and no run: only of what was recorded another plan can be replayed")
    check(trace.header.plan, source)
    return (placed(_recorded_plan(trace), data_root) if instead is None else load(instead, data_root)), trace


def _run_trace(source: Path, data_dir: Path, data_root: Path) -> Trace:
    try:
        return trace_of_run(data_dir, str(source), data_root)
    except NoSuchRun:
        raise ConfigError(
            f"{source}: no plan, no trace and no run in {data_dir} has this name; "
            "give the path of a plan's file or of a trace's folder, or a run that `edge-server runs` lists"
        ) from None


def _recorded_plan(trace: Trace) -> Plan:
    """Return a trace's own plan; as much is measured of running statistics as was, nothing in a run of before."""
    plan, batches = trace.header.plan, trace.header.statistics_batches
    same = batches == batches_of(plan, build(ALGORITHMS, plan.algorithm, "algorithm"))
    return plan if same else settle_batches(plan, batches)


def require_recorded_data(trace: Trace, sizes: Mapping[str, int]) -> None:
    """Refuse data that are not those the recorded devices trained on: their number of examples tells.

    Args:
        trace: What was recorded.
        sizes: By device: the examples that it would train on here.

    Raises:
        ConfigError: A device has more or fewer than it had.
    """
    had = {task.device: task.examples for task in trace.tasks if task.purpose == "train" and task.examples}
    others = [name for name, size in sizes.items() if had.get(name, size) != size]
    if others:
        examples = ", ".join(f"{name} on {had[name]} examples, here {sizes[name]}" for name in others[:MOST_NAMED])
        raise ConfigError(
            f"{len(others)} of {len(sizes)} devices trained on other data than the plan's: {examples}; name the folder "
            "of the data sets with --data-root, or give --other-data for a replay whose accuracy means nothing"
        )


def recorded_fleet(trace: Trace, plan: Plan, count: int = 0) -> tuple[list[DevicePlan], list[str]]:
    """Return the devices to replay, and what the record must say of them.

    Args:
        trace: The trace.
        plan: What they do. The trace's own may name devices that never came; another one may name a part of the
            trace's, and leaves out the others.
        count: The first so many of them; 0 for all.

    Raises:
        ConfigError: The plan names a device that is not in the trace, or there are not so many.
    """
    own = [device.name for device in trace.header.plan.device] == [device.name for device in plan.device]
    recorded = [device.name for device in trace.header.devices]
    planned = {device.name: device for device in expanded(plan.device)}
    strangers = sorted(planned.keys() - set(recorded))
    if strangers and not own:
        raise ConfigError(
            f"plan {plan.name!r} names {', '.join(strangers)}, of which the trace knows nothing: "
            "name devices of the trace, or none for all of them"
        )
    names = recorded if own or not planned else list(planned)
    if count > len(names) or not names:
        raise ConfigError(f"{count or 1} devices are asked for, and the trace has {len(names)}")
    names = names[:count] if count else names
    notes = (
        [f"of the plan's devices {', '.join(strangers)} never took part; they are not replayed"] if strangers else []
    )
    if left_out := [name for name in recorded if name not in names]:
        notes.append(f"{len(left_out)} devices of the trace are not replayed: {', '.join(left_out[:8])}")
    return [planned.get(name, DevicePlan(name=name)) for name in names], notes
