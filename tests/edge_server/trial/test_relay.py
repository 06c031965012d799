"""Link relay: bytes in order, at the link's rate, closed at the end."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from edge_server.trial.relay import BURST_S, run_relay
from shared.transport.simulated_link import Rate
from tests.machine import free_port

SENT = Random(1).randbytes(30_000)


async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send everything back once it has ended."""
    writer.write(await reader.read())
    writer.close()


@pytest.mark.parametrize("rate", [Rate(4e6, 8e6, 0.02), Rate(None, 4e6), Rate()])
def test_bytes_come_whole_and_no_sooner_than_the_link_lets_them(real, rate):
    """Both ways, each at its rate and with its delay; where there are none, at once."""

    async def passed() -> tuple[bytes, float]:
        server = await asyncio.start_server(echoes, "127.0.0.1", 0)
        async with server, run_relay(server.sockets[0].getsockname()[1], rate) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = time.monotonic()
            writer.write(SENT)
            writer.write_eof()
            found = await reader.read()
            took = time.monotonic() - began
            writer.close()
            return found, took

    found, took_s = real(passed())
    assert found == SENT
    rates = (rate.up_bits_per_second, rate.down_bits_per_second)
    least_s = sum(8 * len(SENT) / one - BURST_S for one in rates if one) + 2 * rate.delay_s
    assert took_s >= least_s


def test_connections_share_the_link(real):
    """Two senders of one device take twice as long."""

    async def send(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        writer.write_eof()
        await reader.read()
        writer.close()

    async def both() -> float:
        server = await asyncio.start_server(echoes, "127.0.0.1", 0)
        async with server, run_relay(server.sockets[0].getsockname()[1], Rate(4e6)) as port:
            began = time.monotonic()
            await asyncio.gather(send(port), send(port))
            return time.monotonic() - began

    assert real(both()) >= 2 * 8 * len(SENT) / 4e6 - BURST_S


def test_where_nobody_listens_the_connection_is_closed_and_the_relay_goes_on(real):
    async def refused() -> list[bytes]:
        async with run_relay(free_port(), Rate(1e6, 1e6)) as port:
            ends = []
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    ends.append(await reader.read())
                except ConnectionError:
                    ends.append(b"")
                writer.close()
            return ends

    assert real(refused()) == [b"", b""]
