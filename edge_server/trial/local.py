"""A live trial on this machine: a private broker, one edge server and N device agents, each its own process."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from edge_server.fleet.broker import PrivateBroker, run_private_broker
from edge_server.journal.records import AnyRecord, RunClosed
from edge_server.journal.runs import LOCAL
from edge_server.plan.devices import DevicePlan
from edge_server.plan.emulation import emulated_link, emulated_power
from edge_server.plan.plan import Plan, devices, share
from edge_server.trial.progress import follow
from edge_server.trial.relay import relaying
from shared import registry
from shared.errors import TaskFailed
from shared.runtime.logs import last_line
from shared.runtime.processes import terminate
from shared.transport.simulated_link import Rate

log = logging.getLogger(__name__)

SERVER = "edge-server"
MEGA = 1e6


@dataclass(frozen=True)
class Local:
    """Where and how a local trial runs.

    Attributes:
        data_root: Where relative data paths of the plan start.
        embedded: Use the embedded broker even where mosquitto is installed.
        log_level: What the processes write into their logs.
        device: What server and agents compute with: `cpu`, which gives the bits of a replay, `cuda` or `auto`.
        writes_plan: Whether the plan is not that of the file: servers then read one that is written for them.
    """

    plan_path: Path
    plan: Plan
    data_root: Path
    data_dir: Path
    run: str
    count: int
    site: str = "lab"
    embedded: bool = False
    log_level: str = "info"
    device: str = "cpu"
    writes_plan: bool = False

    @property
    def folder(self) -> Path:
        """Where this trial's files lie: the run's own folder."""
        return self.data_dir / self.run

    @property
    def place(self) -> Path:
        """Where those of its processes lie."""
        return self.folder / LOCAL


async def run_local(local: Local, tell: Callable[[AnyRecord], None]) -> RunClosed:
    """Run a trial to its end; every process is gone when this returns or is cancelled.

    Raises:
        TaskFailed: The server or an agent ended before the run did.
        Unreachable: The broker does not start.
    """
    place = local.place
    place.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(run_private_broker(place, embedded=local.embedded))
        children = {SERVER: await stack.enter_async_context(server(local, place, broker))}
        fleet = devices(local.plan, local.count)
        for index, device in enumerate(fleet):
            reached = await stack.enter_async_context(emulated(local.plan, device, broker))
            children[device.name] = await stack.enter_async_context(agent(local, place, reached, fleet, index))
        return await until_closed(local.folder, children, tell, place)


async def until_closed(
    folder: Path, children: Mapping[str, Process], tell: Callable[[AnyRecord], None], place: Path
) -> RunClosed:
    """Follow a run until its last record.

    Args:
        children: The processes that it needs until then.
        tell: Is told of every record.
        place: Where their logs lie.

    Raises:
        TaskFailed: One of them ended before.
    """
    following = asyncio.create_task(follow(folder, tell), name="follow")
    deaths = {asyncio.create_task(child.wait(), name=name): name for name, child in children.items()}
    try:
        await asyncio.wait({following, *deaths}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            async with asyncio.timeout(1):  # the server ends as soon as it has written the run's last record
                await asyncio.wait({following})
        if following.done():
            return following.result()
    except TimeoutError:
        pass
    finally:
        for task in (following, *deaths):
            task.cancel()
        await asyncio.gather(following, *deaths, return_exceptions=True)
    name = next(name for name, child in children.items() if child.returncode is not None)
    said = place / f"{name}.log"
    raise TaskFailed(f"{name} ended with exit code {children[name].returncode}: {last_line(said)}; see {said}")


def server(
    local: Local, place: Path, broker: PrivateBroker, peers: Mapping[str, PrivateBroker] | None = None
) -> AbstractAsyncContextManager[Process]:
    """Run the server of a trial; its files lie in `place`.

    Args:
        place: Folder of its files.
        peers: Those of the other sites of its plan; None where it has one.
    """
    config = {
        "plan": str((write_plan(local.plan, place) if local.writes_plan else local.plan_path).resolve()),
        "run": local.run,
        "site": local.site,
        "data_dir": str(local.data_dir.resolve()),
        "data_root": str(local.data_root.resolve()),
        "broker": _address(broker),
        "peer": [{"site": site, "broker": _address(other)} for site, other in (peers or {}).items()],
        "strangers": True,  # every agent is ours, also those beyond the plan's own
        "threads": 1,
        "trainer": {"device": local.device},
        "models": registry.allowed_entries(),
        "log_level": local.log_level,
    }
    return _child(place, SERVER, "edge_server", config)


@asynccontextmanager
async def emulated(plan: Plan, device: DevicePlan, broker: PrivateBroker) -> AsyncIterator[PrivateBroker]:
    """Yield the broker as a device reaches it: behind the device's link, where the plan has agents held to that.

    Args:
        device: One of its devices.
    """
    if not (plan.emulation and plan.emulation.links):
        yield broker
        return
    link = emulated_link(device)
    async with relaying(broker.port, megabit_rate(link.up_mbit_s, link.down_mbit_s, link.delay_s)) as port:
        yield replace(broker, port=port)


def write_plan(plan: Plan, folder: Path) -> Path:
    """Write a plan, its paths placed, as a file that a server reads; return its path."""
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    return path


def megabit_rate(up_mbit_s: float | None, down_mbit_s: float | None, delay_s: float) -> Rate:
    """Return what a link of fixed rates does to bytes.

    Args:
        up_mbit_s: None for no limit.
    """
    up, down = (None if one is None else one * MEGA for one in (up_mbit_s, down_mbit_s))
    return Rate(up, down, delay_s)


def agent(
    local: Local, place: Path, broker: PrivateBroker, fleet: list[DevicePlan], index: int
) -> AbstractAsyncContextManager[Process]:
    """Run the agent of a fleet's device; its files lie in `place`.

    Args:
        place: Folder of its files.
        index: Of the one that this agent is.
    """
    device, data = fleet[index], share(local.plan, fleet, index)
    if data.path:  # the agent's file lies elsewhere, and its relative paths start there
        data = msgspec.structs.replace(data, path=str(Path(data.path).resolve()))
    config = {
        "device": device.name,
        "site": local.site,
        "state_dir": str((place / device.name).resolve()),
        "data": data,
        "broker": _address(broker),
        "trainer": {"threads": 1, "device": local.device, "models": registry.allowed_entries()},
        "board": _board(local.plan, device),
        "log_level": local.log_level,
    }
    return _child(place, device.name, "device_agent", config)


def _board(plan: Plan, device: DevicePlan) -> dict[str, Any]:
    """Return how an agent measures: by this machine, or by the power that its device draws, where the plan says so."""
    watts = emulated_power(device) if plan.emulation and plan.emulation.power else None
    return {"emulated": watts._asdict()} if watts else {}


def _address(broker: PrivateBroker) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": broker.port, "version": 5 if broker.kind == "mosquitto" else 3}


@asynccontextmanager
async def _child(place: Path, name: str, module: str, config: dict[str, Any]) -> AsyncIterator[Process]:
    """Run a command of ours as a process of its own session, so that Ctrl-C reaches us alone and we end it."""
    path = place / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    with (place / f"{name}.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "run", "--config", str(path)),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await terminate(process, patience_s=10.0)
