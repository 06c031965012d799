"""Measure an agent that waits: its memory, how soon it is connected, which heavy libraries it has loaded."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from subprocess import PIPE

import fleet
import psutil
from measure import Figure

from edge_server.fleet.broker import run_private_broker
from edge_server.fleet.view import watch_site
from shared.transport.base import Broker

TURNS, SITE = 5, "lab"
LIBRARIES = "import asyncio, ssl, msgspec, paho.mqtt.client; print(flush=True); input()"
"""What any agent that speaks MQTT over TLS has loaded before the first line of ours."""


def _pss_alone(process: psutil.Process) -> int:
    """Return the PSS in bytes that a process has where no other one runs this Python, as on a board.

    The benchmark runs the same Python: pages that both have loaded would count by half.
    """
    ours = (sys.prefix, sys.base_prefix)
    return sum(one.rss if one.path.startswith(ours) else one.pss for one in process.memory_maps())


def _libraries_mb() -> float:
    """Return the PSS in MB of a process that imports the libraries which an agent cannot do without, and waits."""
    command = [sys.executable, "-I", "-c", LIBRARIES]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pss = _pss_alone(psutil.Process(process.pid))
        process.communicate(b"\n")
    return pss / 1e6


async def _one() -> tuple[float, float, list[str]]:
    """Return seconds until the broker tells that the agent is there, its PSS in MB, heavy libraries it has mapped."""
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            place = fleet.Place(Path(name), stack)
            broker = await stack.enter_async_context(run_private_broker(place.path))
            config = {
                "device": "idle",
                "site": SITE,
                "state_dir": name,
                "data": {"source": "digits"},
                "broker": {"port": broker.port},
            }
            look = await stack.enter_async_context(watch_site(Broker(port=broker.port), SITE))
            started = time.perf_counter()
            pid = await place.configured("agent", "device_agent", config)
            await fleet.until(lambda: "idle" in look.fleet.online, check=place.require_well, every_s=0.005)
            ready = time.perf_counter() - started
            await asyncio.sleep(1.0)
            process = psutil.Process(pid)
            mapped = {Path(one.path).name for one in process.memory_maps()}
            heavy = [one for one in mapped if one.startswith(("libtorch", "_multiarray_umath", "onnxruntime"))]
            return ready, _pss_alone(process) / 1e6, heavy


def run(*, quick: bool = False) -> list[Figure]:
    """Measure several starts."""
    seen = [asyncio.run(_one()) for _ in range(1 if quick else TURNS)]
    libraries = _libraries_mb()
    idle = statistics.median(pss for _, pss, _ in seen)
    return [
        Figure("idle agent, PSS without other Pythons", idle, "MB"),
        Figure("asyncio, ssl, msgspec and paho-mqtt alone, likewise", libraries, "MB"),
        Figure("idle agent over these libraries", idle / libraries, "x", "<= 1.3"),
        Figure("agent started and connected", statistics.median(ready for ready, _, _ in seen), "s", "< 1"),
        Figure("torch, numpy or onnxruntime loaded when idle", max(len(heavy) for *_, heavy in seen), "", "<= 0"),
    ]
