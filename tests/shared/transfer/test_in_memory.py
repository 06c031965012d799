"""A payload received into memory: whoever has taken the whole keeps it, and the sink keeps nothing."""

from __future__ import annotations

from shared.protocol.messages import BLOCK_BYTES, Transfer
from shared.transfer.in_memory import MemorySink


def test_a_sink_that_is_removed_holds_nothing_and_takes_nothing_back() -> None:
    sink = MemorySink(Transfer(digest=bytes(16), size=BLOCK_BYTES + 3, frame_bytes=BLOCK_BYTES))
    sink.put(1, memoryview(b"end"))
    sink.put(0, memoryview(b"a" * BLOCK_BYTES))
    whole = sink.to_view()
    sink.remove()
    assert bytes(whole) == b"a" * BLOCK_BYTES + b"end"
    assert sink.to_view().nbytes == 0
