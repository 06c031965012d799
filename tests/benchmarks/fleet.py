"""A real fleet on this machine for a benchmark: broker, edge server and agents as processes, an empty training.

From 1 MiB on it is one step on two examples with weight decay, so that every parameter changes every round: what did
not change would not be sent again, and nothing would be measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tempfile
import threading
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
from counter import Counted, counting

from edge_server.fleet.broker import end, running
from edge_server.journal.records import closed_rounds
from edge_server.journal.sqlite import read
from shared.transfer.to_file import NOTED_BYTES

ROUND_LINE = re.compile(r"^(\S+)Z INFO edge_server.rounds.run round=", re.MULTILINE)
WARM_UP = 2
HIDDEN_PER_PARAMETER = 64 + 1 + 10
PLAN = """
name = "bench"
rounds = {rounds}
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = {{ features = 64, hidden = {hidden}, classes = 10 }}
[hyper]
local_epochs = {epochs}
weight_decay = 0.01
[cohort]
min_devices = {devices}
[evaluation]
every = 0
[data]
source = "digits"
"""


@dataclass
class Run:
    """What one fleet's run took.

    Attributes:
        round_s: Seconds from one round's end to the next one's, warm rounds only.
        cpu_s: CPU seconds of all processes together, a round.
        model_bytes: Size of the parameters.
        idle_bytes: The server's resident memory before the first round.
        peak_bytes: The most it took later.
        broker_bytes: The most that the broker took over idle.
        sent_bytes: What the server sent in the whole run, at its socket.
        rounds: How many there were.
    """

    round_s: list[float]
    cpu_s: float
    model_bytes: int
    idle_bytes: int
    peak_bytes: int
    broker_bytes: int
    sent_bytes: int
    rounds: int

    @property
    def median_s(self) -> float:
        """Return the median round."""
        return statistics.median(self.round_s)

    @property
    def peak_models(self) -> float:
        """Return the server's memory over idle, in model sizes."""
        return (self.peak_bytes - self.idle_bytes) / self.model_bytes


class Peak(threading.Thread):
    """Samples a process's memory until stopped: resident bytes, which other processes do not change as they do PSS."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._stopped = psutil.Process(pid), threading.Event()
        self.idle = self.most = self._process.memory_info().rss

    def run(self) -> None:
        """Sample every 10 ms."""
        while not self._stopped.wait(0.01):
            self.most = max(self.most, self._process.memory_info().rss)

    def stop(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self.join()


def pss(pid: int) -> int:
    """Return a process's proportional set size, in bytes."""
    return int(psutil.Process(pid).memory_full_info().pss)


@dataclass
class Place:
    """A folder, and the processes that run in it."""

    path: Path
    stack: AsyncExitStack
    pids: list[int] = field(default_factory=list)

    async def start(self, name: str, *command: str) -> int:
        """Start a process whose output is kept; return its pid."""
        output = self.stack.enter_context((self.path / f"{name}.log").open("wb"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=DEVNULL, stdout=output, stderr=output
        )
        self.stack.push_async_callback(end, process)
        self.pids.append(process.pid)
        return process.pid

    async def configured(self, name: str, module: str, config: dict[str, object]) -> int:
        """Start one of our commands on a configuration."""
        path = self.path / f"{name}.json"
        path.write_text(json.dumps(config))
        return await self.start(name, "-m", module, "run", "--config", str(path))

    def log(self, name: str) -> str:
        """Return what a process wrote so far."""
        return (self.path / f"{name}.log").read_text()

    def cpu_s(self) -> float:
        """Return CPU seconds of all processes and their children so far."""
        everyone = [one for pid in self.pids for one in (psutil.Process(pid), *psutil.Process(pid).children())]
        return sum(sum(one.cpu_times()[:2]) for one in everyone)


async def measure(*, model_bytes: int, devices: int, rounds: int, echo: bool = False, memory: bool = False) -> Run:
    """Run a fleet.

    Args:
        model_bytes: About how large the model is.
        devices: How many agents.
        rounds: How many rounds; the first two are not counted.
        echo: Agents share one process and send back what came, instead of each having a trainer.
        memory: Sample the server's memory, which slows it a little.
    """
    hidden = max(1, (model_bytes // 4 - 10) // HIDDEN_PER_PARAMETER)
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="build") as name:
        async with AsyncExitStack() as stack:
            place = Place(Path(name).resolve(), stack)
            epochs = int(model_bytes >= NOTED_BYTES)
            plan = PLAN.format(rounds=rounds, hidden=hidden, devices=devices, epochs=epochs)
            (place.path / "plan.toml").write_text(plan)
            broker = await stack.enter_async_context(running(place.path))
            place.pids.append(broker.process.pid)
            relay = await stack.enter_async_context(counting(broker.port)) if echo else Counted(broker.port)
            server = {"plan": "plan.toml", "run": "bench", "data_dir": str(place.path), "threads": 1}
            pid = await place.configured("server", "edge_server", {**server, "broker": {"port": relay.port}})
            await until(lambda: "INFO edge_server.cli.commands run " in place.log("server"))
            peak, queued = Peak(pid), Peak(broker.process.pid)
            if memory:
                peak.start()
                queued.start()
            await _agents(place, broker.port, devices, echo=echo)
            await until(lambda: len(ROUND_LINE.findall(place.log("server"))) > WARM_UP)
            began, cpu = len(ROUND_LINE.findall(place.log("server"))), place.cpu_s()
            await until(lambda: len(ROUND_LINE.findall(place.log("server"))) >= rounds - 1)
            cpu = (place.cpu_s() - cpu) / (rounds - 1 - began)
            if memory:
                peak.stop()
                queued.stop()
            await until(lambda: f"round={rounds}/" in place.log("server"))
            size = 4 * (hidden * HIDDEN_PER_PARAMETER + 10)
            _require_whole(place.path / "bench", size)
            broker_bytes = queued.most - queued.idle
            return Run(_rounds(place.log("server")), cpu, size, peak.idle, peak.most, broker_bytes, relay.sent, rounds)


def _require_whole(run: Path, size: int) -> None:
    """Refuse a run in which some round's bytes did not all travel: the figures would be of something else."""
    for closed in closed_rounds(read(run)):
        carried = [*closed.bytes_up.values(), *closed.bytes_down.values()]
        if closed.outcome != "aggregated" or min(carried) < size:
            raise RuntimeError(f"round {closed.round} was {closed.outcome} and carried {carried} bytes, not {size}")


async def _agents(place: Place, port: int, devices: int, *, echo: bool) -> None:
    if echo:
        script = str(Path(__file__).with_name("echo_agents.py"))
        await place.start("echo", script, str(port), str(devices), str(place.path / "echo"))
        return
    for index in range(devices):
        config = {
            "device": f"device-{index}",
            "state_dir": str(place.path / f"device-{index}"),
            "data": {"source": "digits", "limit": 2},
            "broker": {"port": port},
            "trainer": {"threads": 1},
        }
        await place.configured(f"device-{index}", "device_agent", config)


def _rounds(log: str) -> list[float]:
    times = [datetime.fromisoformat(stamp).timestamp() for stamp in ROUND_LINE.findall(log)]
    return [later - earlier for earlier, later in pairwise(times)][WARM_UP - 1 :]


async def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
