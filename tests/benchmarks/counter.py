"""TCP relay that counts one process's bytes, and can delay or break connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SLICE_S = 0.02


@dataclass
class Counted:
    """Bytes so far, as seen by who connects to `port`.

    Attributes:
        sent: Bytes from who connects.
        received: Bytes to it.
        bytes_per_second: Of each way; 0 for no limit.
    """

    port: int = 0
    sent: int = 0
    received: int = 0
    bytes_per_second: float = 0.0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def sever(self) -> None:
        """Break every connection, as a link does that goes away."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def counting(port: int, bytes_per_second: float = 0.0) -> AsyncIterator[Counted]:
    """Relay a new port of loopback to `port`."""
    counted = Counted(bytes_per_second=bytes_per_second)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        counted._writers.add(writer)
        try:
            while True:
                rate = counted.bytes_per_second
                data = await reader.read(max(1, int(rate * SLICE_S)) if rate else 1 << 20)
                if not data:
                    break
                setattr(counted, way, getattr(counted, way) + len(data))
                writer.write(data)
                await writer.drain()
                if rate:
                    await asyncio.sleep(len(data) / rate)
        except OSError:
            pass  # severed, or one end died
        finally:
            counted._writers.discard(writer)
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pipe(reader, onward_writer, "sent"), pipe(onward_reader, writer, "received"))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 16)
    counted.port = server.sockets[0].getsockname()[1]
    try:
        yield counted
    finally:
        server.close()
        counted.sever()
