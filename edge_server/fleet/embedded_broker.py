"""The pure Python broker (amqtt, MQTT 3.1.1) as a process: for demos and tests where mosquitto is not installed."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from amqtt.broker import Broker  # type: ignore[import-untyped]
from amqtt.mqtt.packet import MQTTFixedHeader  # type: ignore[import-untyped]

MOST_PACKET_BYTES = 8 << 20
"""As the private mosquitto takes them. amqtt has no such limit, and holds a packet whole before it looks at it."""


def limit_packets() -> None:
    """Let the broker hang up on who announces a longer packet, before it takes memory for that."""
    read = MQTTFixedHeader.from_stream

    async def read_bounded(reader: Any) -> Any:
        header = await read(reader)
        return None if header and header.remaining_length > MOST_PACKET_BYTES else header

    MQTTFixedHeader.from_stream = read_bounded


async def serve(port: int) -> None:
    """Listen on loopback until SIGTERM."""
    limit_packets()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    listener = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
    broker = Broker({"listeners": {"default": listener}, "auth": {"allow-anonymous": True}})
    await broker.start()
    await stopping.wait()
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
