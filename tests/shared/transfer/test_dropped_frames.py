"""A broker that acknowledges large messages and drops them: a payload arrives in smaller frames all the same."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from shared.protocol import wire
from shared.protocol.messages import Transfer, Want
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.machine import configured

pytestmark = pytest.mark.broker


async def send(transport: MqttTransport, sender: Sender) -> None:
    """Answer what is asked for."""
    async with transport.subscribe("want") as wants:
        async for _, data in wants:
            for frame in sender.answer(wire.decode_as(Want, data), transport.max_payload_bytes):
                await transport.publish("frames", frame, assured=False)


async def receive(transport: MqttTransport, transfer: Transfer, *, small: bool) -> Receiver[MemorySink]:
    """Ask until all is here."""
    policy, clock = Policy(8, 0.3, 1 << 20), time.monotonic
    pace = policy.pace(clock(), frames.FRAME_BYTES, small=small)
    receiver = Receiver(transfer, MemorySink, policy, pace, clock())
    pace._first_s = 0.3  # not ten seconds for the first frame
    async with transport.subscribe("frames") as inbox:
        while not receiver.complete:
            if want := receiver.want():
                await transport.publish("want", wire.encode(want))
            try:
                async with asyncio.timeout(receiver.remaining_s(clock())):
                    receiver.take(frames.decode((await anext(inbox))[1]), clock())
            except TimeoutError:
                receiver.time_out(clock())
    return receiver


@pytest.mark.parametrize("small", [True, False])
async def test_a_payload_comes_through_a_broker_that_drops_large_messages(tmp_path, small):
    sender = Sender.of_parts([memoryview(os.urandom(600_000))], frames.FRAME_BYTES)
    lines = "allow_anonymous true", "set_tcp_nodelay true", "message_size_limit 131072"
    async with configured(tmp_path, *lines) as place:
        one, other = (MqttTransport(Broker(port=place.port, version=3), name) for name in "ab")
        async with one.running(), other.running():
            await asyncio.gather(one.connected.wait(), other.connected.wait())
            sending = asyncio.create_task(send(one, sender))
            await asyncio.sleep(0.1)
            receiver = await receive(other, sender.transfer, small=small)
            assert receiver.pace.ceiling
            assert receiver.pace.ceiling <= 64 << 10
            assert bytes(receiver.finish()) == b"".join(map(bytes, sender.source.read(0, 600_000)))
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
