"""Source of a replay: plan and recorded devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.journal.records import Gossiped
from edge_server.journal.runs import find_site_runs, run_exists
from edge_server.learner import plan_algorithm
from edge_server.plan.data import device_data, resolve_data
from edge_server.plan.devices import DevicePlan, expand_devices
from edge_server.plan.plan import Plan
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.header import TraceHeader
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import portable_trace, trace_of_run
from edge_server.rounds.check_plan import check, load
from edge_server.rounds.running_statistics import choose_batches, set_batches
from edge_server.sites.overview import find_site
from shared.data.cache import DataCache
from shared.data.spec import NONE
from shared.errors import ConfigError, NoSuchRun

# Devices named in an error message.
MOST_NAMED = 3
# Devices whose examples are counted before a trace is replayed.
MOST_COUNTED = 64


def find_source(source: Path, instead: Path | None, data_dir: Path, data_root: Path) -> tuple[Plan, Trace | None]:
    """Return the plan to replay and, for recorded devices, their trace.

    Args:
        source: Plan file, trace folder, or run name or folder.
        instead: Plan to replay on the trace's devices in place of the recorded plan.
        data_root: Folder of data sets.

    Raises:
        ConfigError: The source does not exist or is invalid, or `instead` is given with a plan file.
    """
    if files.is_trace(source):
        trace = files.read(source)
    elif run_exists(data_dir, str(source)) or run_exists(source.parent, source.name) or not source.exists():
        trace = _run_trace(source, data_dir, data_root)
    elif source.is_dir():
        raise ConfigError(f"{source}: this folder has no trace or run; give a trace, a run or a plan file")
    elif instead is None:
        return load(source, data_root, several_sites=True), None
    else:
        raise ConfigError(f"{source} is not a trace or run; another plan can only be replayed on recorded devices")
    check(trace.header.plan, source)
    return (resolve_data(_recorded_plan(trace), data_root) if instead is None else load(instead, data_root)), trace


def _run_trace(source: Path, data_dir: Path, data_root: Path) -> Trace:
    try:
        return trace_of_run(data_dir, str(source), data_root)
    except NoSuchRun:
        raise ConfigError(
            f"{source}: not a plan, a trace or a run in {data_dir}; "
            "give the path of a plan file or a trace folder, or a run that `edge-server runs` lists"
        ) from None


def _recorded_plan(trace: Trace) -> Plan:
    """Return a trace's plan with the recorded number of statistics batches; old runs measured none."""
    plan, batches = trace.header.plan, trace.header.statistics_batches
    same = batches == choose_batches(plan, plan_algorithm(plan))
    return plan if same else set_batches(plan, batches)


def require_recorded_data(trace: Trace, sizes: Mapping[str, int]) -> None:
    """Reject data sets that differ from the recorded ones in their number of examples.

    Args:
        sizes: Number of training examples on this machine, by device.

    Raises:
        ConfigError: A device has more or fewer examples than recorded.
    """
    had = {task.device: task.examples for task in trace.tasks if task.purpose == "train" and task.examples}
    others = [name for name, size in sizes.items() if had.get(name, size) != size]
    if others:
        examples = ", ".join(f"{name} on {had[name]} examples, here {sizes[name]}" for name in others[:MOST_NAMED])
        raise ConfigError(
            f"{len(others)} of {len(sizes)} devices trained on other data than the plan's: {examples}; give the folder "
            "of the data sets with --data-root, or give --other-data for a replay whose accuracy means nothing"
        )


def select_recorded_devices(trace: Trace, plan: Plan, count: int = 0) -> tuple[list[DevicePlan], list[str]]:
    """Return the devices to replay, and notes for the replay's record.

    Args:
        plan: The recorded plan may name devices that never connected. Another plan may name a subset of the devices.
        count: Number of devices to replay, the first ones; 0 for all.

    Raises:
        ConfigError: The plan names a device that the trace lacks, or `count` exceeds the recorded devices.
    """
    is_own_plan = [device.name for device in trace.header.plan.device] == [device.name for device in plan.device]
    recorded = [device.name for device in trace.header.devices]
    planned = {device.name: device for device in expand_devices(plan.device)}
    strangers = sorted(planned.keys() - set(recorded))
    if strangers and not is_own_plan:
        raise ConfigError(
            f"plan {plan.name!r} names {', '.join(strangers)}, which are not in the trace: "
            "name devices of the trace, or no devices for all of them"
        )
    names = recorded if is_own_plan or not planned else list(planned)
    if count > len(names) or not names:
        raise ConfigError(f"{count or 1} devices requested, but the trace has {len(names)}; lower --devices")
    names = names[:count] if count else names
    notes = [f"devices {', '.join(strangers)} of the plan never took part and are not replayed"] if strangers else []
    if left_out := [name for name in recorded if name not in names]:
        notes.append(f"{len(left_out)} devices of the trace are not replayed: {', '.join(left_out[:8])}")
    return [planned.get(name, DevicePlan(name=name)) for name in names], notes


def count_examples_by_device(plan: Plan, fleet: Sequence[DevicePlan]) -> dict[str, int]:
    """Return the number of training examples of the fleet's first devices, at most `MOST_COUNTED`; if known here."""
    cache, sizes = DataCache(), dict[str, int]()
    for index, device in enumerate(fleet[:MOST_COUNTED]):
        data = device_data(plan, fleet, index)
        if data.source == NONE:
            continue
        sizes[device.name] = cache.count_sides(data)[1]
    return sizes


@dataclass(frozen=True)
class SiteTraces:
    """Traces of all sites of one run.

    Attributes:
        traces: By site, in the plan's order.
        gossip_s: Seconds of mixing, by site and round; not part of the server's own calculations.
    """

    traces: Mapping[str, Trace]
    gossip_s: Mapping[str, Mapping[int, float]]

    @property
    def header(self) -> TraceHeader:
        """Return the first site's header."""
        return next(iter(self.traces.values())).header

    def trace_of(self, device: str) -> Trace:
        """Return the trace that contains a device."""
        return next(trace for trace in self.traces.values() if device in {entry.name for entry in trace.header.devices})

    def server_s(self) -> dict[str, Mapping[str, Callable[..., float]]]:
        """Return the seconds of each site's server calculations, by name."""
        return {site: recorded_gateway.server_costs(trace, self.gossip_s[site]) for site, trace in self.traces.items()}

    def require_data(self, sizes: Mapping[str, int]) -> None:
        """Reject data sets that differ from the recorded ones, as `require_recorded_data`."""
        for trace in self.traces.values():
            require_recorded_data(trace, sizes)


def find_site_traces(source: Path, data_dir: Path, data_root: Path) -> SiteTraces | None:
    """Return the traces of all sites whose run names start with `source`; None if that is not a run of several sites.

    Args:
        data_root: Folder of data sets.

    Raises:
        ConfigError: A site's run is missing, or a device of the plan appears in no run.
    """
    if source.is_file() or files.is_trace(source):
        return None
    try:
        runs = find_site_runs(data_dir, str(source))
    except ConfigError:
        return None  # `find_source` raises the error
    if len(runs) == 1:
        return None
    records = {find_site(run.records, run.folder.name): run.records for run in runs}
    traces = {site: portable_trace(trace_of(those), data_root) for site, those in records.items()}
    gossips = {
        site: {record.round: record.seconds for record in records if isinstance(record, Gossiped)}
        for site, records in records.items()
    }
    plan = next(iter(traces.values())).header.plan
    present = {device.name for trace in traces.values() for device in trace.header.devices}
    absent = [device.name for device in expand_devices(plan.device) if device.name not in present]
    missing = [site for site in (plan.sites.names if plan.sites else ()) if site not in traces]
    if missing or absent:
        lacking = f"the run of site {missing[0]} is missing" if missing else f"device {absent[0]} is in no run"
        raise ConfigError(f"{source}: {lacking}: a replay of sites needs the runs of all sites with all devices")
    return SiteTraces(traces, gossips)


def require_multi_site_source(source: Path, *, is_plan: bool) -> None:
    """Reject a source from which a plan with several sites cannot be replayed.

    Args:
        is_plan: The source is a plan file, replayed with its own devices.

    Raises:
        ConfigError: The source is one site's trace or run, or other devices or another plan are requested.
    """
    if not is_plan:
        raise ConfigError(
            f"{source}: a plan with several sites is replayed from its file with its own devices, "
            "or from the runs of all its sites, by their common prefix; leave out --devices and another plan"
        )
