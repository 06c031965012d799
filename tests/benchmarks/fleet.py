"""A real fleet on this machine for a benchmark: broker, edge server and agents as processes, an empty training.

From 1 MiB on it is one step on two examples with weight decay, so that every parameter changes every round: what did
not change would not be sent again, and nothing would be measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
from counter import Counted, counting

from edge_server.fleet.broker import free_port, run_private_broker
from edge_server.gateway.state import read_state
from edge_server.journal.records import RoundClosed, closed_rounds
from edge_server.journal.sqlite import JOURNAL, read_records
from shared.runtime.processes import terminate
from shared.transfer.to_file import NOTED_BYTES
from tests.edge_server.gateway.sites import LiveSite, make_site

WARM_UP = 2
SAMPLE_S = 0.1
"""Between two looks at CPU time, each of which costs well below a millisecond."""
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
        cpu_s: CPU seconds of all processes together, a round; None where all were too short to be sampled.
        model_bytes: Size of the parameters.
        idle_bytes: The server's resident memory before the first round.
        peak_bytes: The most it took later.
        broker_bytes: The most that the broker took over idle.
        sent_bytes: What the server sent in the whole run, at its socket.
        rounds: How many there were.
    """

    round_s: list[float]
    cpu_s: float | None
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
        """Sample every 10 ms, until stopped or the process has ended."""
        with suppress(psutil.NoSuchProcess):
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
    processes: dict[str, Process] = field(default_factory=dict)

    async def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> int:
        """Start a process whose output is kept for people; return its pid."""
        output = self.stack.enter_context((self.path / f"{name}.log").open("wb"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
        self.stack.push_async_callback(terminate, process)
        self.pids.append(process.pid)
        self.processes[name] = process
        return process.pid

    async def configured(
        self, name: str, module: str, config: dict[str, object], environment: Mapping[str, str] | None = None
    ) -> int:
        """Start one of our commands on a configuration."""
        path = self.path / f"{name}.json"
        path.write_text(json.dumps(config))
        return await self.start(name, "-m", module, "run", "--config", str(path), environment=environment)

    def require_well(self) -> None:
        """Refuse to go on when a process has ended with an error; the message shows the end of what it wrote."""
        for name, process in self.processes.items():
            if process.returncode:
                wrote = (self.path / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{wrote}")

    def cpu_s(self) -> float:
        """Return CPU seconds of all processes and their children so far."""
        everyone = [one for pid in self.pids for one in (pid, *_children(pid))]
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in everyone)


def _children(pid: int) -> list[int]:
    """Return the children of a process: from its own files, as going through all processes would slow what runs."""
    return [int(one) for each in Path(f"/proc/{pid}/task").glob("*/children") for one in each.read_text().split()]


async def measure(  # noqa: PLR0913 - of what a fleet may be
    *,
    model_bytes: int,
    devices: int,
    rounds: int,
    echo: bool = False,
    memory: bool = False,
    tests: bool = False,
    secured: bool = False,
    server_environment: Mapping[str, str] | None = None,
    keys: str = "",
    prepare: Callable[[Path], None] = lambda _: None,
) -> Run:
    """Run a fleet. Nobody reads its journal before the run has ended, and then the rounds' ends are taken from it.

    Args:
        model_bytes: About how large the model is.
        rounds: How many rounds; the first two are not counted.
        echo: Agents share one process and send back what came, instead of each having a trainer.
        memory: Sample the server's memory, which slows it a little.
        tests: The server evaluates the model after each round.
        secured: By TLS, with certificates and the access list of a site; not of agents in one process.
        keys: Further tables of the plan.
        prepare: Writes the earlier part of the run `bench` into a folder that has the plan.
    """
    hidden = max(1, (model_bytes // 4 - 10) // HIDDEN_PER_PARAMETER)
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="build") as name:
        async with AsyncExitStack() as stack:
            place, port = Place(Path(name).resolve(), stack), free_port()
            epochs = int(model_bytes >= NOTED_BYTES)
            plan = PLAN.format(rounds=rounds, hidden=hidden, devices=devices, epochs=epochs)
            (place.path / "plan.toml").write_text(plan.replace("every = 0", f"every = {int(tests)}") + keys)
            prepare(place.path)
            relay = await stack.enter_async_context(counting(port)) if echo else Counted(port)
            site = make_site(place.path) if secured else None
            known = Known(site) if site else Plain(relay.port)
            server = {
                "plan": "plan.toml",
                "run": "bench",
                "data_dir": str(place.path),
                "threads": 1,
                "site": known.name,
            }
            pid = await place.configured(
                "server",
                "edge_server",
                {**server, "site": known.name, "broker": known.server()},
                server_environment,
            )
            # Its journal is open: from here on it waits for the broker, and has no model yet.
            await until((place.path / "bench" / JOURNAL).exists, check=place.require_well)
            peak = Peak(pid)
            broker_pid = await _broker(stack, place.path, port, site)
            place.pids.append(broker_pid)
            queued = Peak(broker_pid)
            if memory:
                peak.start()
                queued.start()
            await _agents(place, port, devices, known, echo=echo)
            spent = await _to_end(place)
            size = 4 * (hidden * HIDDEN_PER_PARAMETER + 10)
            closed = closed_rounds(read_records(place.path / "bench"))
            _require_whole(closed, rounds, size)
            cpu_s, broker_bytes = _cpu_a_round(spent, closed), queued.most - queued.idle
            return Run(_seconds(closed), cpu_s, size, peak.idle, peak.most, broker_bytes, relay.sent, rounds)


async def _to_end(place: Place, seconds: float = 600.0) -> list[tuple[float, float]]:
    """Wait until the server has ended; return moments of the monotonic clock, and the CPU seconds of all until then."""
    spent: list[tuple[float, float]] = []
    async with asyncio.timeout(seconds):
        while place.processes["server"].returncode is None:
            with suppress(psutil.NoSuchProcess, OSError):  # of a process that ends at this moment
                spent.append((time.monotonic(), place.cpu_s()))
            place.require_well()
            await asyncio.sleep(SAMPLE_S)
    place.require_well()
    return spent


def _cpu_a_round(spent: list[tuple[float, float]], closed: list[RoundClosed]) -> float | None:
    """Return the CPU seconds of a warm round: the records' clock is that of the samples, so rounds can be counted.

    None where all rounds were over between two samples.
    """
    ends = [one.at for one in closed]
    first, last = ends[WARM_UP - 1], ends[-1]
    within = [one for one in spent if first <= one[0] <= last]
    if len(within) < 2:
        return None
    (began, before), (ended, after) = within[0], within[-1]
    done = np.interp([began, ended], ends, range(len(ends)))
    return (after - before) / float(done[1] - done[0])


def _require_whole(closed: list[RoundClosed], rounds: int, size: int) -> None:
    """Refuse a run in which some round's bytes did not all travel: the figures would be of something else."""
    if len(closed) != rounds:
        raise RuntimeError(f"the journal has {len(closed)} of {rounds} rounds")
    for one in closed:
        carried = [*one.bytes_up.values(), *one.bytes_down.values()]
        if one.outcome != "aggregated" or min(carried, default=0) < size:
            raise RuntimeError(f"round {one.round} was {one.outcome} and carried {carried} bytes, not {size}")


@dataclass(frozen=True)
class Plain:
    """A broker that anybody may use."""

    port: int
    name: str = "lab"

    def server(self) -> dict[str, object]:
        """Return the server's `[broker]`."""
        return {"port": self.port}

    def device(self, _name: str) -> dict[str, object]:
        """Return a device's."""
        return {"port": self.port}


@dataclass(frozen=True)
class Known:
    """The broker of a site, which knows everybody by a certificate."""

    site: LiveSite
    name: str = "roof"

    def server(self) -> dict[str, object]:
        """Return the server's `[broker]`."""
        return self._at(read_state(self.site.path).servers_port, self.site.folder.gateway("own-server"))

    def device(self, name: str) -> dict[str, object]:
        """Return a device's, with a new certificate."""
        pair = self.site.enrol(name)
        pair.with_suffix(".key").chmod(0o600)
        return self._at(self.site.door.port, pair)

    def _at(self, port: int, pair: Path) -> dict[str, object]:
        tls = {"ca": str(self.site.folder.ca("root.crt")), "cert": f"{pair}.crt", "key": f"{pair}.key"}
        return {"host": "127.0.0.1", "port": port, "tls": tls}


async def _broker(stack: AsyncExitStack, folder: Path, port: int, site: LiveSite | None) -> int:
    """Start the broker; return its pid."""
    if site is None:
        return (await stack.enter_async_context(run_private_broker(folder, port=port))).process.pid
    await site.start()
    assert site.process
    stack.push_async_callback(site.stop)
    return site.process.pid


async def _agents(place: Place, port: int, devices: int, known: Plain | Known, *, echo: bool) -> None:
    if echo:
        script = str(Path(__file__).with_name("echo_agents.py"))
        await place.start("echo", script, str(port), str(devices), str(place.path / "echo"))
        return
    for index in range(devices):
        config = {
            "device": f"device-{index}",
            "site": known.name,
            "state_dir": str(place.path / f"device-{index}"),
            "data": {"source": "digits", "limit": 2},
            "broker": known.device(f"device-{index}"),
            "trainer": {"threads": 1},
        }
        await place.configured(f"device-{index}", "device_agent", config)


def _seconds(closed: list[RoundClosed]) -> list[float]:
    """Return the seconds from each warm round's end to the next one's."""
    return [later.at - earlier.at for earlier, later in pairwise(closed)][WARM_UP - 1 :]


async def until(
    condition: Callable[[], bool],
    seconds: float = 300.0,
    *,
    check: Callable[[], None] | None = None,
    every_s: float = 0.02,
) -> None:
    """Wait for a condition.

    Args:
        condition: What is waited for.
        check: Raises where it will never come.
        every_s: Seconds between two looks.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            if check:
                check()
            await asyncio.sleep(every_s)
