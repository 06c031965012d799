"""A device's folders and its trainer's workspace, without a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.measurement.task_meter import ProcessMeter
from device_agent.trainer.task import perform
from device_agent.trainer.workspace import Workspace
from shared.codecs.dense import dense
from shared.protocol import payload
from shared.protocol.messages import Update
from shared.tensors.tree import Tree
from shared.transfer import to_file

METER = ProcessMeter()


@dataclass
class Device:
    """Does tasks one after the other, each into a draft of its own."""

    folder: Path
    make_job: Callable
    outbox: Outbox
    workspace: Workspace = field(default_factory=Workspace)

    def perform(self, task, meter=METER.task, superseded=lambda: False, **fields) -> Path:
        """Do a task on what `fields` of the job say; return its draft."""
        draft = self.outbox.draft(task.run, task.round)
        perform(msgspec.structs.replace(self.make_job(task, draft), **fields), self.workspace, meter, superseded)
        return draft

    def params(self, tree: Tree) -> str:
        """Write parameters as the download leaves them."""
        path = self.folder / "other-params"
        path.write_bytes(b"".join(payload.pack(dense().encode(tree, None)[0])))
        return str(path)


def update_of(draft: Path) -> Update:
    return outbox.read(draft)


def moved(draft: Path) -> Tree:
    return dense().decode(payload.unpack(to_file.view(draft / outbox.PAYLOAD))).tree
