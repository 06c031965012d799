"""The link as an agent's transport measures it, against a token bucket in a network namespace; mosquitto is real."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from edge_server.fleet import broker
from shared.runtime.processes import terminate
from tests.benchmarks import netns
from tests.machine import free_port, needs_mosquitto

pytestmark = [
    pytest.mark.broker,
    needs_mosquitto,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

MBIT, MOST_OFF = 6, 0.15
BOARD = """
import asyncio, sys
from random import Random
import msgspec
from device_agent.measurement.link_meter import LinkMeter
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

PIECE = Random(1).randbytes(100_000)


async def main():
    transport = MqttTransport(Broker(host=sys.argv[1], port=int(sys.argv[2])), "board")
    link = LinkMeter(transport.traffic)
    async with transport.running():
        await transport.connected.wait()
        link.note_progress()
        for _ in range(7):
            await transport.publish("nobody/listens", PIECE, assured=False)
        await transport.publish("kept", PIECE, retain=True)
        link.finish_upload()
        async with transport.subscribe("kept") as inbox:
            with link.measure_download():
                for _ in range(8):
                    await anext(inbox)
                    await asyncio.sleep(0.05)  # as long as a server may think; no time of the link
                    async with transport.subscribe("kept"):
                        pass
    found = link.read(0.0)
    print(msgspec.json.encode({name: one.value for name, one in found.readings.items()}).decode())


asyncio.run(main())
"""


@asynccontextmanager
async def listening(link: netns.SlowLink, folder: Path) -> AsyncIterator[int]:
    """Run mosquitto at this end of the link."""
    port = free_port()
    settings = folder / "mosquitto.conf"
    settings.write_text(f"listener {port} {link.address}\nallow_anonymous true\nset_tcp_nodelay true\nuser root\n")
    process: Process = await asyncio.create_subprocess_exec(
        str(broker.find_mosquitto()), "-c", str(settings), stdout=PIPE, stderr=PIPE
    )
    try:
        for _ in range(1200):
            try:
                _, writer = await asyncio.open_connection(link.address, port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield port
    finally:
        await terminate(process)


def test_both_ways_are_measured_as_the_token_bucket_shapes_them(tmp_path) -> None:
    """800 kB each way at 6 Mbit/s, of which TCP's payload gets 95.6 %; on the way down the sender pauses in between."""

    async def routine(link: netns.SlowLink) -> dict[str, float]:
        async with listening(link, tmp_path) as port:
            board = await asyncio.create_subprocess_exec(
                *(*link.prefix, sys.executable, "-c", BOARD, link.address, str(port)), stdout=PIPE
            )
            async with asyncio.timeout(300):
                output, _ = await board.communicate()
            return msgspec.json.decode(output, type=dict[str, float])

    with ExitStack() as stack:
        try:
            link = stack.enter_context(netns.slow_link(f"{MBIT}mbit"))
        except OSError as error:
            pytest.skip(f"no network namespace with a token bucket: {error}")
        rates = asyncio.run(routine(link))
    expected = MBIT * 1e6 * netns.PAYLOAD_SHARE
    assert rates["link.up_bits_per_s"] == pytest.approx(expected, rel=MOST_OFF)
    assert rates["link.down_bits_per_s"] == pytest.approx(expected, rel=MOST_OFF)
