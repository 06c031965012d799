"""Composition of a replay: files in, record out.

A folder for what a replay has on disk or in memory; what replays that were killed have left there is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import torch
import xxhash

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Noted
from edge_server.journal.runs import make_folder
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan, devices, require_there, share
from edge_server.plan.sections import ReplayPlan
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.devices import recorded_run as recorded
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.devices.build import behaviour
from edge_server.replay.feasibility import require_possible
from edge_server.replay.jobs import Desk, Jobs
from edge_server.replay.pool import pool_of
from edge_server.replay.progress import Progress
from edge_server.replay.site import Cast, play
from edge_server.replay.source import find_source, recorded_fleet, require_recorded_data
from edge_server.replay.stacked_training import divide_cohort
from edge_server.replay.trainer import Scale
from edge_server.trace.trace import Trace
from shared.algorithms import ALGORITHMS
from shared.data.cache import DataCache
from shared.data.sources.arrays import count_trained_on
from shared.errors import ConfigError
from shared.models.build import DRAW
from shared.models.evaluate import build_skeleton
from shared.registry import build
from shared.runtime import malloc
from shared.runtime.clock import VirtualLoop
from shared.runtime.folder_lock import hold_lock
from shared.tensors.tree import State

MEMORY_PREFIX, PART_PREFIX = "fieldfleet", ".replay"
"""Of what a replay needs while it lasts, and of the record that it makes."""
LOCK = "lock"
"""The file that `held` makes: what has none is not ours to remove."""


@contextmanager
def folder_in(place: Path | None, prefix: str = MEMORY_PREFIX) -> Iterator[Path]:
    """Lend a folder in `place`, None for the usual temporary one; it is held, and gone after the block."""
    if place is not None:
        sweep(place, prefix)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-{os.getpid()}-", dir=place) as name, hold_lock(Path(name)):
        yield Path(name)


def sweep(place: Path, prefix: str = MEMORY_PREFIX) -> None:
    """Remove the folders that nobody holds any more: the lock of a process falls with it, however it ends."""
    for lock in place.glob(f"{prefix}-*-*/{LOCK}"):
        try:
            with hold_lock(lock.parent):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except (ConfigError, OSError):
            continue  # somebody is at it, or it is another user's


MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
MOST_COUNTED = 64
"""Devices whose examples are counted before a trace is played."""
COPIES = 4
"""Of a model, on a device's account: what it received, what it sends, what the server has of that, and room."""

ROOM_BYTES = 256 << 20

Tell = Callable[[AnyRecord, float], None]
"""Is told of every record, and the virtual second."""


def run_replay(  # noqa: PLR0913 - what the command line says
    source: Path,
    data_root: Path,
    data_dir: Path,
    count: int,
    workers: int = 0,
    *,
    instead: Path | None = None,
    exact: bool = False,
    other_data: bool = False,
) -> tuple[Path, list[AnyRecord]]:
    """Replay a plan or a recorded run; return the run's folder and its records. Progress is told on standard error.

    Args:
        source: The plan, a trace or a run.
        data_root: Where its data set lies.
        data_dir: For the folders of runs.
        count: Devices, instead of those that the plan names; 0 for just these.
        workers: Processes that train; 1 for this one, 0 for as many as there are cores.
        instead: Another plan than the trace's own.
        exact: Train every device alone, as in a live run, whatever the plan allows. So is a trace under its own plan,
            which is there to be compared.
        other_data: Whether a trace's own plan is played although its devices trained on other examples.

    Raises:
        ConfigError: The plan or the trace cannot be used.
    """
    if min(workers, count) < 0:
        raise ConfigError("--workers and --devices: give 1 or more, or leave them out")
    plan, trace = find_source(source, instead, data_dir, data_root)
    require_there(plan, data_root)
    if exact or (trace and not instead):
        plan = plan_for_exact_bits(plan)
    if trace and not (instead or count or other_data):
        require_recorded_data(trace, _sizes(plan, recorded_fleet(trace, plan)[0]))
    folder = data_dir / name_of(plan, trace, count)
    tell = Progress(plan.rounds).tell
    with _terminable(), folder_in(make_folder(data_dir), PART_PREFIX) as place:
        part = place / folder.name  # two replays of one plan write two of them, and one that is ended none
        _, records = replay(plan, part, count, workers=workers or cores(), tell=tell, trace=trace)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    return folder, records


def _sizes(plan: Plan, fleet: Sequence[DevicePlan]) -> dict[str, int]:
    """Return how many examples each device would train on; of a large fleet the first devices tell enough."""
    shelf, sizes = DataCache(), dict[str, int]()
    for index, device in enumerate(fleet[:MOST_COUNTED]):
        data = share(plan, fleet, index)
        sizes[device.name] = count_trained_on(shelf.count(data), data)
    return sizes


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: what it keeps in memory would outlive the process."""

    def as_ctrl_c(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # asyncio's, while a loop runs: it cancels, and cuts nothing short
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, as_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plan_for_exact_bits(plan: Plan) -> Plan:
    """Return a plan whose replay computes bit for bit what a live run does."""
    return msgspec.structs.replace(plan, replay=ReplayPlan())


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def name_of(plan: Plan, trace: Trace | None = None, count: int = 0) -> str:
    """Return the name of a replay: a function of what is played, so that replaying twice writes the same record.

    Args:
        plan: What is played.
        trace: Whose devices play it; None for the plan's own.
        count: Devices in place of the plan's; 0 for these.
    """
    played = msgspec.json.encode((plan, trace.header if trace else None, *([count] if count else [])))
    return f"{plan.name[:32]}-replay-{xxhash.xxh3_64_hexdigest(played)[:8]}"


def replay(
    plan: Plan,
    folder: Path,
    count: int = 0,
    *,
    workers: int = 1,
    tell: Tell | None = None,
    trace: Trace | None = None,
) -> tuple[State, list[AnyRecord]]:
    """Run a plan on virtual time into a new folder; return the final state and the records.

    Args:
        plan: What to do.
        folder: The run's.
        count: Devices, instead of those that the plan names; 0 for just these.
        workers: Processes that train; 1 for this one. The record is the same for any number.
        tell: Is told of every record, and of the virtual second.
        trace: Whose devices to replay; None for those of the plan.

    Raises:
        ConfigError: The plan's data cannot be read, or the trace does not know the plan's devices.
        Infeasible: A budget of the plan cannot be met; the message says the smallest that can.
    """
    malloc.tune(*_blocks(plan))
    torch.set_num_threads(1)
    (fleet, behaviours, notes), scale = _devices(plan, count, trace), Scale(DataCache())
    _warm(plan, fleet, scale)
    if trace is None or plan.budget != trace.header.plan.budget:  # what was recorded kept to its own, or did not
        require_possible(plan, fleet, behaviours, scale)
    together = _together(plan, fleet, scale)
    if together > 1:
        notes.append(
            f"up to {together} devices train in one pass; a live run's models differ by the rounding of floats"
        )
    with (
        folder_in(memory_folder(plan, fleet)) as aside,
        pool_of(Desk(scale.shelf, together=together > 1).do, workers) as pool,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        server_s, draw = (recorded_gateway.costs(trace), trace.header.draw) if trace else ({}, DRAW)
        cast = Cast(fleet, behaviours, Jobs(pool, together), scale, aside / "devices", server_s, draw)
        store = ReportingStore(folder, aside / "updates", runner.get_loop().time, tell)
        try:
            state = runner.run(play(plan, folder.name, store, cast))
            store.extend([Noted(what=note) for note in notes])
            store.export()
            return state, store.records()
        finally:
            store.close()


def _blocks(plan: Plan) -> tuple[int, int]:
    """Return what `heap.tune` takes: of a small split network all is kept: its features are larger than it.

    Measured with five devices and an eighth of VGG-13, whose steps are all computed in this process: a sixth of its CPU
    time had gone into the same pages again and again, and a fifth where others were at the memory too.
    """
    split = build(ALGORITHMS, plan.algorithm, "algorithm").split is not None
    if split and model_bytes(plan) < malloc.LARGE_BYTES:
        return ROOM_BYTES // 4, ROOM_BYTES
    return malloc.LARGE_BYTES, malloc.KEPT_BYTES


def _devices(plan: Plan, count: int, trace: Trace | None) -> tuple[list[DevicePlan], list[Behaviour], list[str]]:
    """Return the devices, how they behave, and what the record must say of that."""
    if trace is None:
        fleet, notes = devices(plan, count), list[str]()
        behaviours = [behaviour(device, index, plan.seed) for index, device in enumerate(fleet)]
    else:
        fleet, notes = recorded_fleet(trace, plan, count)
        behaviours = recorded.behaviours(trace, [device.name for device in fleet])
    return fleet, behaviours, notes + [warning for one in behaviours for warning in one.warnings]


def _warm(plan: Plan, fleet: list[DevicePlan], scale: Scale) -> None:
    """Read the data set and count a step's work before there are processes: they share what is here by then."""
    data = share(plan, fleet, 0)
    scale.shelf.count(data)
    scale.flops(plan.model, data, plan.hyper.batch_size)


class ReportingStore(SqliteStore):
    """A store that waits for no disk, keeps updates elsewhere, and tells of every record."""

    def __init__(self, folder: Path, updates: Path, clock: Callable[[], float], tell: Tell | None) -> None:
        super().__init__(folder, durable=False, updates=updates)
        self._clock, self._tell = clock, tell

    def append(self, record: AnyRecord) -> None:
        super().append(record)
        if self._tell:
            self._tell(record, self._clock())


def _together(plan: Plan, fleet: Sequence[DevicePlan], scale: Scale) -> int:
    """Return how many devices train in one pass."""
    if not plan.replay.together:
        return 1
    return divide_cohort(plan, _cohort(plan, fleet), scale.shelf.example(share(plan, fleet, 0)).shape)


def _cohort(plan: Plan, fleet: Sequence[DevicePlan]) -> int:
    return min(len(fleet), round(plan.cohort.size * (1 + plan.cohort.over_selection)) or len(fleet))


def memory_folder(plan: Plan, fleet: Sequence[DevicePlan]) -> Path | None:
    """Return a folder in memory if there is room for what a cohort has on disk; None for the usual temporary one."""
    try:
        room = shutil.disk_usage(MEMORY).free
    except OSError:
        return None
    return MEMORY if COPIES * _cohort(plan, fleet) * model_bytes(plan) < room / 2 else None


def model_bytes(plan: Plan) -> int:
    """Return the bytes of a plan's model."""
    return sum(leaf.nbytes for leaf in build_skeleton(plan.model).state_dict().values())
