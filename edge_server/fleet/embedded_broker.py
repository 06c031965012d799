"""The pure Python broker (amqtt, MQTT 3.1.1) as a process: for demos and tests where mosquitto is not installed."""

from __future__ import annotations

import asyncio
import signal
import sys

from amqtt.broker import Broker  # type: ignore[import-untyped]


async def serve(port: int) -> None:
    """Listen on loopback until SIGTERM."""
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
