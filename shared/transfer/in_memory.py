"""Received payload in memory, for features and gradients.

A file would cost a disk write per step; for payloads that should outlive their process, see `to_file`.
"""

from __future__ import annotations

from shared.protocol.messages import BLOCK_BYTES, Transfer


class MemorySink:
    """Sink for the blocks of one payload, in one buffer.

    Attributes:
        have: Blocks that an earlier process received: none.
    """

    have = b""

    def __init__(self, transfer: Transfer) -> None:
        self._data = bytearray(transfer.size)

    def put(self, start: int, data: memoryview) -> None:
        offset = start * BLOCK_BYTES
        self._data[offset : offset + data.nbytes] = data

    def to_view(self) -> memoryview:
        return memoryview(self._data)

    def remove(self) -> None:
        self._data = bytearray()  # views of the former one stay valid
