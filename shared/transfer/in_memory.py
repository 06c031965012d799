"""Received payload in memory: a step's features or its gradient, which would cost a disk a write a step.

What should outlive its process goes to a file, see `to_file`.
"""

from __future__ import annotations

from shared.protocol.messages import BLOCK_BYTES, Transfer


class MemorySink:
    """Where the blocks of one payload come together, in one piece of memory of its size.

    Args:
        transfer: What is to come; its size was checked.

    Attributes:
        have: Blocks that an earlier process received: none.
    """

    have = b""

    def __init__(self, transfer: Transfer) -> None:
        self._data = bytearray(transfer.size)

    def put(self, start: int, data: memoryview) -> None:
        """Store a frame's bytes, from block `start` on.

        Args:
            data: Whole blocks, but for the payload's last.
        """
        offset = start * BLOCK_BYTES
        self._data[offset : offset + data.nbytes] = data

    def whole(self) -> memoryview:
        """Return the payload, in memory that is the caller's from now on."""
        return memoryview(self._data)

    def remove(self) -> None:
        """Part with what has come; whoever holds the whole keeps it."""
        self._data = bytearray()
