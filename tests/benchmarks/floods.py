"""Effect of one flooding device on ten honest devices and the server's memory.

Each flood begins in the middle of a run, whose rounds before it are what those during it are compared with.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path

import fleet
from flooder import KINDS
from measure import Figure

from edge_server.fleet.broker import free_port, run_private_broker
from edge_server.journal.records import closed_rounds
from edge_server.journal.sqlite import JOURNAL, read_records
from shared.errors import FieldFleetError
from shared.runtime.processes import terminate

DEVICES, MODEL_BYTES = 10, 1_000_000
BEFORE_S, FLOOD_S, AFTER_S = 15.0, 15.0, 60.0
QUICK_S = 2.0
WARM_UP = 3
MOST_RATIO, MOST_GROWTH_MB = "<= 1.5", "<= 64"
MEGA = 1e6


def ends(folder: Path) -> list[float]:
    """Return the moments at which rounds have ended so far."""
    with suppress(FieldFleetError):
        return [one.at for one in closed_rounds(read_records(folder / "bench"))]
    return []


def round_s(moments: list[float], since: float, until: float) -> float:
    """Return the median seconds of the rounds between two moments; all of that time where there was none."""
    within = [moment for moment in moments if since <= moment <= until]
    return statistics.median(later - earlier for earlier, later in pairwise(within)) if within[2:] else until - since


async def flooded(kind: str, *, seconds: float, devices: int) -> list[Figure]:
    """Run a fleet, flood it for a while, and see it recover."""
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="floods-", dir="build") as name:
        async with AsyncExitStack() as stack:
            place, port = fleet.Place(Path(name).resolve(), stack), free_port()
            hidden = MODEL_BYTES // 4 // fleet.HIDDEN_PER_PARAMETER
            plan = fleet.PLAN.format(rounds=1_000_000, hidden=hidden, devices=devices, epochs=0)
            (place.path / "plan.toml").write_text(plan)
            broker = await stack.enter_async_context(run_private_broker(place.path, port=port))
            server = {"plan": "plan.toml", "site": "lab", "run": "bench", "data_dir": str(place.path), "threads": 1}
            pid = await place.configured("server", "edge_server", {**server, "broker": {"port": port}})
            await fleet.until((place.path / "bench" / JOURNAL).exists, check=place.require_well)
            script = str(Path(__file__).with_name("echo_agents.py"))
            await place.start("echo", script, str(port), str(devices), str(place.path / "echo"))
            await fleet.until(lambda: len(ends(place.path)) > WARM_UP, check=place.require_well, every_s=0.5)
            loop = asyncio.get_running_loop()
            began = loop.time()
            calm = fleet.Peak(pid)
            calm.start()
            await asyncio.sleep(seconds)
            calm.stop()
            storm, queue = fleet.Peak(pid), fleet.Peak(broker.process.pid)
            for one in (storm, queue):
                one.start()
            flooding = loop.time()
            await place.start("flood", str(Path(__file__).with_name("flooder.py")), str(port), kind)
            await asyncio.sleep(seconds)
            place.require_well()
            over = loop.time()
            await terminate(place.processes.pop("flood"))
            count = len(ends(place.path))
            with suppress(TimeoutError):
                async with asyncio.timeout(AFTER_S):
                    while len(ends(place.path)) < count + 2:
                        await asyncio.sleep(0.1)
            recovered = loop.time()
            for one in (storm, queue):
                one.stop()
            moments = ends(place.path)
    quiet_s, loud_s = round_s(moments, began, flooding), round_s(moments, flooding, over)
    return [
        Figure(f"round of {devices} before {kind}", quiet_s, "s"),
        Figure(f"round during {kind} over before", loud_s / quiet_s, "x", MOST_RATIO),
        Figure(f"server memory grown by {kind}", (storm.most - calm.most) / MEGA, "MB", MOST_GROWTH_MB),
        Figure(f"broker memory grown by {kind}", (queue.most - queue.idle) / MEGA, "MB"),
        Figure(f"two rounds after {kind} have ended", recovered - over, "s"),
    ]


def run(*, quick: bool = False) -> list[Figure]:
    """Measure each flood; the quick size is the one of small messages, and three devices."""
    if quick:
        return asyncio.run(flooded("small offers", seconds=QUICK_S, devices=3))
    return [row for kind in KINDS for row in asyncio.run(flooded(kind, seconds=FLOOD_S, devices=DEVICES))]
