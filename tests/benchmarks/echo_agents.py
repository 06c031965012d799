"""Many real agents in one process whose trainer only turns signs: a load for the server, without torch.

Run as `python echo_agents.py PORT COUNT FOLDER`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import numpy as np

from device_agent.agent.build import compose
from device_agent.config import AgentConfig
from device_agent.exchange import outbox
from device_agent.trainer.interface import Job
from shared.data.spec import Data
from shared.protocol import payload
from shared.protocol.messages import Update
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session

PREFIX_BYTES, ALIGN = 8, 64
"""Of a payload: bytes before its header, of which the last four say how long that is; where values may begin."""


def write_opposite(params: Path, into: Path) -> bytes:
    """Write the change that turns every parameter into its opposite; return its digest.

    So each round's model has other bits, which are to be sent, and none of them ever grows.
    """
    data = bytearray(params.read_bytes())
    header = PREFIX_BYTES + int.from_bytes(data[PREFIX_BYTES - 4 : PREFIX_BYTES], "little")
    values = np.frombuffer(data, "<f4", offset=-(-header // ALIGN) * ALIGN)
    np.multiply(values, -2.0, out=values)
    np.add(values, 0.0, out=values)  # between tensors lie zeros, and -0 is none
    into.write_bytes(data)
    return payload.digest([memoryview(data)])


class Echo:
    """A trainer whose update has the size of the payload it was given."""

    async def ready(self, _task: object, /) -> None:
        """It always is."""

    async def __call__(self, job: Job) -> None:
        task, draft = job.task, Path(job.draft)
        digest = await asyncio.to_thread(write_opposite, Path(job.params), draft / outbox.PAYLOAD)
        update = Update(
            run=task.run,
            round=task.round,
            device=task.device,
            params=msgspec.structs.replace(task.params, digest=digest),
            start=task.params.digest,
            weight=1.0,
            num_examples=1,
            cost=job.cost,
        )
        await asyncio.to_thread(outbox.write, draft, update)


async def live(port: int, index: int, folder: Path) -> None:
    """Run one agent for ever."""
    config = AgentConfig(device=f"echo-{index}", site="lab", state_dir=str(folder), data=Data(source="digits"))
    session = Session(folder / "session", config.device, config.site, str(index))
    folder.mkdir(parents=True)
    transport = MqttTransport(Broker(port=port), config.device, session.presence)
    async with transport.running():
        # Nothing is waited for: who is born before it listens to its tasks misses the first one.
        await compose(config, folder, transport, Echo()).run()


async def main(port: int, count: int, folder: Path) -> None:
    """Run all agents."""
    await asyncio.gather(*(live(port, index, folder / str(index)) for index in range(count)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
