"""Split step over a slow link against transfer and computation time; needs root.

One device in a network namespace, whose link passes 5 Mbit/s each way. A token bucket counts whole packets, of which
the payload gets 95.6 %. Bytes are those of all frames, up and down, with their headers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from pathlib import Path

import netns
from measure import Figure, NotRun, Row
from resume import Site
from split_run import CORES, QUICK, Size, agent_keys, alone, carried, median_s, planned, server_keys, steps_s

from edge_server.rounds.check_plan import load

SIZE = Size(steps=4)
MBIT, PATIENCE_S = 5, 900.0
MOST_OFF = "<= 15"


class Shaped(Site):
    """A site whose one board is behind a slow link."""

    def _server(self) -> list[str]:
        return self._ours("edge_server", "server", server_keys(self.folder), self.port)

    def _agent(self, port: int) -> list[str]:
        keys = agent_keys(self.folder, load(self.folder / "plan.toml", self.folder), 0)
        return [*self.prefix, *self._ours("device_agent", "agent", keys, port)]


async def shaped(folder: Path, size: Size) -> tuple[list[float], tuple[float, float]]:
    """Return the mean seconds of a device's steps behind the link, and the bytes of one, up and down."""
    with netns.slow_link(f"{MBIT}mbit") as link:
        here = Shaped(folder, 20_000 + os.getpid() % 20_000, link.address, link.prefix)
        try:
            for name in ("broker", "server", "agent"):
                await here.start(name, here.port)
                await asyncio.sleep(0.3)
            code = await asyncio.wait_for(here.processes["server"].wait(), PATIENCE_S)
        finally:
            await here.close()
    if code:
        raise RuntimeError(f"the server ended with exit code {code}")
    return steps_s(folder, size.steps), carried(folder, size.steps)


def run(*, quick: bool = False) -> list[Row]:
    """Measure, where a link can be shaped."""
    if reason := netns.lack():
        return [NotRun("split, behind a slow link", reason)]
    size = QUICK if quick else SIZE
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), size, count=1)
        taken, (up, down) = asyncio.run(shaped(Path(name), size))
        compute_s = median_s([alone(Path(name), 1, CORES)])
    step_s, rate = statistics.median(taken), MBIT * 1e6 * netns.PAYLOAD_SHARE
    ideal_s = (up + down) * 8 / rate + compute_s
    return [
        Figure(f"split step, one device at {MBIT} Mbit/s", step_s, "s"),
        Figure("its bytes, both ways", (up + down) / 1e6, "MB"),
        Figure("its computation in one process", compute_s, "s"),
        Figure("split step beyond bytes / rate + computation", 100 * (step_s / ideal_s - 1), "%", MOST_OFF),
    ]
