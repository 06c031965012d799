"""An outbox on files, and updates in it as a trainer leaves them."""

from __future__ import annotations

from pathlib import Path
from random import Random

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from shared.protocol import payload
from shared.protocol.messages import Transfer, Update
from shared.runtime.durable import explain_disk_errors

BYTES = Random(3).randbytes(1 << 20)


def make(folder: Path, limit: int = outbox.LIMIT_BYTES) -> Outbox:
    return Outbox(folder / "outbox", folder / "state", limit)


def put(box: Outbox, number: int, data: bytes = BYTES, state: bytes = b"") -> None:
    """Commit an update as a trainer does."""
    draft = box.draft("trial", number)
    with explain_disk_errors(draft), outbox.open_payload(draft) as file:
        file.write(data)
        file.truncate()
    if state:
        (draft / outbox.STATE).write_bytes(state)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    outbox.write(draft, Update(run="trial", round=number, device="board", params=transfer))
    box.commit(draft)
