"""What a replay of a trace plays: which plan, and which of the trace's devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.journal.records import Gossiped
from edge_server.journal.runs import exists, find_all
from edge_server.plan.devices import DevicePlan, expanded
from edge_server.plan.plan import Plan, placed, share
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.header import TraceHeader
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import portable_trace, trace_of_run
from edge_server.rounds.check_plan import check, load
from edge_server.rounds.evaluation.running_statistics import choose_batches, set_batches
from edge_server.sites.overview import site_of
from shared.algorithms import ALGORITHMS
from shared.data.cache import DataCache
from shared.data.sources.arrays import count_trained_on
from shared.errors import ConfigError, NoSuchRun
from shared.registry import build

MOST_NAMED = 3
"""Devices in a message."""
MOST_COUNTED = 64
"""Devices whose examples are counted before a trace is played."""


def find_source(source: Path, instead: Path | None, data_dir: Path, data_root: Path) -> tuple[Plan, Trace | None]:
    """Return the plan to play and, where its devices are recorded ones, their trace.

    Args:
        source: A plan's file, a trace's folder, or a run as every command takes it.
        instead: Another plan than the trace's own; it may change all but what the devices do with work and bytes.
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
    same = batches == choose_batches(plan, build(ALGORITHMS, plan.algorithm, "algorithm"))
    return plan if same else set_batches(plan, batches)


def require_recorded_data(trace: Trace, sizes: Mapping[str, int]) -> None:
    """Refuse data that are not those the recorded devices trained on: their number of examples tells.

    Args:
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
        plan: What they do. The trace's own may name devices that never came; another one may name a part of the
            trace's, and leaves out the others.
        count: The first so many of them; 0 for all.

    Raises:
        ConfigError: The plan names a device that is not in the trace, or there are not so many.
    """
    is_own_plan = [device.name for device in trace.header.plan.device] == [device.name for device in plan.device]
    recorded = [device.name for device in trace.header.devices]
    planned = {device.name: device for device in expanded(plan.device)}
    strangers = sorted(planned.keys() - set(recorded))
    if strangers and not is_own_plan:
        raise ConfigError(
            f"plan {plan.name!r} names {', '.join(strangers)}, of which the trace knows nothing: "
            "name devices of the trace, or none for all of them"
        )
    names = recorded if is_own_plan or not planned else list(planned)
    if count > len(names) or not names:
        raise ConfigError(f"{count or 1} devices are asked for, and the trace has {len(names)}")
    names = names[:count] if count else names
    notes = (
        [f"of the plan's devices {', '.join(strangers)} never took part; they are not replayed"] if strangers else []
    )
    if left_out := [name for name in recorded if name not in names]:
        notes.append(f"{len(left_out)} devices of the trace are not replayed: {', '.join(left_out[:8])}")
    return [planned.get(name, DevicePlan(name=name)) for name in names], notes


def examples_by_device(plan: Plan, fleet: Sequence[DevicePlan]) -> dict[str, int]:
    """Return how many examples each device would train on; of a large fleet the first devices tell enough.

    Args:
        plan: Whose data they share.
    """
    cache, sizes = DataCache(), dict[str, int]()
    for index, device in enumerate(fleet[:MOST_COUNTED]):
        data = share(plan, fleet, index)
        sizes[device.name] = count_trained_on(cache.count(data), data)
    return sizes


@dataclass(frozen=True)
class SiteTraces:
    """What was recorded at the sites of one run.

    Attributes:
        traces: Of each site, in the plan's order; `header` is the first one's.
        gossip_s: Seconds that mixing took each site, by round: they are no calculation of its server's.
    """

    traces: Mapping[str, Trace]
    gossip_s: Mapping[str, Mapping[int, float]]

    @property
    def header(self) -> TraceHeader:
        """Return what stands in the `trace.json` of the first."""
        return next(iter(self.traces.values())).header

    def trace_of(self, device: str) -> Trace:
        """Return the trace in which a device of the plan is."""
        return next(
            trace
            for trace in self.traces.values()
            if device in {device_entry.name for device_entry in trace.header.devices}
        )

    def server_s(self) -> dict[str, Mapping[str, Callable[..., float]]]:
        """Return the seconds that each site's server's own calculations take, by their names."""
        return {site: recorded_gateway.server_costs(trace, self.gossip_s[site]) for site, trace in self.traces.items()}

    def require_data(self, sizes: Mapping[str, int]) -> None:
        """Refuse data that are not those the devices trained on, as `require_recorded_data`."""
        for trace in self.traces.values():
            require_recorded_data(trace, sizes)


def find_site_traces(source: Path, data_dir: Path, data_root: Path) -> SiteTraces | None:
    """Return what was recorded at all sites of a run, by what the names of its runs begin with; None of anything else.

    Args:
        source: As `find_source`.
        data_root: Folder of data sets.

    Raises:
        ConfigError: A run of a site is not there, or a device of the plan took part nowhere.
    """
    if source.is_file() or files.is_trace(source):
        return None
    try:
        runs = find_all(data_dir, str(source))
    except ConfigError:
        return None  # `find_source` says what is wrong with it
    if len(runs) == 1:
        return None
    records = {site_of(run.records, run.folder.name): run.records for run in runs}
    traces = {site: portable_trace(trace_of(those), data_root) for site, those in records.items()}
    gossips = {
        site: {record.round: record.seconds for record in records if isinstance(record, Gossiped)}
        for site, records in records.items()
    }
    plan = next(iter(traces.values())).header.plan
    present = {device.name for trace in traces.values() for device in trace.header.devices}
    absent = [device.name for device in expanded(plan.device) if device.name not in present]
    missing = [site for site in (plan.sites.names if plan.sites else ()) if site not in traces]
    if missing or absent:
        lacking = f"the run of site {missing[0]} is not there" if missing else f"device {absent[0]} took part nowhere"
        raise ConfigError(f"{source}: {lacking}: sites are replayed from the runs of all, of all their devices")
    return SiteTraces(traces, gossips)


def require_replayable(source: Path, *, is_plan: bool) -> None:
    """Refuse what a plan with several sites cannot be replayed from.

    Args:
        source: What is asked for.
        is_plan: Whether that is a plan's file, with its own devices.

    Raises:
        ConfigError: It is the trace or the run of one site, other devices are asked for, or another plan.
    """
    if not is_plan:
        raise ConfigError(
            f"{source}: sites: several edge servers are replayed from a plan's file, with the devices that it names, "
            "or from the runs of all its sites, by what their names begin with: leave out --devices and another plan"
        )
