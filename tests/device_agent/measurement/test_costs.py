"""What a task cost, from the agent as a process: seconds, cycles and joules of fetching, computing and sending."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet.broker import run_private_broker
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.messages import BLOCK_BYTES, Ack, Assignment, Hyper, Report, Update, Want
from shared.protocol.topics import topic
from shared.transfer import frames
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.device_agent.agent_side import DEVICE, LIMIT_S, SITE, living, stop, write_config
from tests.device_agent.server_side import plugged

WATTS = 4.0
METER = '[board.meter]\nkind = "shelly"\nurl = "{}"\nperiod_s = 0.2'
LONG = Assignment(seed=1, hyper=Hyper(local_epochs=500, batch_size=8, learning_rate=0.001))


class Server:
    """Hands out one task, takes its update, and listens to reports."""

    def __init__(self, transport: MqttTransport, parameters: bytes, cut) -> None:
        self.transport, self.parameters, self.cut = transport, parameters, cut
        self.update: asyncio.Future[Update] = asyncio.get_running_loop().create_future()
        self.spent: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    async def run(self, task) -> None:
        channels = (topic(SITE, DEVICE, channel) for channel in ("want", "update", "report"))
        async with self.transport.subscribe(*channels) as inbox:
            async for _, data in inbox:
                match wire.decode(data) if wire.is_message(data) else frames.decode(data):
                    case Want() as want:
                        for index, _ in frames.pieces(want, task.params, BLOCK_BYTES):
                            frame = self.cut(self.parameters, task.params, index)
                            await self.transport.publish(topic(SITE, DEVICE, "model"), frame)
                    case Update(params=params) as update if params and not self.update.done():
                        self.update.set_result(update)
                        want = Want(digest=params.digest, frame_bytes=BLOCK_BYTES, ranges=[(0, params.blocks)])
                        await self.say(want)
                    case frames.Frame():
                        await self.say(
                            Ack(
                                run=task.run,
                                round=task.round,
                                device=DEVICE,
                                start=task.params.digest,
                                verdict="accepted",
                            )
                        )
                    case Report(spent=None):  # it is there, and listens
                        await self.transport.publish(topic(SITE, DEVICE, "task"), wire.encode(task))
                    case Report() as report if not self.spent.done():
                        self.spent.set_result(report)

    async def say(self, message: Want | Ack) -> None:
        await self.transport.publish(topic(SITE, DEVICE, "ack"), wire.encode(message))


def story(tmp_path, task, parameters, cut, examples, more: str = "") -> tuple[Cost, Report]:
    """Return the cost that came with the update, and the report that came after it was settled."""

    async def routine() -> tuple[Cost, Report]:
        data = f'source = "csv"\npath = "{examples.path}"'
        async with (
            asyncio.timeout(LIMIT_S),
            run_private_broker(tmp_path) as broker,
            MqttTransport(Broker(port=broker.port), "tester").running() as transport,
            living(write_config(tmp_path, broker.port, data, more)) as process,
        ):
            await transport.connected.wait()
            server = Server(transport, parameters, cut)
            serving = asyncio.create_task(server.run(task))
            await asyncio.wait({serving, server.spent}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            serving.cancel()
            await stop(process)
            return server.update.result().cost, server.spent.result()

    return asyncio.run(routine())


@pytest.mark.broker
def test_a_task_is_charged_by_the_meter_and_the_rest_follows_with_a_report(
    tmp_path, make_task, parameters, cut, examples
):
    """A plug says 4 W all the time: computing is charged 4 W times its seconds, in the trainer's own process.

    Once the update is settled, a report comes at once, with the upload's seconds and bytes; its watts are the plug's.
    """
    with plugged(lambda: WATTS) as url:
        cost, report = story(tmp_path, make_task(assignment=LONG), parameters, cut, examples, METER.format(url))
    assert cost.compute_joules == pytest.approx(WATTS * cost.compute_s)
    assert cost.provenance["compute_joules"].source.startswith("http shelly")
    assert cost.compute_s >= cost.cpu_s * 0.5 > 0
    assert cost.bytes_down >= len(parameters)
    assert (cost.upload_s, cost.upload_joules) == (None, None)
    whole = report.spent.cost
    assert (report.spent.run, report.spent.round) == ("trial", 1)
    assert (whole.compute_s, whole.compute_joules) == (cost.compute_s, cost.compute_joules)
    assert whole.upload_s > 0
    assert whole.bytes_up > 0
    watts = report.readings.get("power.total_watts")
    assert watts is None or watts.value == WATTS  # none where the plug has not answered between task and report
    assert report.board
    assert "memory.available_bytes" in report.readings
