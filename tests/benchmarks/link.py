"""Link rate measured by the agent against the shaped rate; needs root, four minutes.

An agent without torch in a network namespace, an edge server, mosquitto. A token bucket counts whole packets, so that
of its rate the payload gets 1448 bytes of 1514, which is 95.6 %: that is what an estimate is held against. The rate
steps from 10 to 2 Mbit/s and back by `tc class change`. Last, a payload that takes ten times as long as the keep-alive.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import netns
from link_board import RATES
from measure import Figure, NotRun, told
from resume import Site
from rich.console import Console
from rich.table import Table

from edge_server.journal.records import Joined, Left
from edge_server.journal.sqlite import read_records

RATES_MBIT = 1, 2, 5, 10, 20
ROUNDS, AFTER_STEP, MOST_OFF = 3, 2, "<= 10"
CASES = "steady", "step", "slow"
BEFORE_MBIT, LATER_MBIT = 10, 2
SLOW, SLOW_BYTES, KEEPALIVE_S = "200kbit", 1_200_000, 5
PLAN = """
name = "link"
rounds = {rounds}
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = {{ features = 64, hidden = {hidden}, classes = 10 }}
[cohort]
min_devices = 1
[round]
deadline_s = 600
[evaluation]
every = 0
[data]
source = "digits"
limit = 64
"""


@dataclass
class Echoing(Site):
    """A site whose board trains nothing."""

    plan: str = ""
    keepalive_s: int = 60

    def _server(self) -> list[str]:
        command = super()._server()
        (self.folder / "plan.toml").write_text(self.plan)
        return command

    def _agent(self, port: int) -> list[str]:
        script = str(Path(__file__).with_name("link_board.py"))
        address = [self.address, str(port), str(self.keepalive_s), str(self.folder / "board")]
        return [*self.prefix, sys.executable, script, *address]

    def transfers(self, way: str) -> list[float]:
        """Return the estimate after each transfer, in bits a second; what the board is still writing is left out."""
        path = self.folder / "board" / RATES
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [rate for found, rate in map(json.loads, lines) if found == way]

    def lost(self) -> int:
        """Return how often the board was gone or back, as the run's journal has it."""
        records = read_records(self.folder / "run")
        return sum(isinstance(one, Left) or (isinstance(one, Joined) and one.cause != "connected") for one in records)


@asynccontextmanager
async def site(link: netns.SlowLink, model_bytes: int, rounds: int, keepalive_s: int = 60) -> AsyncIterator[Echoing]:
    """Run broker, board and server while the block lasts."""
    plan = PLAN.format(rounds=rounds, hidden=max(1, (model_bytes // 4 - 10) // 75))
    with tempfile.TemporaryDirectory(prefix="link-") as folder:
        here = Echoing(
            Path(folder), 20_000 + os.getpid() % 20_000, link.address, link.prefix, plan=plan, keepalive_s=keepalive_s
        )
        try:
            for name in ("broker", "agent", "server"):
                await here.start(name, here.port)
                await asyncio.sleep(0.3)
            yield here
        finally:
            await here.close()


@dataclass
class Seen:
    """One line of the table; rates in bits a second."""

    case: str
    payload: float
    up: float
    down: float

    @property
    def off(self) -> float:
        """Return by which share the worse of the two is wrong."""
        return max(abs(self.up / self.payload - 1), abs(self.down / self.payload - 1))


def _payload_rate(mbit: float) -> float:
    return mbit * 1e6 * netns.PAYLOAD_SHARE


async def steady(mbit: int) -> list[Seen]:
    """Three rounds at one rate."""
    with netns.slow_link(f"{mbit}mbit") as link:
        async with site(link, max(500_000, mbit * 150_000), ROUNDS) as here:
            await _until(lambda: len(here.transfers("up")) >= ROUNDS)
            return [Seen(f"{mbit} Mbit/s", _payload_rate(mbit), here.transfers("up")[-1], here.transfers("down")[-1])]


async def step() -> list[Seen]:
    """Three rounds, then two at another rate, then two at the first one again."""
    rows: list[Seen] = []
    with netns.slow_link(f"{BEFORE_MBIT}mbit", changes=True) as link:
        async with site(link, BEFORE_MBIT * 150_000, ROUNDS + 2 * AFTER_STEP) as here:
            done = 0
            for rounds, mbit in ((ROUNDS, BEFORE_MBIT), (AFTER_STEP, LATER_MBIT), (AFTER_STEP, BEFORE_MBIT)):
                link.change(f"{mbit}mbit")
                done += rounds
                await _until(lambda done=done: len(here.transfers("up")) >= done)
                case = f"{'then' if rows else 'HTB,'} {mbit} Mbit/s, {rounds} rounds"
                rows.append(
                    Seen(case, _payload_rate(mbit), here.transfers("up")[done - 1], here.transfers("down")[done - 1])
                )
    return rows


async def slow() -> list[Figure]:
    """Carry a payload each way that takes ten times the keep-alive, in which the connection must not be lost."""
    case = f"{SLOW}, keep-alive {KEEPALIVE_S} s, {SLOW_BYTES / 1e6} MB each way"
    with netns.slow_link(SLOW) as link:
        async with site(link, SLOW_BYTES, 1, KEEPALIVE_S) as here:
            began = time.monotonic()
            await _until(lambda: here.processes["server"].returncode is not None, 300)
            if code := here.processes["server"].returncode:
                raise RuntimeError(f"the round did not end well: the server ended with exit code {code}")
            return [
                Figure(f"{case}: connections lost", here.lost(), "", "<= 0"),
                Figure(f"{case}: the round", time.monotonic() - began, "s"),
            ]


async def _until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def run(wanted: Sequence[str] = CASES, *, quick: bool = False) -> list[Figure | NotRun]:
    """Measure the cases named; quickly the fastest link alone."""
    if reason := netns.lack():
        return [NotRun("link", reason)]
    if quick:
        wanted = CASES[:1]
    rows: list[Seen] = []
    rates = RATES_MBIT[-1:] if quick else RATES_MBIT
    for mbit in rates if "steady" in wanted else ():
        rows += asyncio.run(steady(mbit))
    if "step" in wanted:
        rows += asyncio.run(step())
    table = Table("shaped to", "payload Mbit/s", "up Mbit/s", "down Mbit/s", "off %", box=None)
    for row in rows:
        rates = (f"{rate / 1e6:.3f}" for rate in (row.payload, row.up, row.down))
        table.add_row(row.case, *rates, f"{100 * row.off:.1f}")
    Console(width=110).print(table)
    figures = [Figure(f"link, {row.case}: the worse of both ways off by", 100 * row.off, "%", MOST_OFF) for row in rows]
    return figures + (asyncio.run(slow()) if "slow" in wanted else [])


def main() -> int:
    """Measure the cases named, or all; exit code 1 if a target is missed."""
    return told(run(sys.argv[1:] or CASES))


if __name__ == "__main__":
    sys.exit(main())
