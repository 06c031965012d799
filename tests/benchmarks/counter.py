"""A TCP relay that counts: what one process really sends and receives, measured at the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Counted:
    """Bytes so far, as seen by who connects to `port`."""

    port: int = 0
    sent: int = 0
    received: int = 0


@asynccontextmanager
async def counting(port: int) -> AsyncIterator[Counted]:
    """Relay a new port of loopback to `port`."""
    counted = Counted()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, field: str) -> None:
        while data := await reader.read(1 << 20):
            setattr(counted, field, getattr(counted, field) + len(data))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pipe(reader, onward_writer, "sent"), pipe(onward_reader, writer, "received"), return_exceptions=True
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    counted.port = server.sockets[0].getsockname()[1]
    async with server:
        yield counted
