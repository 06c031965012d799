"""Boards with wrong clocks join, train and renew while clocks change.

Every process is real and has a calendar clock of its own, OpenSSL's included: gateway, broker, boards.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess  # noqa: TID251 - boards with other clocks than ours
import sys
import tomllib
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from device_agent.identity.credentials import CURRENT, FOLDER, read_membership
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.journal.records import closed_rounds
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.plan.data import device_data
from edge_server.rounds.check_plan import load
from shared.runtime.clock import utc_seconds
from tests.edge_server.gateway.sites import LiveSite, make_site, now
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import DEVICES, PATIENCE_S, ROOT, TINY, started, until
from tests.machine import needs_mosquitto
from tests.shifted import ShiftedClock, compiled, needs_compiler

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto, needs_compiler]
DAY_S = 86_400.0
ROUNDS, AHEAD_DAYS = 3, 2
RENEW = """
import asyncio, sys
from pathlib import Path
from functools import partial
from device_agent.config import load
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.renewal import Renewal, show_certificate
config = load(Path(sys.argv[1]))
clock = BoardClock.of(Path(config.state_dir))
print(asyncio.run(Renewal(Path(config.state_dir), clock, partial(show_certificate, clock=clock), config.broker).look()))
"""


def ahead_of(year: int, month: int, day: int) -> float:
    """Return how far a clock that reads a date is before this machine's."""
    return datetime(year, month, day, tzinfo=UTC).timestamp() - utc_seconds()


class Scene:
    """A site whose gateway's clock is off, with boards whose clocks are further off."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder, self.stack, library = folder, stack, compiled(folder)
        self.clocks = {name: ShiftedClock(library, folder / f"{name}.clock") for name in ("gateway", "a", "b")}
        self.gateway_ahead_s = 0.0

    def move_gateway(self, ahead_s: float) -> None:
        self.gateway_ahead_s = ahead_s
        self.clocks["gateway"].move(ahead_s, kept_right=True)

    def gateway_utc_s(self) -> float:
        return utc_seconds() + self.gateway_ahead_s

    def by(self, name: str) -> dict[str, str]:
        """Return the environment of a process that runs by a clock."""
        return {**os.environ, **self.clocks[name].environment()}

    def start(self, module: str, name: str, config: Path) -> subprocess.Popen[bytes]:
        """Start a command by a clock; it is gone after the scene."""
        with pytest.MonkeyPatch.context() as patch:
            for key, value in self.clocks["gateway" if name == "server" else name].environment().items():
                patch.setenv(key, value)
            return self.stack.enter_context(started(module, "run", "--config", config, log=self.log(name)))

    async def start_broker(self, site: LiveSite) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in self.clocks["gateway"].environment().items():
                patch.setenv(key, value)
            await site.start()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def run(self, name: str, *command: object) -> str:
        """Run a command by a clock; return what it says."""
        words = [sys.executable, *map(str, command)]
        process = await asyncio.create_subprocess_exec(
            *words, cwd=ROOT, env=self.by(name), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0, err.decode()
        return out.decode()

    def board_file(self, name: str) -> Path:
        plan = load(self.plan(), self.folder)
        data = msgspec.to_builtins(device_data(plan, plan.device, "ab".index(name)))
        keys = {"state_dir": str(self.folder / name), "data": data, "trainer": {"threads": 1}}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(keys))
        return path

    def plan(self) -> Path:
        usual = TINY | {"more": f"{TINY['more']}\n{DEVICES}", "evaluation": "every = 1"}
        usual["hyper"] = "local_epochs = 30\nbatch_size = 8\nlearning_rate = 0.1"
        usual["round"] = "deadline_s = 300.0"
        return write_plan(self.folder, rounds=ROUNDS, **usual)

    def server_file(self, site: LiveSite) -> Path:
        made = tomllib.loads((site.path / "server.toml").read_text())  # as `site init` wrote it
        made |= {"plan": str(self.plan()), "data_dir": str(self.folder / "runs"), "data_root": str(self.folder)}
        path = self.folder / "server.json"
        path.write_text(json.dumps(made | {"threads": 1}))
        return path

    def rounds(self) -> list[tuple[str, tuple[str, ...]]]:
        folders = [path.parent for path in (self.folder / "runs").glob(f"*/{JOURNAL}")]
        return [(one.outcome, one.arrived) for one in closed_rounds(read_records(folders[0]))] if folders else []


async def closed(scene: Scene, count: int) -> None:
    await asyncio.to_thread(until, lambda: len(scene.rounds()) >= count, f"the end of round {count}")


async def renewals(scene: Scene, files: dict[str, Path]) -> None:
    """Each board's certificate is renewed when the gateway's time has come, whatever its own clock says.

    The boards' agents have ended before: theirs would be the first to renew, or hold what is renewed at that moment.
    """
    scene.move_gateway(260 * DAY_S)
    for name, path in files.items():
        used = scene.folder / name / FOLDER / CURRENT
        before = read_membership(used).not_after_utc_s
        assert await scene.run(name, "-c", RENEW, path) == "True\n"
        assert read_membership(used).not_after_utc_s > before + 200 * DAY_S


async def test_clocks_that_are_wrong_keep_nobody_from_joining_training_and_renewing(tmp_path):
    """The gateway is two days ahead at first and then as far behind: what boards keep of its time holds up none."""
    async with AsyncExitStack() as stack:
        scene = Scene(tmp_path, stack)
        scene.move_gateway(AHEAD_DAYS * DAY_S)
        scene.clocks["a"].move(ahead_of(1970, 1, 2))
        scene.clocks["b"].move(ahead_of(2038, 1, 20))
        site = make_site(tmp_path, address="127.0.0.1", at=now() + timedelta(days=AHEAD_DAYS))
        await scene.start_broker(site)
        stack.push_async_callback(site.stop)
        enrolment = EnrolmentSite(site.path, utc_s=scene.gateway_utc_s)
        service = EnrolmentService(enrolment.registrar(), lambda: service_context(*enrolment.pair()))
        port = await stack.enter_async_context(service.running("127.0.0.1", 0))
        files = {name: scene.board_file(name) for name in "ab"}
        boards = []
        for name, path in files.items():
            where = ("--folder", site.path, "--port", port)
            token = await scene.run("gateway", "-m", "edge_server", "enrol", name, *where)
            await scene.run(name, "-m", "device_agent", "join", token.strip(), "--config", path)
            boards.append(scene.start("device_agent", name, path))
        server = scene.start("edge_server", "server", scene.server_file(site))
        await closed(scene, 1)
        scene.move_gateway(-AHEAD_DAYS * DAY_S)  # and the boards' clocks with it, in the middle of a round
        scene.clocks["a"].move(0.0, kept_right=True)
        scene.clocks["b"].move(ahead_of(1970, 1, 2))
        assert await asyncio.to_thread(server.wait, PATIENCE_S) == 0, scene.log("server").read_text()
        assert scene.rounds() == [("aggregated", ("a", "b"))] * ROUNDS
        for board in boards:
            board.terminate()
            await asyncio.to_thread(board.wait, PATIENCE_S)
        await renewals(scene, files)
