"""A rollout to agents as operators start them: broker, gates, inference process and the way back are the real ones."""

from __future__ import annotations

import asyncio
import http.client
import json
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from edge_server.fleet import broker
from edge_server.fleet.view import watch_site
from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import RolloutState
from edge_server.plan.server_config import ServerConfig
from edge_server.release.rollout.drive import drive
from edge_server.release.rollout.orders import begin_rollout, boards_with
from edge_server.release.store import publish
from shared.transport.base import Broker
from tests.device_agent.agent_side import LIMIT_S, line_with, living, stop
from tests.device_agent.inference.linear_releases import linear_release

TERMS = RolloutPlan(deployment="", release="", sha256="", soak_s=0.5, on_failure="back")


class Board:
    """A board that only serves, by its file."""

    def __init__(self, folder: Path, name: str, mqtt: int) -> None:
        folder.mkdir()
        self.name, self.port, self.path = name, broker.free_port(), folder / "agent.toml"
        self.path.write_text(
            f'device = "{name}"\nsite = "lab"\nstate_dir = "{folder}/state"\nreport_s = 1.0\n'
            f"[broker]\nport = {mqtt}\n[serve]\nport = {self.port}\n"
        )

    def answer(self) -> tuple[str, list[float]]:
        """Return which version answers, and what it makes of an input of zeros: its biases."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}
        connection.request("POST", "/v2/models/points/infer", json.dumps({"inputs": [tensor]}))
        found = json.loads(connection.getresponse().read())
        connection.close()
        return found["model_version"], found["outputs"][0]["data"]


@pytest.mark.broker
def test_a_release_is_served_by_all_and_a_poisoned_one_ends_at_the_first_board(tmp_path, real):
    """Nobody who asks a board meets an error; killed and started again, a board serves what it served."""

    async def story() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            mqtt = (await stack.enter_async_context(broker.running(tmp_path))).port
            boards = [Board(tmp_path / name, name, mqtt) for name in ("pi-1", "pi-2")]
            agents = [await stack.enter_async_context(living(one.path)) for one in boards]
            for process in agents:
                await line_with(process, "this board serves models and takes no tasks: its file has no [data]")
            data_dir = tmp_path / "runs"
            config = ServerConfig(plan="p", site="lab", data_dir=str(data_dir), broker=Broker(port=mqtt))

            async def roll_out(version: int, weights: np.ndarray | None = None) -> RolloutState:
                manifest, parts = linear_release(version, weights)
                stored = publish(data_dir, manifest, parts)
                return await drive(config, lambda: begin_rollout(data_dir, stored, TERMS))

            async with watch_site(config.broker, "lab") as look:
                while set(look.models) != {one.name for one in boards} or len(look.fleet.online) < len(boards):  # noqa: ASYNC110 - what boards say comes from the broker
                    await asyncio.sleep(0.05)
            first = await roll_out(1)
            assert (first.outcome, set(first.taken)) == ("finished", {"pi-1", "pi-2"})
            assert [await asyncio.to_thread(one.answer) for one in boards] == [("1", [1 / 1024] * 2)] * 2
            poisoned = np.zeros((4, 2))
            poisoned[2, 0] = np.nan
            second = await roll_out(2, poisoned)
            assert (second.outcome, list(second.taken)) == ("taken-back", ["pi-1"])
            assert "NaN" in second.failures["pi-1"]
            assert [await asyncio.to_thread(one.answer) for one in boards] == [("1", [1 / 1024] * 2)] * 2
            third = await roll_out(3)
            assert third.outcome == "finished"
            assert boards_with(data_dir, "points/3") == ["pi-1", "pi-2"]
            for process in agents:
                await stop(process)
            again = await stack.enter_async_context(living(boards[0].path))
            await line_with(again, "serving points/3, opened in")
            assert await asyncio.to_thread(boards[0].answer) == ("3", [3 / 1024] * 2)
            await stop(again)

    real(story())
