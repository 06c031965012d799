"""Local trial: private broker, edge server and N device agents as processes."""

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
from edge_server.journal.runs import LOCAL, create_runs_folder, describe_differences, find_run, is_local
from edge_server.plan.data import device_data, planned_data, require_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.emulation import emulated_link, emulated_power
from edge_server.plan.plan import Plan, devices, is_same_plan
from edge_server.rounds.check_data import require_fitting_data
from edge_server.trial.progress import follow
from edge_server.trial.relay import run_relay
from shared import registry
from shared.errors import ConfigError, TaskFailed
from shared.projects.working_folder import active_names
from shared.protocol.topics import check_name
from shared.runtime.logs import last_line
from shared.runtime.processes import terminate
from shared.transport.simulated_link import Rate

log = logging.getLogger(__name__)

SERVER = "edge-server"
PROCESSORS = ("cpu", "cuda", "auto")
MEGA = 1e6


@dataclass(frozen=True)
class Local:
    """Settings of a local trial.

    Attributes:
        data_root: Base of the plan's relative data paths.
        embedded: Use the embedded broker even if mosquitto is installed.
        device: Computing device of server and agents: `cpu`, which reproduces a replay bit by bit, `cuda` or `auto`.
        writes_plan: Whether the plan differs from the file; a server then reads a copy written for it.
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
        """The run's folder."""
        return self.data_dir / self.run

    @property
    def place(self) -> Path:
        """Folder of the processes' files and logs."""
        return self.folder / LOCAL


def prepare_local(  # noqa: PLR0913 - settings of a trial
    plan: Plan,
    run: str,
    *,
    data_root: Path,
    data_dir: Path,
    count: int = 0,
    plan_path: Path | None = None,
    embedded: bool = False,
    device: str = "cpu",
) -> Local:
    """Return a trial on this machine, once its data have been checked.

    Args:
        count: Number of agents; 0 for the plan's devices.
        plan_path: File of the plan; None to write one for the server.

    Raises:
        ConfigError: The plan has no data or no devices, the data do not exist or do not fit, or the name or processor
            is invalid.
    """
    check_name(run, "run")
    if device not in PROCESSORS:
        raise ConfigError(f"device {device!r}: choose {', '.join(PROCESSORS)}")
    planned_data(plan)
    require_data(plan, data_root)
    fleet = devices(plan, count)
    require_fitting_data(plan, fleet, is_shared=True)
    return Local(
        *(plan_path or Path(plan.name), plan, data_root, create_runs_folder(data_dir), run),
        count=len(fleet),
        embedded=embedded,
        device=device,
        writes_plan=plan_path is None,
    )


def require_resumable(data_dir: Path, run: str, plan: Plan) -> None:
    """Refuse to resume a run that is not an unfinished trial of a plan on this machine.

    Raises:
        ConfigError: It has ended, has another plan, or took place with connected devices.
    """
    stored = find_run(data_dir, run)
    if stored.closed:
        raise ConfigError(f"run {run} has ended; choose another name, or none for a new one")
    if not is_local(stored.folder):
        raise ConfigError(f"run {run} took place with connected devices; resume it with `edge-server run`")
    if stored.opened and not is_same_plan(stored.opened.plan, plan):
        changes = describe_differences(stored.opened.plan, plan)
        raise ConfigError(f"run {run} has another plan ({changes}); give that plan, or no name for a new run")


async def run_local(local: Local, tell: Callable[[AnyRecord], None]) -> RunClosed:
    """Run a trial to its end; no process is left when this returns or is cancelled.

    Raises:
        TaskFailed: The server or an agent ended before the run did.
        Unreachable: The broker does not start.
    """
    place = local.place
    place.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(run_private_broker(place, embedded=local.embedded))
        children = {SERVER: await stack.enter_async_context(run_server(local, place, broker))}
        fleet = devices(local.plan, local.count)
        for index, device in enumerate(fleet):
            emulated_broker = await stack.enter_async_context(emulate_link(local.plan, device, broker))
            children[device.name] = await stack.enter_async_context(
                run_agent(local, place, emulated_broker, fleet, index)
            )
        return await until_closed(local.folder, children, tell, place)


async def until_closed(
    folder: Path, children: Mapping[str, Process], tell: Callable[[AnyRecord], None], place: Path
) -> RunClosed:
    """Follow a run until its last record.

    Args:
        children: Processes that must stay alive until then.
        place: Folder of their logs.

    Raises:
        TaskFailed: A process ended early.
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
    log_path = place / f"{name}.log"
    raise TaskFailed(f"{name} ended with exit code {children[name].returncode}: {last_line(log_path)}; see {log_path}")


def run_server(
    local: Local, place: Path, broker: PrivateBroker, peers: Mapping[str, PrivateBroker] | None = None
) -> AbstractAsyncContextManager[Process]:
    """Run the server of a trial.

    Args:
        place: Folder of its files.
        peers: Brokers of the plan's other sites by name; None for a single site.
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
        "trainer": {"device": local.device, "plugins": registry.allowed_entries()},
        "log_level": local.log_level,
    }
    return _run_process(place, SERVER, "edge_server", config)


@asynccontextmanager
async def emulate_link(plan: Plan, device: DevicePlan, broker: PrivateBroker) -> AsyncIterator[PrivateBroker]:
    """Yield the broker as a device reaches it, through its emulated link if the plan asks for that.

    Args:
        device: A device of the plan.
    """
    if not (plan.emulation and plan.emulation.links):
        yield broker
        return
    link = emulated_link(device)
    async with run_relay(broker.port, megabit_rate(link.up_mbit_s, link.down_mbit_s, link.delay_s)) as port:
        yield replace(broker, port=port)


def write_plan(plan: Plan, folder: Path) -> Path:
    """Write a plan with resolved paths to a file for a server; return its path."""
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    return path


def megabit_rate(up_mbit_s: float | None, down_mbit_s: float | None, delay_s: float) -> Rate:
    """Return a link of fixed rates.

    Args:
        up_mbit_s: None for no limit; down as well.
    """
    up, down = (None if rate is None else rate * MEGA for rate in (up_mbit_s, down_mbit_s))
    return Rate(up, down, delay_s)


def run_agent(
    local: Local, place: Path, broker: PrivateBroker, fleet: list[DevicePlan], index: int
) -> AbstractAsyncContextManager[Process]:
    """Run the agent of a fleet's device.

    Args:
        place: Folder of its files.
        index: Of its device in `fleet`.
    """
    device, data = fleet[index], device_data(local.plan, fleet, index)
    if data.path:  # the agent's file lies elsewhere, and its relative paths start there
        data = msgspec.structs.replace(data, path=str(Path(data.path).resolve()))
    config = {
        "device": device.name,
        "site": local.site,
        "state_dir": str((place / device.name).resolve()),
        "data": data,
        "broker": _address(broker),
        "trainer": {
            "threads": 1,
            "device": local.device,
            "plugins": registry.allowed_entries(),
            "projects": active_names(),
        },
        "board": _board(local.plan, device),
        "log_level": local.log_level,
    }
    return _run_process(place, device.name, "device_agent", config)


def _board(plan: Plan, device: DevicePlan) -> dict[str, Any]:
    """Return the agent's power settings: emulated if the plan asks for it, else measured on this machine."""
    watts = emulated_power(device) if plan.emulation and plan.emulation.power else None
    return {"emulated": watts._asdict()} if watts else {}


def _address(broker: PrivateBroker) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": broker.port, "version": 5 if broker.kind == "mosquitto" else 3}


@asynccontextmanager
async def _run_process(place: Path, name: str, module: str, config: dict[str, Any]) -> AsyncIterator[Process]:
    """Run a command in its own session, so that Ctrl-C reaches only this process, which ends it."""
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
