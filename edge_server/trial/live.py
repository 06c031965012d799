"""A live run in this process: the devices of a site over its broker, until the run's end or a signal."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from msgspec import structs

from edge_server.fleet.admission import longest_packet
from edge_server.fleet.broker import describe_exposure
from edge_server.fleet.history import open_history
from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Membership
from edge_server.fleet.single_server import require_single_server
from edge_server.gateway.revocation.denied import watch_denied
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.disk import RETRY_S, persist
from edge_server.journal.records import AnyRecord, closed_rounds
from edge_server.journal.runs import ended_runs, exists, has_rounds, is_empty, note_begun
from edge_server.plan.data_folder import check_data_folder, claim_data_folder
from edge_server.plan.inputs import describe_unapplied
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.rounds.run import run_plan
from edge_server.trial.peers import among_peers, members_of
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

LAST_S = 5.0
"""For the last records to be shown, once the run has ended."""


@dataclass(frozen=True)
class Watcher:
    """Somebody who started a run and waits for it.

    Attributes:
        say: Shows a line while devices are waited for.
        tell: Is told of every record.
    """

    say: Callable[[str], None]
    tell: Callable[[AnyRecord], None]


async def serve(config: ServerConfig, plan: Plan, name: str, watcher: Watcher | None = None) -> list[AnyRecord]:
    """Run a plan, or go on with it, to its end; return its records.

    Args:
        config: The site, its broker, its folders.
        watcher: Who watches; then devices are waited for before the run is begun, as long as the plan says and no
            longer. With nobody there, a run waits for its broker and, before its first round, for devices for ever.

    Raises:
        ConfigError: As `run_plan`, or the run's folder is in use, or a newer version wrote beside it; or somebody
            watches, and another server was at work at the site before.
        Unreachable: Somebody watches, and there is no broker, or not enough devices.
    """
    device = _prepare_computing(config, plan)
    _warn(config, plan, watcher)
    data_dir, folder = Path(config.data_dir), Path(config.data_dir) / name
    members = members_of(config, plan)
    _make(data_dir, folder)
    with hold_lock(folder) as lock, _unless_begun(folder):  # a second server would throw the first off the broker
        session, transport = await _connection(config, data_dir)
        history = open_history(config, in_thread)
        server = Server(
            *(config.site, transport, monotonic, in_thread),
            report_listeners=[history.hear],
            was_run=lambda run: exists(data_dir, run),
            broker=transport.connected,
            takes=Membership(members).takes,
            window_bytes=config.link.window * config.link.frame_bytes,
            closed_topics=transport.closed,
        )
        transport.admits, server.longest_bytes = server.admits, transport.most_packet_bytes
        alone = _require_alone(transport, config.site, session, gives_way=watcher is not None)
        beside = background(alone, keep_lock(lock), watch_denied(config, partial(deny, server)))
        async with transport.running(), history.running(), server.listening(), beside:
            if watcher:
                await wait_for_fleet(server, plan, Membership(members), config, watcher.say)
            with closing(await _open_store(data_dir, folder)) as store:
                log.info("run %s in %s", name, store.folder)
                await server.reachable()
                if not watcher and not closed_rounds(store.records()):
                    await wait_without_end(server, plan, Membership(members))
                async with among_peers(config, plan, name, store) as others, _watched(folder, watcher):
                    us, graph = (plan, name, server, store, config.link), await in_thread(make_evaluation_graph, plan)
                    own = partial(run_plan, *us, started=utc_stamp(), members=members, device=device)
                    await own(graph=graph, neighbours=others)
                return store.records()


def _warn(config: ServerConfig, plan: Plan, watcher: Watcher | None) -> None:
    """Tell of a broker that is open to everybody, and of what the plan says in vain."""
    if told := describe_exposure(config.broker):
        log.warning("%s", told)
    if not config.strangers and (told := describe_unapplied(plan)):  # to agents of `--local` all of it applies
        if watcher:
            watcher.say(told)
        else:
            log.warning("%s", told)


async def deny(server: Server, devices: frozenset[str]) -> None:
    """Hear nothing more of devices that were revoked, and hold them for gone, and their tasks with them."""
    new, server.denied = sorted(devices - server.denied), devices
    for device in new:
        log.warning("device %s was revoked: it takes no part any more, and nothing of it is heard", device)
        if (status := server.fleet.statuses.get(device)) and status.online:
            await server.observe(device, structs.replace(status, online=False))


async def _connection(config: ServerConfig, data_dir: Path) -> tuple[Session, MqttTransport]:
    """Return the server's session and connection, not open yet; say so where anybody may use that broker."""
    ended = await in_thread(ended_runs, data_dir)
    session = Session(data_dir / "session", SERVER, config.site, uuid.uuid4().hex, ended)
    if told := describe_exposure(config.broker):
        log.warning("%s", told)
    known_as, most = (f"{config.site}.{SERVER}", session.presence), longest_packet(config.link.frame_bytes)
    probe = SessionProbe.of_server(config.site)
    return session, MqttTransport(config.broker, *known_as, most_packet_bytes=most, probe=probe)


def _prepare_computing(config: ServerConfig, plan: Plan) -> Device:
    """Have this process compute as its file says; return what with."""
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    if algorithm.split or algorithm.server:  # it takes steps, whose tensors come again and again
        malloc.tune()
    else:
        malloc.tune_for_frames(config.link.frame_bytes)
    malloc.enable_huge_pages()
    torch.set_num_threads(config.threads or torch.get_num_threads())
    return choose_device(config.trainer.device)


async def _open_store(data_dir: Path, folder: Path) -> SqliteStore:
    """Open a run's folder, and before it write down that this version writes there; a full disk is waited for."""
    await persist(in_thread, RETRY_S, claim_data_folder, data_dir)
    return await persist(in_thread, RETRY_S, SqliteStore, folder)


def _make(data_dir: Path, folder: Path) -> None:
    check_data_folder(data_dir)
    with explain_disk_errors(data_dir):
        folder.mkdir(parents=True, exist_ok=True)
    note_begun(folder)


async def _require_alone(transport: MqttTransport, site: str, session: Session, *, gives_way: bool) -> None:
    await require_single_server(
        *(transport, site, session.instance), connections=lambda: transport.connections, gives_way=gives_way
    )


@contextmanager
def _unless_begun(folder: Path) -> Iterator[None]:
    """Remove the folder of a run that the block let not begin, or refused before its first round: nothing is lost."""
    try:
        yield
    except BaseException as error:
        if is_empty(folder) or (isinstance(error, ConfigError) and not has_rounds(folder)):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@asynccontextmanager
async def _watched(folder: Path, watcher: Watcher | None) -> AsyncIterator[None]:
    """Tell a watcher of a run's records while the block lasts, and of the last ones after it."""
    if watcher is None:
        yield
        return
    shown = asyncio.Event()

    async def show() -> None:
        await follow(folder, watcher.tell)
        shown.set()

    async with background(show()):  # a task group of its own would put the run's errors into a group as well
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await shown.wait()
