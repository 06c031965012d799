"""Frames wait for those before them to be written: a broker that reads nothing fills no memory of ours."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from shared.errors import Unreachable
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.send_queue import MARK_BYTES, SendQueue
from tests.machine import configured

FRAME = bytes(256 << 10)
FRAMES = 200
KERNEL_BYTES = 16 << 20
"""More than the two ends of a connection hold of it."""


@pytest.mark.broker
@pytest.mark.parametrize("version", [5, 3])
async def test_frames_wait_while_the_broker_reads_nothing(tmp_path, version):
    """50 MB are handed over by two senders; a mark's worth is taken, and all of it when the broker reads again."""
    async with configured(tmp_path, "allow_anonymous true") as place:
        device = MqttTransport(Broker(port=place.port, version=version), "device")
        async with device.running():
            await device.connected.wait()
            os.kill(place.process.pid, signal.SIGSTOP)
            taken = [0]

            async def send() -> None:
                for _ in range(FRAMES // 2):
                    await device.publish("a/frame", FRAME, assured=False)
                    taken[0] += 1

            sending = [asyncio.create_task(send()) for _ in range(2)]
            await asyncio.sleep(0.5)
            assert taken[0] * len(FRAME) <= MARK_BYTES + KERNEL_BYTES
            os.kill(place.process.pid, signal.SIGCONT)
            await asyncio.gather(*sending)
            assert taken[0] == FRAMES
            assert device.connection.unwritten.waiting_bytes <= MARK_BYTES


@pytest.mark.broker
async def test_who_waits_for_a_connection_that_is_lost_is_told(tmp_path):
    async with configured(tmp_path, "allow_anonymous true") as place:
        device = MqttTransport(Broker(port=place.port), "device")
        async with device.running():
            await device.connected.wait()
            os.kill(place.process.pid, signal.SIGSTOP)

            async def send() -> None:
                while True:
                    await device.publish("a/frame", FRAME, assured=False)

            sending = asyncio.create_task(send())
            await asyncio.sleep(0.3)
            place.process.kill()
            with pytest.raises(Unreachable):
                await sending


async def test_one_frame_may_always_go_and_the_mark_holds():
    queue = SendQueue(mark_bytes=100)
    assert queue.room(1000) is None
    queue.add(1, 1000)
    first, second = queue.room(1), queue.room(50)
    assert first is not None
    assert second is not None
    queue.add(1, 80)  # its number begins anew
    assert queue.waiting_bytes == 80
    assert queue.room(20) is None
    assert queue.room(21) is not None
    queue.remove(1)
    queue.remove(1)
    assert (queue.waiting_bytes, first.done(), second.done()) == (0, True, True)
