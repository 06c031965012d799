"""Cost of measuring for an idle agent: probes, meter and power log."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import fleet
import psutil
from measure import Figure

from device_agent.config import BoardConfig, MeterConfig
from device_agent.measurement.board import load_measuring, open_board
from device_agent.measurement.link_meter import LinkMeter
from device_agent.probes import PROBES
from edge_server.fleet.broker import run_private_broker
from edge_server.fleet.view import watch_site
from shared.errors import NoData
from shared.transport.base import Broker
from tests.device_agent.server_side import plugged

SETTLED_S, WATCHED_S, SAMPLED_S = 10.0, 90.0, 10.0
QUICK_S = 1.0, 3.0, 1.0
REPORT_S = 30.0
TURNS, SITE = 20, "lab"
FAST_HZ = 5.0


async def _waiting(folder: Path, url: str, settled_s: float, watched_s: float) -> tuple[float, float]:
    """Return the share of a core that an agent with a meter takes, children too, and its PSS in MB."""
    async with AsyncExitStack() as stack:
        place = fleet.Place(folder, stack)
        broker = await stack.enter_async_context(run_private_broker(place.path))
        config = {
            "device": "idle",
            "site": SITE,
            "state_dir": str(folder / "state"),
            "data": {"source": "digits"},
            "broker": {"port": broker.port},
            "board": {"meter": {"kind": "shelly", "url": url}},
        }
        async with watch_site(Broker(port=broker.port), SITE) as look:
            pid = await place.configured("agent", "device_agent", config)
            await fleet.until(lambda: "idle" in look.fleet.online, check=place.require_well)
        await asyncio.sleep(settled_s)
        began, before = time.monotonic(), sum(psutil.Process(pid).cpu_times()[:4])
        await asyncio.sleep(watched_s)
        used = sum(psutil.Process(pid).cpu_times()[:4]) - before
        return used / (time.monotonic() - began), fleet.pss(pid) / 1e6


def _probes() -> list[Figure]:
    """Time each probe, and all of them as a report asks them."""
    board = open_board(load_measuring(BoardConfig(), Path("/nowhere")))
    figures, link = [], LinkMeter()
    for name, probe in PROBES.items():
        seconds = []
        for _ in range(TURNS):
            began = time.process_time()
            with suppress(NoData):
                probe(board.root, board.profile, began)
            seconds.append(time.process_time() - began)
        figures.append(Figure(f"probe {name}, CPU", 1e3 * statistics.median(seconds), "ms"))
    began = time.process_time()
    for _ in range(TURNS):
        board.report("idle", link, Path())
    share = (time.process_time() - began) / TURNS / REPORT_S
    return [*figures, Figure("all probes every 30 s", 100 * share, "% of a core", "<= 1")]


def _sampling(url: str, sampled_s: float) -> float:
    """Return the share of a core that the log takes at full rate from a meter."""
    meter = MeterConfig(kind="shelly", url=url, period_s=1 / FAST_HZ)
    board = open_board(load_measuring(BoardConfig(meter=meter), Path("/nowhere")))
    assert board.power is not None
    with board.power, board.power.busy():
        time.sleep(sampled_s)
    return board.power.cpu_s / sampled_s


def run(*, quick: bool = False) -> list[Figure]:
    """Measure all three."""
    settled_s, watched_s, sampled_s = QUICK_S if quick else (SETTLED_S, WATCHED_S, SAMPLED_S)
    sys.stderr.write(f"  an idle agent for {watched_s:.0f} s …\n")
    with tempfile.TemporaryDirectory() as name, plugged(lambda: 4.0) as url:
        share, pss = asyncio.run(_waiting(Path(name), url, settled_s, watched_s))
        sampling = _sampling(url, sampled_s)
    return [
        *_probes(),
        Figure("power log at full rate, a plug", 100 * sampling, "% of a core", "<= 1"),
        Figure("idle agent with a plug, all of it", 100 * share, "% of a core", "<= 1"),
        Figure("idle agent with a plug, PSS", pss, "MB", "<= 42"),
    ]
