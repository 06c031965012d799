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
async def test_bytes_come_whole_and_no_sooner_than_the_link_lets_them(rate):
    """Both ways, each at its rate and with its delay; where there are none, at once."""
    server = await asyncio.start_server(echoes, "127.0.0.1", 0)
    async with server, run_relay(server.sockets[0].getsockname()[1], rate) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        writer.write(SENT)
        writer.write_eof()
        found = await reader.read()
        took = time.monotonic() - began
        writer.close()
        took_s = took
    assert found == SENT
    rates = (rate.up_bits_per_second, rate.down_bits_per_second)
    least_s = sum(8 * len(SENT) / one - BURST_S for one in rates if one) + 2 * rate.delay_s
    assert took_s >= least_s


async def test_connections_share_the_link():
    """Two senders of one device take twice as long."""

    async def send(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SENT)
        writer.write_eof()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(echoes, "127.0.0.1", 0)
    async with server, run_relay(server.sockets[0].getsockname()[1], Rate(4e6)) as port:
        began = time.monotonic()
        await asyncio.gather(send(port), send(port))
        assert (time.monotonic() - began) >= 2 * 8 * len(SENT) / 4e6 - BURST_S


async def test_where_nobody_listens_the_connection_is_closed_and_the_relay_goes_on():
    async with run_relay(free_port(), Rate(1e6, 1e6)) as port:
        ends = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                ends.append(await reader.read())
            except ConnectionError:
                ends.append(b"")
            writer.close()
        assert ends == [b"", b""]
