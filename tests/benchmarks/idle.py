"""An agent that waits: what it takes, how soon it is there, what it has loaded."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import fleet
import psutil
from measure import Figure

from edge_server.fleet.broker import running

TURNS = 5


async def _one() -> tuple[float, float, list[str]]:
    """Return seconds until the agent is connected, its PSS in MB, and heavy libraries it has mapped."""
    with tempfile.TemporaryDirectory() as name:
        async with AsyncExitStack() as stack:
            place = fleet.Place(Path(name), stack)
            broker = await stack.enter_async_context(running(place.path))
            config = {
                "device": "idle",
                "state_dir": name,
                "data": {"source": "digits"},
                "broker": {"port": broker.port},
            }
            (place.path / "agent.json").write_text(json.dumps(config))
            started = time.perf_counter()
            pid = await place.start("agent", "-m", "device_agent", "run", "--config", str(place.path / "agent.json"))
            while "connected" not in place.log("agent"):
                await asyncio.sleep(0.005)
            ready = time.perf_counter() - started
            await asyncio.sleep(1.0)
            mapped = {Path(one.path).name for one in psutil.Process(pid).memory_maps()}
            heavy = [one for one in mapped if one.startswith(("libtorch", "_multiarray_umath", "onnxruntime"))]
            return ready, fleet.pss(pid) / 1e6, heavy


def run() -> list[Figure]:
    """Measure several starts."""
    seen = [asyncio.run(_one()) for _ in range(TURNS)]
    return [
        Figure("idle agent, PSS", statistics.median(pss for _, pss, _ in seen), "MB", "<= 40"),
        Figure("agent started and connected", statistics.median(ready for ready, _, _ in seen), "s", "< 1"),
        Figure("torch, numpy or onnxruntime loaded when idle", max(len(heavy) for *_, heavy in seen), "", "<= 0"),
    ]
