"""A step of a split session over a slow link against its bytes at the link's rate and its computation. Needs root.

One device in a network namespace, whose link passes 5 Mbit/s each way. A token bucket counts whole packets, of which
the payload gets 95.6 %. Bytes are those of all frames, up and down, with their headers.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

import netns
from fleet import until
from measure import Figure
from resume import Site
from split_run import CORES, agent_keys, alone, carried, median_s, planned, server_keys, steps_s

from edge_server.plan.plan import load

MBIT, STEPS, PATIENCE_S = 5, 6, 900.0
MOST_OFF = "<= 15"


class Shaped(Site):
    """A site whose one board is behind a slow link."""

    def _server(self) -> list[str]:
        return self._ours("edge_server", "server", server_keys(self.folder), self.port)

    def _agent(self, port: int) -> list[str]:
        keys = agent_keys(self.folder, load(self.folder / "plan.toml", self.folder), 0)
        return [*self.prefix, *self._ours("device_agent", "agent", keys, port)]

    def log(self) -> str:
        """Return what the server wrote so far."""
        return (self.folder / "server.log").read_text()


async def shaped(folder: Path) -> tuple[list[float], tuple[float, float]]:
    """Return the seconds of a device's steps behind the link, and the bytes of one, up and down."""
    with netns.slow_link(f"{MBIT}mbit") as link:
        here = Shaped(folder, 20_000 + os.getpid() % 20_000, link.address, link.prefix)
        try:
            for name in ("broker", "server", "agent"):
                await here.start(name, here.port)
                await asyncio.sleep(0.3)
            await until(lambda: "round=1/1" in here.log(), PATIENCE_S)
        finally:
            await here.close()
    return steps_s(here.log()), carried(folder, STEPS)


def run() -> list[Figure]:
    """Measure; nothing where we are not root."""
    if os.geteuid():
        sys.stderr.write("split: network namespaces need root\n")
        return []
    with tempfile.TemporaryDirectory(prefix="split-") as name:
        planned(Path(name), steps=STEPS, count=1)
        taken, (up, down) = asyncio.run(shaped(Path(name)))
        compute_s = median_s([alone(Path(name), 1, CORES)])
    step_s, rate = statistics.median(taken), MBIT * 1e6 * netns.PAYLOAD_SHARE
    ideal_s = (up + down) * 8 / rate + compute_s
    return [
        Figure(f"split step, one device at {MBIT} Mbit/s", step_s, "s"),
        Figure("its bytes, both ways", (up + down) / 1e6, "MB"),
        Figure("its computation in one process", compute_s, "s"),
        Figure("split step beyond bytes / rate + computation", 100 * (step_s / ideal_s - 1), "%", MOST_OFF),
    ]
