"""What a settled update took: when its frames were first asked for, until when, and how many bytes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from device_agent.exchange import outbox as files
from device_agent.exchange.upload_meter import CompletedUpload
from shared.protocol.messages import Want
from shared.transfer import frames
from tests.device_agent.server_side import DATA, ack

pytestmark = pytest.mark.virtual_time


async def test_a_settled_update_tells_what_it_took(desk, describe) -> None:
    """From the first question to the settlement, on the agent's clock; a frame that was sent twice counts twice."""
    settled: list[CompletedUpload] = []
    desk.delivery.uploads.on_settled = settled.append
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        desk.delivery.uploads.clock = asyncio.get_running_loop().time
        digest = describe(DATA).digest
        await desk.tell(Want(digest=digest, frame_bytes=1024, ranges=[(0, 2)]), pause_s=0.5)
        assert not settled
        await desk.tell(Want(digest=digest, frame_bytes=1024, ranges=[(1, 3)]), pause_s=0.25)
        await desk.tell(ack(1))
    [sent] = settled
    assert (sent.run, sent.round, sent.bytes_up) == ("trial", 1, 4 * (1024 + frames.HEADER_BYTES))
    assert sent.ended - sent.started == 0.75
    assert sent.started > 0


async def test_every_update_counts_its_own_frames_and_each_is_told_once(desk, describe) -> None:
    """Settled in another order than offered, and one of them without a frame: the server had it."""
    settled: list[CompletedUpload] = []
    desk.delivery.uploads.on_settled = settled.append
    other = DATA[::-1]
    desk.put(1, DATA, describe(DATA))
    desk.put(2, other, describe(other))
    desk.put(3, DATA, describe(DATA))
    async with desk.running():
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        for number in (3, 1, 1):
            await desk.tell(ack(number, "duplicate"))
    assert [(sent.round, sent.bytes_up) for sent in settled] == [(3, 0), (1, 1024 + frames.HEADER_BYTES)]
    assert settled[0].started == settled[0].ended


async def test_a_repeated_round_counts_only_its_own_frames(desk, describe) -> None:
    """Frames of the first try were asked for long ago, and it was never settled: the server had lost its round."""
    settled: list[CompletedUpload] = []
    desk.delivery.uploads.on_settled = settled.append

    def put(start: bytes) -> None:
        desk.put(1, DATA, describe(DATA))
        [entry] = desk.outbox.entries()
        draft = desk.outbox.draft("trial", 1)
        (draft / files.PAYLOAD).write_bytes(DATA)
        files.write(draft, msgspec.structs.replace(entry.update, start=start))
        desk.outbox.commit(draft)

    put(b"first")
    async with desk.running():
        desk.delivery.uploads.clock = asyncio.get_running_loop().time
        want = Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)])
        await desk.tell(want, pause_s=600.0)
        put(b"second")
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        await desk.tell(want, pause_s=0.5)
        await desk.tell(msgspec.structs.replace(ack(1), start=b"second"))
    [sent] = settled
    assert (sent.ended - sent.started, sent.bytes_up) == (0.5, 1024 + frames.HEADER_BYTES)
