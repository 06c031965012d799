"""A live run in this process: the devices of a site over its broker, until the run's end or a signal."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from edge_server.config import ServerConfig
from edge_server.fleet.history import history_of
from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Muster, devices_of_plan
from edge_server.fleet.single_server import require_single_server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.disk import RETRY_S, persist
from edge_server.journal.records import AnyRecord
from edge_server.journal.runs import exists
from edge_server.plan.plan import Plan
from edge_server.rounds.run import run_plan
from edge_server.trial.progress import follow
from edge_server.trial.wait_for_devices import wait_for_fleet
from shared.protocol.topics import SERVER
from shared.runtime import malloc
from shared.runtime.clock import monotonic, utc_stamp
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import background, in_thread
from shared.runtime.processes import hold_lock
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session

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
        plan: What to do.
        name: The run's.
        watcher: Who watches; then devices are waited for before the run is begun, as long as the plan says and no
            longer. With nobody there, a run waits for its broker for ever, and its rounds are missed without devices.

    Raises:
        ConfigError: As `run_plan`, or the run's folder is in use; or somebody watches, and another
            server was at work at the site before.
        Unreachable: Somebody watches, and there is no broker, or not enough devices.
    """
    malloc.tune()
    malloc.enable_huge_pages()
    if config.threads:
        torch.set_num_threads(config.threads)
    data_dir, folder = Path(config.data_dir), Path(config.data_dir) / name
    members = None if config.strangers else devices_of_plan(plan)
    with explain_disk_errors(data_dir):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder):  # before anything is connected: a second server would throw the first off the broker
        session = Session(data_dir / "session", SERVER, config.site, uuid.uuid4().hex)
        transport = MqttTransport(config.broker, f"{config.site}.{SERVER}", session.presence)
        history = history_of(config, in_thread)
        server = Server(
            *(config.site, transport, monotonic, in_thread),
            keep=[history.hear],
            was_run=lambda run: exists(data_dir, run),
            broker=transport.connected,
        )
        async with (
            transport.running(),
            history.keeping(),
            server.listening(),
            background(require_single_server(transport, config.site, session.instance, gives_way=watcher is not None)),
        ):
            if watcher:
                with _unless_begun(data_dir, name):
                    await wait_for_fleet(server, plan, Muster(members), config, watcher.say)
            with closing(await persist(in_thread, RETRY_S, SqliteStore, folder)) as store:
                log.info("run %s in %s", name, store.folder)
                await server.reachable()
                async with _watched(folder, watcher):
                    await run_plan(plan, name, server, store, config.link, started=utc_stamp(), members=members)
                return store.records()


@contextmanager
def _unless_begun(data_dir: Path, name: str) -> Iterator[None]:
    """Remove the folder of a run that the block let not begin; one that is gone on with stays."""
    try:
        yield
    except BaseException:
        if not exists(data_dir, name):
            shutil.rmtree(data_dir / name, ignore_errors=True)
        raise


@asynccontextmanager
async def _watched(folder: Path, watcher: Watcher | None) -> AsyncIterator[None]:
    """Tell a watcher of a run's records while the block lasts, and of the last ones after it."""
    if watcher is None:
        yield
        return
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow(folder, watcher.tell))
        yield
        await asyncio.wait({following}, timeout=LAST_S)
        following.cancel()
