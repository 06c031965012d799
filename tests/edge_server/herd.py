"""Many real agents in one process, whose training never ends; every attempt to connect is printed with its moment.

Run as `python -m tests.edge_server.herd PORT FIRST COUNT FOLDER`; the first is the number of the first agent.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from pathlib import Path

from device_agent.agent.build import compose
from device_agent.config import AgentConfig
from device_agent.trainer.interface import Job
from shared.data.spec import Data
from shared.transport.base import Broker, Presence
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session


class Endless:
    """A trainer that keeps its device busy."""

    async def ready(self, _task: object, /) -> None:
        """It always is."""

    async def __call__(self, job: Job) -> None:
        await asyncio.Event().wait()


async def live(port: int, index: int, folder: Path) -> None:
    """Run one agent for ever; its folder is there."""
    config = AgentConfig(device=f"device-{index}", site="lab", state_dir=str(folder), data=Data(source="digits"))
    session = Session(folder / "session", config.device, config.site, uuid.uuid4().hex)

    def presence() -> Presence:
        sys.stdout.write(f"{index} {time.monotonic()}\n")
        sys.stdout.flush()
        return session.presence()

    async with MqttTransport(Broker(port=port), f"lab.{config.device}", presence).running() as transport:
        await compose(config, folder, transport, Endless()).run()


async def main(port: int, numbers: range, folder: Path) -> None:
    """Run all agents, each in a folder of its own."""
    await asyncio.gather(*(live(port, number, folder / str(number)) for number in numbers))


if __name__ == "__main__":
    place, one, many = Path(sys.argv[4]), int(sys.argv[2]), int(sys.argv[3])
    for each in range(one, one + many):
        (place / str(each)).mkdir(parents=True)
    asyncio.run(main(int(sys.argv[1]), range(one, one + many), place))
