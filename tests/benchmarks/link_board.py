"""Agent without torch for benchmark `link`: its training changes four bytes.

Run as `python link_board.py HOST PORT KEEPALIVE_S FOLDER`. After each transfer it writes what it now takes its link for
into FOLDER/rates.jsonl: the way, and bits a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from device_agent.agent.build import compose
from device_agent.config import AgentConfig
from device_agent.exchange import outbox
from device_agent.measurement.link_meter import LinkMeter
from device_agent.measurement.link_rate import Direction, LinkTransfer, estimate_rate
from device_agent.trainer.interface import Job
from shared.data.spec import Data
from shared.protocol import payload
from shared.protocol.messages import Transfer, Update
from shared.transfer.frames import FRAME_BYTES
from shared.transfer.to_file import view
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session

RATES = "rates.jsonl"


@dataclass
class Told(Direction):
    """One direction of the link that writes its estimate down whenever a transfer has changed it."""

    path: Path = Path(RATES)

    def add(self, transfer: LinkTransfer) -> None:
        """Note a transfer."""
        before = self.transfers
        super().add(transfer)
        if self.transfers is not before and (rate := estimate_rate(self.transfers)):
            with self.path.open("a") as file:
                file.write(json.dumps([self.name, rate.bits_per_s]) + "\n")


class Nudge:
    """A trainer whose update is the payload it was given, but for the last number."""

    async def ready(self, _task: object, /) -> None:
        """It always is."""

    async def __call__(self, job: Job) -> None:
        """Write the update into the draft."""
        task, path = job.task, Path(job.draft) / outbox.PAYLOAD
        shutil.copyfile(job.params, path)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(struct.pack("<f", task.round))
        params = Transfer(digest=payload.digest([view(path)]), size=task.params.size, frame_bytes=FRAME_BYTES)
        update = Update(
            run=task.run,
            round=task.round,
            device=task.device,
            params=params,
            start=task.params.digest,
            weight=1.0,
            num_examples=1,
            cost=job.cost,
        )
        outbox.write(Path(job.draft), update)


async def main(broker: Broker, folder: Path) -> None:
    """Run the agent for ever."""
    config = AgentConfig(device="a", site="lab", state_dir=str(folder), data=Data(source="digits"), broker=broker)
    session = Session(folder / "session", config.device, config.site, "board")
    async with MqttTransport(broker, "lab.a", session.presence).running() as transport:
        up, down = (Told(way, path=folder / RATES) for way in ("up", "down"))
        meter = LinkMeter(transport.traffic, up=up, down=down)
        await compose(config, folder, transport, Nudge(), link=meter).run()


if __name__ == "__main__":
    place = Path(sys.argv[4])
    place.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Broker(host=sys.argv[1], port=int(sys.argv[2]), keepalive_s=int(sys.argv[3])), place))
