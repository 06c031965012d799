"""Processes of a local site that can be killed and restarted in place."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from edge_server.fleet.broker import PrivateBroker, free_port, run_private_broker
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import devices
from edge_server.plan.sites import devices_by_site
from edge_server.trial.chaos.log_reader import Logs
from edge_server.trial.chaos.mark import Kind
from edge_server.trial.local import SERVER, Local, emulate_link, run_agent, run_server
from edge_server.trial.local_sites import emulate_backhaul
from shared.errors import Unreachable
from shared.runtime.processes import kill

ATTEMPTS = 5
GONE_S, POLL_S = 20.0, 0.002
BROKER = "broker"
TRAINER = "device_agent.trainer.main"
MODULES = ("edge_server", "device_agent", TRAINER)


class SiteProcess:
    """A process that can be killed and restarted."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Process]]) -> None:
        self._begin, self._stack = begin, AsyncExitStack()
        self._process: Process | None = None

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def start(self) -> None:
        """Start it, after ending a previous instance."""
        await self.close()
        self._process = await self._stack.enter_async_context(self._begin())

    async def kill(self) -> bool:
        """Kill it as a power cut does; return whether it was running."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        await kill(process)
        return True

    async def close(self) -> None:
        """End it gracefully if it runs."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()


@dataclass
class Site:
    """A broker, a server and a fleet of agents with their trainers. Use it as `async with Site(...).living()`.

    Attributes:
        place: Folder of its processes' files.
        peers: Other sites of its plan.
        devices: Names of its devices.
        parts: Processes by name; trainers belong to the agents.
        broker: Address of the current or last broker.
    """

    local: Local
    place: Path
    peers: list[Site] = field(default_factory=list, repr=False)
    devices: list[str] = field(init=False)
    logs: Logs = field(init=False)
    parts: dict[str, SiteProcess] = field(init=False)
    _port: int = field(default_factory=free_port)
    broker: PrivateBroker | None = None

    def __post_init__(self) -> None:
        """Create the processes without starting them."""
        sites, names = self.local.plan.sites, [device.name for device in self._fleet]
        self.devices = list(devices_by_site(sites, names)[self.local.site]) if sites else names
        self.logs = Logs(self.place, [SERVER, *self.devices])
        self.parts = {BROKER: SiteProcess(self._run_broker), SERVER: SiteProcess(self._run_server)}
        self.parts |= {name: SiteProcess(partial(self._run_agent, names.index(name))) for name in self.devices}

    @property
    def _fleet(self) -> list[DevicePlan]:
        return devices(self.local.plan, self.local.count)

    @asynccontextmanager
    async def living(self) -> AsyncIterator[Site]:
        """Run the broker and the agents while the block lasts; no process of the site is left afterwards."""
        self.place.mkdir(parents=True)
        try:
            for name in (BROKER, *self.devices):
                await self.start(name)
            yield self
        finally:
            for name in (SERVER, *self.devices, BROKER):
                await self.parts[name].close()

    async def start(self, name: str) -> None:
        """Start a process; the broker several times if a passing socket holds its port."""
        if name != BROKER:
            self.logs.began("server" if name == SERVER else "agent", name)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self.parts[name].start()
            except Unreachable:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(1.0)
            else:
                return

    async def serve(self, run: str) -> None:
        """Start the server on another run of the plan."""
        self.local = replace(self.local, run=run)
        await self.start(SERVER)

    async def kill(self, kind: Kind, name: str, within: str = "") -> bool:
        """Kill a process and wait for its end; return whether it was running.

        Args:
            name: Its name; for a trainer, its device.
            within: Phase in which it must be, or it survives; empty for any.
        """
        trainer = running_trainer(self.logs.pids.get(name, 0), self._home(name)) if kind == "trainer" else None
        pid = trainer.pid if trainer else self.parts[name].pid if kind != "trainer" else 0
        if not pid or (within and not await self._is_held(pid, kind, name, within)):
            return False
        if trainer is None:
            return await self.parts[name].kill()
        with suppress(psutil.NoSuchProcess):
            trainer.kill()
        async with asyncio.timeout(GONE_S):
            while _is_alive(trainer):  # noqa: ASYNC110 - no child of ours
                await asyncio.sleep(POLL_S)
        return True

    async def _is_held(self, pid: int, kind: Kind, name: str, within: str) -> bool:
        """Stop a process if it is in a phase, however short; let it continue otherwise."""
        try:
            process = psutil.Process(pid)
            process.suspend()
            async with asyncio.timeout(GONE_S):
                while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            self.logs.news()
            if self.logs.phase(kind, name) == within:
                return True
            process.resume()
        except psutil.NoSuchProcess:
            pass
        return False

    def _home(self, name: str) -> Path:
        return (self.place / name).resolve()

    @asynccontextmanager
    async def _run_server(self) -> AsyncIterator[Process]:
        assert self.broker
        async with AsyncExitStack() as stack:
            peers = {
                peer.local.site: await stack.enter_async_context(emulate_backhaul(self.local.plan, peer.broker))
                for peer in self.peers
                if peer.broker
            }
            yield await stack.enter_async_context(run_server(self.local, self.place, self.broker, peers))

    @asynccontextmanager
    async def _run_agent(self, index: int) -> AsyncIterator[Process]:
        assert self.broker
        fleet = self._fleet
        async with (
            emulate_link(self.local.plan, fleet[index], self.broker) as emulated_broker,
            run_agent(self.local, self.place, emulated_broker, fleet, index) as process,
        ):
            yield process

    @asynccontextmanager
    async def _run_broker(self) -> AsyncIterator[Process]:
        async with run_private_broker(self.place, port=self._port, embedded=self.local.embedded) as self.broker:
            yield self.broker.process


def running_trainer(pid: int, home: Path) -> psutil.Process | None:
    """Return the trainer of a device if the process id is still its own."""
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
    except psutil.Error:
        return None
    return process if TRAINER in command and any(argument.startswith(f"{home}/") for argument in command) else None


def _is_alive(process: psutil.Process) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def sweep(folder: Path) -> list[int]:
    """Kill the remaining processes of a site, such as trainers of killed agents; return their process ids."""
    swept = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        is_ours = "-m" in command and any(module in command for module in MODULES)
        is_ours |= str(folder / "mosquitto.conf") in command
        if is_ours and process.pid != os.getpid() and any(argument.startswith(f"{folder}/") for argument in command):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                swept.append(process.pid)
    return swept
