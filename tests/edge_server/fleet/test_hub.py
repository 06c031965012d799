"""What the server says while no round is open."""

from __future__ import annotations

import asyncio

from edge_server.fleet.hub import Server
from shared.protocol import wire
from shared.protocol.messages import Update
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import SITE, virtual


def test_no_offer_is_settled_before_it_is_known_which_run_goes_on():
    """A server that came back hears devices before it has read its journal: a verdict would throw updates away.

    Found by chaos: the offers that piled up at the broker were all late in the milliseconds after its start.
    """

    async def play() -> tuple[int, int, int]:
        broker = MemoryTransport()
        server = Server(SITE, broker, asyncio.get_running_loop().time, inline, was_run=lambda _run: True)
        offer = wire.encode(Update(run="run", round=4, device="a", params=None, failure="none"))
        async with broker.subscribe(topic(SITE, "a", "ack")) as acks, server.listening():
            heard = []
            for run in ("", "run", "another"):
                server.run = run
                await broker.publish(topic(SITE, "a", "update"), offer)
                await asyncio.sleep(1)
                heard.append(len([*acks.taken()]))
            return heard[0], heard[1], heard[2]

    assert virtual(play()) == (0, 0, 1)
