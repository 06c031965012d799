"""Duplicates and late messages of honest devices are not a flood."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from edge_server.fleet import admission
from edge_server.plan.server_config import LinkConfig
from shared.protocol.messages import BLOCK_BYTES, Ack, Update, Want
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.frames import FRAME_BYTES
from tests.edge_server.harness import Puppet, moved, packed, site, update_for

pytestmark = pytest.mark.virtual_time

LARGE = {
    "model": 'name = "mlp"\noptions = { hidden = 115000 }',
    "round": "deadline_s = 600.0",
    "cohort": "min_devices = 1",
    "rounds": 1,
}
"""34 MB of parameters."""
LATENCY_S, LASTS_S, FRAME_S = 0.2, 0.5, 0.02
"""Of the link; how long a connection lasts; of a frame of 256 KiB on it."""


async def reconnect(board: Puppet) -> None:
    """Connect anew again and again."""
    session = 1
    while True:
        await asyncio.sleep(LASTS_S)
        session += 1
        await board.status(online=True, session=session)


async def upload(board: Puppet, offer: Update, data: bytes) -> tuple[Ack, Counter[int]]:
    """Answer each wish when it has come over the link; return the verdict, and how often each block was sent."""
    due, times, clock = asyncio.Queue[tuple[float, Want]](), Counter[int](), asyncio.get_running_loop().time

    async def send() -> None:
        while True:
            at, want = await due.get()
            await asyncio.sleep(max(0.0, at - clock()))
            for start, stop in frames.pieces(want, offer.params, want.frame_bytes):
                part = memoryview(data)[start * BLOCK_BYTES : stop * BLOCK_BYTES]
                await asyncio.sleep(FRAME_S * len(part) / (256 << 10))
                await board.say(frames.encode(offer.params, start, [part]))
                times.update(range(start, stop))

    async with background(send(), reconnect(board)):
        await board.say(offer)
        while isinstance(word := await board.heard(), Want):
            due.put_nowait((clock() + LATENCY_S, word))
        return word, times


async def test_a_large_upload_over_a_link_that_breaks_again_and_again_is_no_flood(tmp_path, caplog):
    """At each reconnect the server asks anew for what is under way; what it had asked for before comes as well."""
    async with site(tmp_path, link=LinkConfig(), **LARGE) as here:
        board = await here.device("pi")
        data = packed(moved(here.plan, 0.5))
        offer = update_for(await board.task(), data)
        offer = replace(offer, params=replace(offer.params, frame_bytes=FRAME_BYTES))
        verdict, times = await upload(board, offer, data)
        assert verdict.verdict == "accepted"
        assert sum(times.values()) > 1.3 * len(times), "nothing came twice"
    assert not [one for one in caplog.records if one.name == admission.__name__]
