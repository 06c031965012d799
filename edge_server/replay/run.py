"""Replay runner: replay a plan, trace or recorded run into run folders."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import msgspec
import torch
import xxhash

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Noted, RoundOpened, closed_rounds
from edge_server.journal.runs import create_runs_folder, find_run, record_run_order
from edge_server.journal.sqlite import open_records
from edge_server.plan.data import device_data, planned_data, require_data, resolve_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan, devices
from edge_server.plan.replay import ReplayPlan
from edge_server.replay import other_examples
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.devices import recorded_run as recorded
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.feasibility import require_possible
from edge_server.replay.host import Host
from edge_server.replay.jobs import JobQueue
from edge_server.replay.participants import Participants
from edge_server.replay.play import play
from edge_server.replay.pool import make_pool
from edge_server.replay.progress import Progress
from edge_server.replay.sites import SiteDecisions, play_sites
from edge_server.replay.source import (
    SiteTraces,
    count_examples_by_device,
    find_site_traces,
    find_source,
    require_multi_site_source,
    require_recorded_data,
    select_recorded_devices,
)
from edge_server.replay.stacked_training import divide_cohort
from edge_server.replay.temporary_folder import PART_PREFIX, folder_in
from edge_server.replay.trace.trace import Trace
from edge_server.replay.training_executor import TrainingExecutor
from edge_server.replay.workload import Workload
from edge_server.rounds.check_data import require_fitting_data
from edge_server.rounds.plugins import plan_plugins
from shared.algorithms import ALGORITHMS
from shared.data.cache import DataCache
from shared.data.spec import NONE
from shared.errors import ConfigError, FieldFleetError
from shared.models.build import DRAW
from shared.models.evaluate import build_skeleton
from shared.models.leaves import read_leaves
from shared.registry import build
from shared.runtime import malloc
from shared.runtime.clock import VirtualLoop
from shared.tensors.tree import State

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - a unique folder is created in it


# Copies of the model per device: received, to send, received by the server, and one spare.
COPIES = 4


ROOM_BYTES = 256 << 20


Tell = Callable[[AnyRecord, float], None]
"""Called with every record and its virtual second."""


@dataclass(frozen=True)
class Output:
    """Destination and means of a replay; see `run_replay`."""

    data_dir: Path
    workers: int
    tell: Tell | None
    host: Host | None


ReplayedRun: TypeAlias = tuple[Path, Sequence[AnyRecord]]
"""Folder and records of a run."""


def run_replay(  # noqa: PLR0913 - options of the command line
    source: Path | Plan,
    data_root: Path,
    data_dir: Path,
    count: int,
    workers: int = 0,
    *,
    instead: Path | None = None,
    exact: bool = False,
    other_data: bool = False,
    data: str = "",
    synthetic: str | None = None,
    tell: Tell | None = None,
    host: Host | None = None,
) -> list[ReplayedRun]:
    """Replay a plan or a recorded run; return folder and records of each run, one per site.

    Args:
        source: Plan with resolved paths, plan file, trace folder, or run name or folder.
        count: Number of devices; 0 for those of the plan.
        workers: Training processes; 1 for this process only, 0 for one per core.
        exact: Train every device separately, as in a live run. Replays of a recorded plan always do.
        other_data: Accept data sets that differ from the recorded ones.
        data: `SOURCE=PATH` of examples to use instead of the recorded ones; empty for none.
        synthetic: Shape of random examples to use instead, empty for the recorded shape; None for none.
        tell: None to print progress on standard error.

    Raises:
        ConfigError: The plan or the trace cannot be used.
    """
    output = Output(data_dir, workers or count_cores(), tell, host)
    if min(workers, count) < 0:
        raise ConfigError("--workers and --devices: give 1 or more, or leave them out")
    if isinstance(source, Plan):
        _require_data(source, None, data_root)
        return _replay_to(output, plan_for_exact_bits(source) if exact else source, count, None)
    if data or synthetic is not None:
        return _with_other_examples(source, data_root, output, data, synthetic)
    if traces := None if instead or count else find_site_traces(source, data_dir, data_root):
        return _replay_recorded_sites(traces, data_root, output, other_data=other_data)
    plan, trace = find_source(source, instead, data_dir, data_root)
    if plan.sites:
        require_multi_site_source(source, is_plan=trace is None and not count)
    _require_data(plan, trace, data_root)
    if exact or (trace and not instead):
        plan = plan_for_exact_bits(plan)
    if trace and not (instead or count or other_data):
        require_recorded_data(trace, _count_local_examples(plan, trace))
    return _replay_to(output, plan, count, trace)


def _replay_to(output: Output, plan: Plan, count: int, trace: Trace | None) -> list[ReplayedRun]:
    """Replay a plan into a temporary folder, and store its runs once they have ended."""
    if trace is None:
        require_fitting_data(plan, devices(plan, count), is_shared=True)
    with folder_in(create_runs_folder(output.data_dir), PART_PREFIX) as place:
        runs = _play_into(output, plan, place / replay_name(plan, trace, count), count, trace)
        return [_store_run(run, output.data_dir) for run in runs]


def _require_data(plan: Plan, trace: Trace | None, data_root: Path) -> None:
    """Reject missing data sets; for recorded runs, the message names the alternatives.

    Raises:
        ConfigError: A data set is missing, or the devices trained on examples of their own.
    """
    if trace and not plan.data:
        raise ConfigError(
            f"{trace.header.run}: its devices trained on local examples that are not on this machine: "
            f"{other_examples.REMEDY}"
        )
    try:
        require_data(plan, data_root)
    except ConfigError as error:
        if trace is None:
            raise
        raise ConfigError(f"{error}; or {other_examples.REMEDY}") from error


def _count_local_examples(plan: Plan, trace: Trace) -> dict[str, int]:
    """Return the number of training examples of each recorded device on this machine.

    Raises:
        ConfigError: The data cannot be read.
    """
    try:
        return count_examples_by_device(plan, select_recorded_devices(trace, plan)[0])
    except ConfigError as error:
        problem = f"the devices' examples cannot be read on this machine ({error})"
        raise ConfigError(f"{trace.header.run}: {problem}: {other_examples.REMEDY}") from error


def _with_other_examples(
    source: Path, data_root: Path, output: Output, data: str, synthetic: str | None
) -> list[ReplayedRun]:
    """Replay a recorded run on substitute examples."""
    if data and synthetic is not None:
        raise ConfigError("--data and --synthetic: give one of them")
    data_dir = output.data_dir
    plan, trace = find_source(source, None, data_dir, data_root)
    if trace is None or plan.sites:
        raise ConfigError(f"{source}: --data and --synthetic require a recorded run of one server, or its trace")
    plan, shape = plan_for_exact_bits(plan), other_examples.parse_shape(synthetic or "")
    with ExitStack() as stack:
        if synthetic is None:
            plan = other_examples.replace_data(plan, other_examples.parse_data(data))
        else:
            shape = shape or other_examples.recorded_shape(_records_of(source, data_dir))
            plan = stack.enter_context(other_examples.synthetic_data(plan, trace, shape, create_runs_folder(data_dir)))
        return _replay_to(output, plan, 0, trace)


def _records_of(source: Path, data_dir: Path) -> Sequence[AnyRecord]:
    """Return the records of a run; nothing for a trace."""
    try:
        return find_run(data_dir, str(source)).records
    except ConfigError:
        return ()


def _replay_recorded_sites(
    traces: SiteTraces, data_root: Path, output: Output, *, other_data: bool
) -> list[ReplayedRun]:
    """Replay the recorded runs of several sites, bit for bit."""
    plan = plan_for_exact_bits(resolve_data(traces.header.plan, data_root))
    require_data(plan, data_root)
    if not other_data:
        traces.require_data(count_examples_by_device(plan, devices(plan)))
    with folder_in(create_runs_folder(output.data_dir), PART_PREFIX) as place:
        part = place / replay_name(plan, traces)
        parts = {site: part.with_name(f"{part.name}-{site}") for site in traces.traces}
        tell = output.tell or Progress(plan.rounds).tell
        ended = replay_sites(plan, parts, workers=output.workers, tell=tell, traces=traces, host=output.host)
        return [_store_run((parts[site], records), output.data_dir) for site, (_, records) in ended.items()]


def _play_into(output: Output, plan: Plan, part: Path, count: int, trace: Trace | None) -> list[ReplayedRun]:
    """Replay a plan into `part`, or a plan with sites into one folder per site beside it."""
    tell, workers, host = output.tell or Progress(plan.rounds).tell, output.workers, output.host
    if not plan.sites:
        return [(part, replay_plan(plan, part, count, workers=workers, tell=tell, trace=trace, host=host)[1])]
    parts = {site: part.with_name(f"{part.name}-{site}") for site in plan.sites.names}
    ended = replay_sites(plan, parts, workers=workers, tell=tell, host=host)
    return [(parts[site], records) for site, (_, records) in ended.items()]


def _store_run(replayed: ReplayedRun, data_dir: Path) -> ReplayedRun:
    """Move a finished run into `data_dir`, replacing an earlier run of that name."""
    part, records = replayed
    folder = data_dir / part.name
    with suppress(FieldFleetError, OSError):
        if folder.exists() and _list_losses(open_records(folder)) != _list_losses(records):
            log.warning("%s: replaced an earlier replay that had other results; its data have changed", part.name)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    record_run_order(folder, replace=True)
    return folder, open_records(folder)


def _list_losses(records: Sequence[AnyRecord]) -> list[float | None]:
    return [end.loss for end in closed_rounds(records)]


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C in the block, so that files in memory are removed."""

    def as_ctrl_c(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # in a running loop, asyncio's, which cancels the main task
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, as_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plan_for_exact_bits(plan: Plan) -> Plan:
    """Return a plan whose replay computes the same bits as a live run."""
    return msgspec.structs.replace(plan, replay=ReplayPlan())


def count_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0))


def replay_name(plan: Plan, trace: Trace | SiteTraces | None = None, count: int = 0) -> str:
    """Return the name of a replay, a hash of its inputs without data: repeating a replay overwrites the same run.

    Args:
        trace: Trace of the replayed devices; None for the plan's devices.
        count: Number of devices; 0 for those of the plan.
    """
    optional = [item for item in (count, plan_plugins(plan)) if item]  # other code of a plugin is another replay
    played = msgspec.json.encode((plan, trace.header if trace else None, *optional))
    return f"{plan.name[:32]}-replay-{xxhash.xxh3_64_hexdigest(played)[:8]}"


def replay_plan(  # noqa: PLR0913 - inputs of a replay
    plan: Plan,
    folder: Path,
    count: int = 0,
    *,
    workers: int = 1,
    tell: Tell | None = None,
    trace: Trace | None = None,
    recorded_rounds: Mapping[int, RoundOpened] | None = None,
    host: Host | None = None,
) -> tuple[State, Sequence[AnyRecord]]:
    """Run a plan in virtual time into a new folder; return the final state and the records.

    Args:
        count: Number of devices; 0 for those of the plan.
        workers: Training processes; 1 for this process only. The record does not depend on it.
        trace: Trace of the devices to replay; None for the plan's devices.
        recorded_rounds: Assignments of another run to repeat, by round; None to decide them again.

    Raises:
        ConfigError: The plan's data cannot be read, or the trace lacks a device of the plan.
        Infeasible: A budget of the plan cannot be met; the message names the smallest feasible one.
    """
    host = host or Host()
    with _prepare(plan, count, workers, trace, host) as prepared:
        clock = prepared.runner.get_loop().time
        store = ReportingStore(folder, prepared.folder / "updates", clock, tell)
        try:
            state = prepared.runner.run(
                host.watch(play(plan, folder.name, store, prepared.participants, recorded_rounds))
            )
            store.extend([Noted(what=note) for note in prepared.notes])
            store.export()
            return state, store.records()
        finally:
            store.close()


def replay_sites(  # noqa: PLR0913 - as `replay_plan`
    plan: Plan,
    folders: Mapping[str, Path],
    *,
    workers: int = 1,
    tell: Tell | None = None,
    traces: SiteTraces | None = None,
    decisions: SiteDecisions | None = None,
    host: Host | None = None,
) -> dict[str, tuple[State, Sequence[AnyRecord]]]:
    """Run a plan with several sites in one virtual time; return each site's final state and records.

    Args:
        folders: New folder of each site's run.
        traces: Traces of the devices and servers to replay; None for the plan's devices.
        decisions: Recorded decisions to repeat, by site and round; None to decide them again.

    Raises:
        ConfigError: As `replay_plan`.
        Infeasible: As `replay_plan`.
    """
    host = host or Host()
    with _prepare(plan, 0, workers, traces, host) as prepared, ExitStack() as stack:
        clock, updates = prepared.runner.get_loop().time, prepared.folder / "updates"
        stores = {site: ReportingStore(folder, updates / site, clock, tell) for site, folder in folders.items()}
        for store in stores.values():
            stack.callback(store.close)
        server_s = traces.server_s() if traces else {}
        work = play_sites(plan, stores, prepared.participants, server_s, decisions)
        states = prepared.runner.run(host.watch(work))
        for store in stores.values():
            store.extend([Noted(what=note) for note in prepared.notes])
            store.export()
        return {site: (states[site], store.records()) for site, store in stores.items()}


@dataclass(frozen=True)
class PreparedReplay:
    """Everything that a replay needs.

    Attributes:
        runner: Runs coroutines in virtual time.
        folder: Temporary; removed after the replay.
        notes: Remarks for the replay's record.
    """

    runner: asyncio.Runner
    participants: Participants
    folder: Path
    notes: list[str]


@contextmanager
def _prepare(
    plan: Plan, count: int, workers: int, trace: Trace | SiteTraces | None, host: Host
) -> Iterator[PreparedReplay]:
    """Provide everything that a replay needs while the block lasts; arguments as `replay_plan`."""
    if host.is_owned:
        malloc.tune(*_heap_limits(plan))
    torch.set_num_threads(1)
    workload = Workload(DataCache())
    fleet, behaviours, notes = _build_fleet(plan, count, trace, workload.cache)
    workload.cache.count(device_data(plan, fleet, 0))  # load the data before forking, so that processes share it
    together = _devices_per_pass(plan, fleet, workload)
    if together > 1:
        notes.append(f"up to {together} devices train in one pass; models differ from a live run's by float rounding")
    with (
        folder_in(memory_folder(plan, fleet)) as folder,
        make_pool(TrainingExecutor(workload.cache, together=together > 1).execute, workers) as pool,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        # Counting operations uses autograd, which must not run before the fork if torch is a CUDA build.
        workload.flops(plan.model, device_data(plan, fleet, 0), plan.hyper.batch_size)
        if trace is None or plan.budget != trace.header.plan.budget:  # a recorded budget needs no check
            require_possible(plan, fleet, behaviours, workload)
        server_s = recorded_gateway.server_costs(trace) if isinstance(trace, Trace) else {}
        draw = trace.header.draw if trace else DRAW
        jobs, devices_folder = JobQueue(pool, together), folder / "devices"
        participants = Participants(fleet, behaviours, jobs, workload, devices_folder, server_s, draw)
        yield PreparedReplay(runner, participants, folder, notes)


def _heap_limits(plan: Plan) -> tuple[int, int]:
    """Return the limits for `malloc.tune`; small split networks keep all memory, as their features exceed the model.

    Measured with five devices and an eighth of VGG-13, all steps computed in this process: releasing memory had cost a
    sixth of its CPU time in page faults, and a fifth on a machine with other load.
    """
    split = build(ALGORITHMS, plan.algorithm, "algorithm").split is not None
    if split and model_bytes(plan) < malloc.LARGE_BYTES:
        return ROOM_BYTES // 4, ROOM_BYTES
    return malloc.LARGE_BYTES, malloc.RETAINED_BYTES


def _build_fleet(
    plan: Plan, count: int, trace: Trace | SiteTraces | None, cache: DataCache
) -> tuple[list[DevicePlan], list[Behaviour], list[str]]:
    """Return the devices, their behaviours, and notes for the replay's record."""
    if trace is None:
        fleet, notes = devices(plan, count), list[str]()
        behaviours = [build_behaviour(device, index, plan.seed) for index, device in enumerate(fleet)]
    elif isinstance(trace, SiteTraces):
        fleet, notes = devices(plan), list[str]()
        example = _example_shape(plan, fleet, cache)
        traces = ((trace.trace_of(device.name), [device.name]) for device in fleet)
        behaviours = [recorded.recorded_behaviours(each, names, example)[0] for each, names in traces]
    else:
        fleet, notes = select_recorded_devices(trace, plan, count)
        example = _example_shape(plan, fleet, cache)
        behaviours = recorded.recorded_behaviours(trace, [device.name for device in fleet], example)
    return fleet, behaviours, notes + [warning for behaviour in behaviours for warning in behaviour.warnings]


def _example_shape(plan: Plan, fleet: Sequence[DevicePlan], cache: DataCache) -> tuple[int, ...]:
    data = device_data(plan, fleet, 0)
    return () if data.source == NONE else tuple(cache.example(data).shape)


class ReportingStore(SqliteStore):
    """Store that does not wait for the disk, keeps updates elsewhere, and reports every record."""

    def __init__(self, folder: Path, updates: Path, clock: Callable[[], float], tell: Tell | None) -> None:
        super().__init__(folder, durable=False, updates=updates)
        self._clock, self._tell = clock, tell

    def extend(
        self, records: Sequence[AnyRecord], payloads: Mapping[str, bytes] = {}, *, may_wait: bool = False
    ) -> None:
        super().extend(records, payloads, may_wait=may_wait)
        if self._tell:
            for record in records:
                self._tell(record, self._clock())


def _devices_per_pass(plan: Plan, fleet: Sequence[DevicePlan], workload: Workload) -> int:
    """Return the number of devices that train in one pass."""
    if planned_data(plan).source == NONE:
        return 1
    if not plan.replay.together:
        return 1
    return divide_cohort(plan, _cohort_size(plan, fleet), workload.cache.example(device_data(plan, fleet, 0)).shape)


def _cohort_size(plan: Plan, fleet: Sequence[DevicePlan]) -> int:
    """Return the number of devices that work at the same time, over all sites."""
    sites = len(plan.sites.names) if plan.sites else 1
    return min(len(fleet), sites * round(plan.cohort.size * (1 + plan.cohort.over_selection)) or len(fleet))


def memory_folder(plan: Plan, fleet: Sequence[DevicePlan]) -> Path | None:
    """Return a folder in memory if it has room for a cohort's files; None for the default temporary folder."""
    try:
        room = shutil.disk_usage(MEMORY).free
    except OSError:
        return None
    return MEMORY if COPIES * _cohort_size(plan, fleet) * model_bytes(plan) < room / 2 else None


def model_bytes(plan: Plan) -> int:
    """Return the size of a plan's model."""
    return sum(leaf.nbytes for leaf in read_leaves(build_skeleton(plan.model)).values())
