"""Cost of certificates and access list: rounds with and without, and reconnection.

Run as `python tls.py FOLDER FIRST COUNT` it is so many boards in one process, which say that they are there.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import fleet
import msgspec
from measure import Figure

from edge_server.gateway.state import read_state
from shared.protocol.topics import ANY, ROOT, topic
from shared.runtime.processes import terminate
from shared.transport.base import Broker, Presence
from shared.transport.mqtt import MqttTransport
from tests.edge_server.gateway.sites import LiveSite, make_site

SIZES = ((4_000, "4kB", 60), (25_000_000, "25MB", 14))
TARGET = {"25MB": "<= 1.25"}
TURNS, QUICK_ROUNDS = 3, 12
BOARDS, QUICK_BOARDS, PROCESS_BOARDS = 200, 8, 50
DOWN_S, GUARD_S, LOOK_S = 1.0, 120.0, 0.01


def run(*, quick: bool = False) -> list[Figure]:
    """Measure rounds of two sizes with two agents, and how fast boards are back after their broker was killed."""
    figures: list[Figure] = []
    for size, name, rounds in [(*SIZES[0][:2], QUICK_ROUNDS)] if quick else SIZES:
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(1 if quick else TURNS):
            for secured in taken:
                done = asyncio.run(fleet.measure(model_bytes=size, devices=2, rounds=rounds, secured=secured))
                taken[secured] += done.round_s
        plain_s, secured_s = statistics.median(taken[False]), statistics.median(taken[True])
        figures += [
            Figure(f"round {name} without TLS", plain_s, "s"),
            Figure(f"round {name} with TLS", secured_s, "s"),
            Figure(f"round {name} with TLS over without", secured_s / plain_s, "x", TARGET.get(name, "")),
        ]
    boards = QUICK_BOARDS if quick else BOARDS
    back_s, lag_s = asyncio.run(reconnect(boards))
    return [
        *figures,
        Figure(f"{boards} boards back by TLS after a broker's restart", back_s, "s", "<= 10"),
        Figure("longest that the server's account waited for its loop or the broker meanwhile", lag_s, "s", "<= 1"),
    ]


async def reconnect(boards: int) -> tuple[float, float]:
    """Kill a site's broker under its boards and start it again.

    Returns:
        Seconds from its start until all are heard again, and the longest wait of a client that is the server.
    """
    Path("build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="build") as name:
        async with AsyncExitStack() as stack:
            site = make_site(Path(name).resolve())
            known = fleet.Known(site)
            told = [known.device(f"board-{index}") for index in range(boards)]
            (site.path / "boards.json").write_text(json.dumps(told))
            server = MqttTransport(msgspec.convert(known.server(), Broker), "roof._server")
            await site.start()
            stack.push_async_callback(site.stop)
            await _start_boards(stack, site, boards)
            await stack.enter_async_context(server.running())
            heard: set[str] = set()
            inbox = await stack.enter_async_context(server.subscribe(topic("roof", ANY, "status")))
            inbox.divert(lambda came: heard.add(came[0]) if came[1] == b"here" else None)
            await fleet.until(lambda: len(heard) == boards, GUARD_S)
            assert site.process
            site.process.kill()
            await site.process.wait()
            heard.clear()
            await asyncio.sleep(DOWN_S)
            await site.start()
            began, longest_s = time.monotonic(), 0.0
            while len(heard) < boards:
                if (now := time.monotonic()) - began > GUARD_S:
                    raise RuntimeError(f"{len(heard)} of {boards} boards are back after {GUARD_S:.0f} s")
                await _ask(server)
                longest_s = max(longest_s, time.monotonic() - now)
            return time.monotonic() - began, longest_s


async def _ask(server: MqttTransport) -> None:
    """Take a look as the server: its loop turns, and what it publishes is acknowledged; not while it is away itself."""
    await asyncio.sleep(LOOK_S)
    if server.connected.is_set():
        with suppress(Exception):
            await server.publish(f"{ROOT}/roof/board-0/task", b"?")


async def _start_boards(stack: AsyncExitStack, site: LiveSite, boards: int) -> None:
    assert read_state(site.path).accounts
    for first in range(0, boards, PROCESS_BOARDS):
        arguments = [str(Path(__file__)), str(site.path / "boards.json"), str(first), str(PROCESS_BOARDS)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=DEVNULL)
        stack.push_async_callback(terminate, process)


async def live(told: Path, first: int, count: int) -> None:
    """Be some boards for ever.

    Args:
        told: File with the `[broker]` of each.
        first: Number of the first.
    """
    async with AsyncExitStack() as stack:
        for index, broker in enumerate(json.loads(told.read_text())[first : first + count], first):
            said = Presence(topic("roof", f"board-{index}", "status"), b"here", b"gone")
            board = MqttTransport(msgspec.convert(broker, Broker), f"roof.board-{index}", lambda said=said: said)
            await stack.enter_async_context(board.running())
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
