"""What interruptions cost a 25 MB transfer, in bytes at the device's socket: `python tests/benchmarks/resume.py`.

One device, one round, real processes over mosquitto. At 4 MB/s behind a counting relay: the link breaks, or the agent,
the server or the broker is killed, three times on the way down and three times on the way up. At 0.8 Mbit/s in a
network namespace (token bucket, ten minutes): the link goes away for a second, again and again; needs root.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import netns
from counter import Counted, counting
from rich.console import Console
from rich.table import Table

from edge_server.fleet.broker import find_mosquitto
from shared.transfer.frames import FRAME_BYTES

HIDDEN = 83_300
MODEL_BYTES = 4 * (HIDDEN * 75 + 10)
RATE = 4e6
WINDOW_BYTES = 16 * FRAME_BYTES
SLOW, OUTAGE_S, EVERY_S = "800kbit", 1.0, 20.0
PLAN = f"""
name = "resume"
rounds = 1
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = {{ features = 64, hidden = {HIDDEN}, classes = 10 }}
[hyper]
local_epochs = 1
[cohort]
min_devices = 1
[round]
deadline_s = 3000
[evaluation]
every = 0
[data]
source = "digits"
limit = 64
"""


@dataclass
class Row:
    """One line of the table."""

    case: str
    way: str
    interruptions: int
    carried: int
    seconds: float

    @property
    def windows(self) -> float:
        """Return what was sent beyond the payload, in windows an interruption."""
        return (self.carried - MODEL_BYTES) / WINDOW_BYTES / max(1, self.interruptions)


@dataclass
class Site:
    """Broker, server and agent as processes that can be killed and started again."""

    folder: Path
    port: int
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    processes: dict[str, Process] = field(default_factory=dict)

    async def start(self, name: str, agent_port: int = 0) -> None:
        """Start one of `broker`, `server`, `agent`; its files are written the first time."""
        command = {"broker": self._broker, "server": self._server, "agent": lambda: self._agent(agent_port)}[name]()
        with (self.folder / f"{name}.log").open("ab") as output:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    async def kill(self, name: str) -> None:
        """End one as a power cut does, and start it again."""
        self.processes[name].kill()
        await self.processes[name].wait()
        await self.start(name)

    async def close(self) -> None:
        """End all; what is left of a trainer ends with its agent."""
        for name in ("agent", "server", "broker"):
            if (process := self.processes.get(name)) and process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()

    def _broker(self) -> list[str]:
        path = self.folder / "mosquitto.conf"
        path.write_text(
            f"listener {self.port} {self.address}\nallow_anonymous true\nset_tcp_nodelay true\n"
            "persistence false\nmax_packet_size 8388608\n"
        )
        return [str(find_mosquitto()), "-c", str(path)]

    def _server(self) -> list[str]:
        (self.folder / "plan.toml").write_text(PLAN)
        keys = {"plan": "plan.toml", "site": "lab", "run": "run", "data_dir": str(self.folder), "threads": 1}
        return self._ours("edge_server", "server", keys, self.port)

    def _agent(self, port: int) -> list[str]:
        path = self.folder / "agent.json"
        if path.exists():
            return [*self.prefix, sys.executable, "-m", "device_agent", "run", "--config", str(path)]
        keys = {
            "device": "a",
            "site": "lab",
            "state_dir": str(self.folder / "a"),
            "data": {"source": "digits", "limit": 64},
            "trainer": {"threads": 1},
        }
        return [*self.prefix, *self._ours("device_agent", "agent", keys, port)]

    def _ours(self, module: str, name: str, keys: dict[str, object], port: int) -> list[str]:
        path = self.folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode({**keys, "broker": {"host": self.address, "port": port}}))
        return [sys.executable, "-m", module, "run", "--config", str(path)]


@asynccontextmanager
async def site(port: int, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> AsyncIterator[Site]:
    """Make a folder for a site, with its broker running."""
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        one = Site(Path(name), port, address, prefix)
        try:
            await one.start("broker")
            await asyncio.sleep(0.3)
            yield one
        finally:
            await one.close()


async def broken(case: str, port: int) -> list[Row]:
    """Interrupt a transfer three times each way."""
    async with site(port) as here, counting(port, RATE) as counted:
        await here.start("agent", counted.port)
        await here.start("server")
        rows = []
        for way in ("received", "sent"):
            began = time.monotonic()
            for share in (0.2, 0.5, 0.8):
                await _until(lambda way=way, share=share: getattr(counted, way) > share * MODEL_BYTES)
                await _interrupt(case, here, counted)
            if way == "received":
                await _until(lambda: counted.sent > 1_000_000)  # requests are small: its update is on its way
            else:
                await here.processes["server"].wait()
            rows.append(Row(case, way, 3, getattr(counted, way), time.monotonic() - began))
        return rows


async def _interrupt(case: str, here: Site, counted: Counted) -> None:
    if case == "the link breaks":
        counted.sever()
    else:
        await here.kill(case.split(maxsplit=1)[0])


async def slow(port: int) -> list[Row]:
    """Take the link away for a second, again and again, at 0.8 Mbit/s."""
    async with AsyncExitStack() as stack:
        link = stack.enter_context(netns.slow_link(SLOW))
        here = await stack.enter_async_context(site(port, link.address, link.prefix))
        await here.start("agent", port)
        await here.start("server")
        outages = 0

        async def interrupt() -> None:
            nonlocal outages
            while True:
                await asyncio.sleep(EVERY_S - OUTAGE_S)
                link.set("down")
                await asyncio.sleep(OUTAGE_S)
                link.set("up")
                outages += 1

        cutting = asyncio.create_task(interrupt())
        began, before = time.monotonic(), link.carried()
        await _until(lambda: _is_trained(here), 900)
        half, down, cuts = time.monotonic(), link.carried(), outages
        await asyncio.wait_for(here.processes["server"].wait(), 900)
        up = link.carried()
        cutting.cancel()
        case = f"{SLOW}, gone 1 s of 20"
        return [
            Row(case, "received", cuts, down[0] - before[0], half - began),
            Row(case, "sent", outages - cuts, up[1] - down[1], time.monotonic() - half),
        ]


def _is_trained(here: Site) -> bool:
    """Tell whether an update waits in the board's outbox; one that is still written has a name with a dot before it."""
    return any((here.folder / "a" / "outbox").glob("[!.]*@*"))


async def _until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def main() -> int:
    """Measure all cases, or those whose name holds a word given; exit code 1 if more came than one window each."""
    wanted = sys.argv[1:]
    cases: list[tuple[str, Callable[[], Awaitable[list[Row]]]]] = [
        (case, lambda case=case, port=port: broken(case, port))
        for port, case in enumerate(
            ("the link breaks", "agent is killed", "server is killed", "broker is killed"),
            20_000 + os.getpid() % 20_000,
        )
    ]
    if os.geteuid() == 0:
        cases.append((f"{SLOW}, gone 1 s of 20", lambda: slow(20_010 + os.getpid() % 20_000)))
    table = Table("interruption", "way", "times", "payload MB", "carried MB", "beyond it, windows each", "s", box=None)
    worst = 0.0
    for case, measure in cases:
        if wanted and not any(word in case for word in wanted):
            continue
        sys.stderr.write(f"{case} …\n")
        for row in asyncio.run(measure()):
            worst = max(worst, row.windows)
            table.add_row(
                *(row.case, row.way, str(row.interruptions), f"{MODEL_BYTES / 1e6:.2f}", f"{row.carried / 1e6:.2f}"),
                *(f"{row.windows:.2f}", f"{row.seconds:.1f}"),
            )
    Console(width=110).print(table)
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
