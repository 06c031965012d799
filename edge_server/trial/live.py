"""Live run over a site's broker, until its end or a signal."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from edge_server.fleet.admission import longest_packet
from edge_server.fleet.broker import describe_exposure
from edge_server.fleet.flood_control import FloodLimits
from edge_server.fleet.history import HistoryWriter, open_history
from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Members, Membership
from edge_server.fleet.single_server import require_single_server
from edge_server.gateway.revocation.denied import watch_denied
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.disk import RETRY_S, retry_write
from edge_server.journal.plan_queue import PlanQueue
from edge_server.journal.records import AnyRecord, closed_rounds
from edge_server.journal.runs import LOCAL, ended_runs, has_rounds, is_empty, record_run_order, run_exists
from edge_server.plan.data_folder import check_data_folder, claim_data_folder
from edge_server.plan.inputs import describe_unapplied
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.rounds.check_data import require_fitting_data
from edge_server.rounds.run import run_plan
from edge_server.trial.peers import connect_peers, members_of
from edge_server.trial.progress import follow
from edge_server.trial.wait_for_devices import wait_for_fleet, wait_without_end
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from shared.protocol.topics import SERVER
from shared.registry import build
from shared.runtime import malloc
from shared.runtime.clock import monotonic, utc_stamp
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import background, in_thread
from shared.runtime.folder_lock import hold_lock, keep_lock
from shared.tensors.placement import Device, choose_device
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from shared.transport.session_probe import SessionProbe

log = logging.getLogger(__name__)

LAST_RECORDS_S = 5.0
"""Seconds to show the last records after the run has ended."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks of somebody who started a run at a terminal.

    Attributes:
        say: Shows a line while waiting for devices.
    """

    say: Callable[[str], None]
    tell: Callable[[AnyRecord], None]


@dataclass
class LiveSite:
    """Connection of a server to its site's broker, over which runs with disjoint devices take place at once.

    Attributes:
        members: Devices of each current run; None for any device that connects.
        expected: Devices of runs that may begin; messages of others are received sparingly.
    """

    config: ServerConfig
    server: Server
    session: Session
    members: dict[str, Members]
    expected: list[Members] = field(default_factory=list)

    def expect(self, groups: Iterable[Members]) -> None:
        """Set the devices of runs that may begin."""
        self.expected = list(groups)

    def takes(self, device: str) -> bool:
        """Return true if a device belongs to a current or expected run, or there is none."""
        groups = [*self.members.values(), *self.expected]
        return not groups or any(members is None or device in members for members in groups)


async def serve(config: ServerConfig, plan: Plan, name: str, watcher: Watcher | None = None) -> Sequence[AnyRecord]:
    """Run or resume a plan to its end; return its records.

    Args:
        config: The site, its broker, its folders.
        watcher: Reports to somebody at a terminal, and limits the wait for devices; see `run_at_site`.

    Raises:
        ConfigError: As `run_at_site`.
        SiteBusy: As `connect_site`.
        Unreachable: As `run_at_site`.
    """
    _prepare_computing(config, plan)
    async with connect_site(config, [members_of(config, plan)], gives_way=watcher is not None) as site:
        return await run_at_site(site, plan, name, watcher)


@asynccontextmanager
async def connect_site(
    config: ServerConfig, expected: Iterable[Members] = (), *, gives_way: bool = False
) -> AsyncIterator[LiveSite]:
    """Be the server of a site while the block lasts.

    Args:
        expected: Devices of the runs that may begin.
        gives_way: Whether to end if another server is connected to the broker, not only one with this folder of runs.

    Raises:
        ConfigError: A newer version wrote in the folder of runs.
        SiteBusy: Another server is at work there.
    """
    data_dir = Path(config.data_dir)
    check_data_folder(data_dir)
    if warning := describe_exposure(config.broker):
        log.warning("%s", warning)
    with PlanQueue(data_dir, config.site).serving() as lock:  # a second server would displace the first at the broker
        session, transport = await _connection(config, data_dir)
        history = open_history(config, in_thread)
        server = _make_server(config, transport, history)
        site = LiveSite(config, server, session, {}, list(expected))
        server.rounds.takes = site.takes
        alone = _require_alone(transport, config.site, session, gives_way=gives_way)
        beside = background(alone, keep_lock(lock), watch_denied(config, server.presence.deny))
        async with transport.running(), history.running(), server.listening(), beside:
            yield site


async def run_at_site(site: LiveSite, plan: Plan, name: str, watcher: Watcher | None = None) -> Sequence[AnyRecord]:
    """Run or resume a plan with devices of a site; return its records.

    Args:
        watcher: If given, devices are waited for before the run begins, at most as long as the plan says. Without one,
            the run waits for its broker and, before its first round, for devices without a limit.

    Raises:
        ConfigError: As `run_plan`; or the server's data do not fit the plan, or the run's folder is in use.
        Unreachable: There is a watcher, and no broker or not enough devices.
    """
    config, server, data_dir = site.config, site.server, Path(site.config.data_dir)
    folder, members = data_dir / name, members_of(config, plan)
    _warn(config, plan, watcher)
    device = _prepare_computing(config, plan)
    _make_folder(data_dir, folder)
    site.members[name] = members
    server.rounds.runs.add(name)
    try:
        with hold_lock(folder) as lock, _unless_begun(folder):
            async with background(keep_lock(lock)):
                if is_empty(folder) and not config.strangers:  # agents of `--local` have been checked with their data
                    await in_thread(partial(require_fitting_data, plan, is_shared=False))
                if watcher:
                    await wait_for_fleet(server, plan, Membership(members), config, watcher.say)
                with closing(await _open_store(data_dir, folder)) as store:
                    log.info("run %s in %s", name, store.folder)
                    await server.reachable()
                    if not watcher and not closed_rounds(store.records()):
                        await wait_without_end(server, plan, Membership(members))
                    async with connect_peers(config, plan, name, store) as neighbours, _report_records(folder, watcher):
                        graph = await in_thread(make_evaluation_graph, plan)
                        await run_plan(
                            *(plan, name, server, store, config.link),
                            started=utc_stamp(),
                            members=members,
                            device=device,
                            graph=graph,
                            neighbours=neighbours,
                        )
                    return store.records()
    finally:
        del site.members[name]
        server.rounds.runs.discard(name)
        site.session.ended = await in_thread(ended_runs, data_dir)


def _make_server(config: ServerConfig, transport: MqttTransport, history: HistoryWriter) -> Server:
    data_dir = Path(config.data_dir)
    window_bytes = config.link.window * config.link.frame_bytes
    server = Server(
        *(config.site, transport, monotonic, in_thread),
        was_run=lambda run: run_exists(data_dir, run),
        broker=transport.connected,
        limits=FloodLimits(window_bytes, transport.closed, transport.most_packet_bytes),
    )
    server.presence.report_listeners.append(history.hear)
    transport.admits = server.flood.admits
    return server


def _warn(config: ServerConfig, plan: Plan, watcher: Watcher | None) -> None:
    """Warn of plan settings without effect."""
    if not config.strangers and (warning := describe_unapplied(plan)):  # to agents of `--local` all of it applies
        if watcher:
            watcher.say(warning)
        else:
            log.warning("%s", warning)


async def _connection(config: ServerConfig, data_dir: Path) -> tuple[Session, MqttTransport]:
    ended_names = await in_thread(ended_runs, data_dir)
    session = Session(data_dir / "session", SERVER, config.site, uuid.uuid4().hex, ended_names)
    transport = MqttTransport(
        config.broker,
        f"{config.site}.{SERVER}",
        session.presence,
        most_packet_bytes=longest_packet(config.link.frame_bytes),
        probe=SessionProbe.of_server(config.site),
    )
    return session, transport


def _prepare_computing(config: ServerConfig, plan: Plan) -> Device:
    """Configure threads and memory of this process; return the device to compute with."""
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    if algorithm.split or algorithm.server:  # it takes steps, whose tensors come again and again
        malloc.tune()
    else:
        malloc.tune_for_frames(config.link.frame_bytes)
    malloc.enable_huge_pages()
    torch.set_num_threads(config.threads or torch.get_num_threads())
    return choose_device(config.trainer.device)


async def _open_store(data_dir: Path, folder: Path) -> SqliteStore:
    """Mark the data folder with this version and open the run's folder, waiting while the disk is full."""
    await retry_write(in_thread, RETRY_S, claim_data_folder, data_dir)
    return await retry_write(in_thread, RETRY_S, SqliteStore, folder)


def _make_folder(data_dir: Path, folder: Path) -> None:
    check_data_folder(data_dir)
    with explain_disk_errors(data_dir):
        folder.mkdir(parents=True, exist_ok=True)
    record_run_order(folder)


async def _require_alone(transport: MqttTransport, site: str, session: Session, *, gives_way: bool) -> None:
    await require_single_server(
        *(transport, site, session.instance), connections=lambda: transport.connections, gives_way=gives_way
    )


@contextmanager
def _unless_begun(folder: Path) -> Iterator[None]:
    """Remove the folder of a run that failed before its first round; logs of a trial on this machine stay."""
    try:
        yield
    except BaseException as error:
        if is_empty(folder) or (isinstance(error, ConfigError) and not has_rounds(folder)):
            _remove_run(folder)
        raise


def _remove_run(folder: Path) -> None:
    if not (folder / LOCAL).is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir() and path.name != LOCAL:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)


@asynccontextmanager
async def _report_records(folder: Path, watcher: Watcher | None) -> AsyncIterator[None]:
    """Pass a run's records to a watcher while the block lasts, and the last ones after it."""
    if watcher is None:
        yield
        return
    finished = asyncio.Event()

    async def show() -> None:
        await follow(folder, watcher.tell)
        finished.set()

    async with background(show()):  # a task group of its own would put the run's errors into a group as well
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_RECORDS_S):
                await finished.wait()
