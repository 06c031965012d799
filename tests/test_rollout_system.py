"""Rollouts to boards as operators meet them: every process is real, the client is NVIDIA's, and some are killed.

Four boards and a broker serve all tests here: two that train and hold examples back, two that only serve.
"""

from __future__ import annotations

import asyncio
import subprocess  # noqa: TID251 - agents that are killed
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import load as load_tensors

from device_agent.inference.store import BoardStore
from edge_server.fleet.view import watch_site
from edge_server.journal.rollouts.state import RolloutState
from edge_server.plan.data import device_data
from edge_server.release.rollout.orders import boards_using, open_rollout
from edge_server.release.store import StoredRelease, find_release
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError, CorruptFile
from shared.protocol.update import ENDED
from shared.transport.base import Broker
from tests.device_agent.agent_side import is_alive
from tests.edge_server.gateway.sites import make_site
from tests.edge_server.processes import ROOT, Forked, captured, forked, started, until
from tests.edge_server.release.runs import publish_changed
from tests.machine import free_port, needs_mosquitto
from tests.naming import names_all

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
triton = pytest.importorskip("tritonclient.http")
pytestmark = [pytest.mark.broker, needs_mosquitto]
TRAINING, BOARDS = ("nano-0", "nano-1"), ("nano-0", "nano-1", "pi-0", "pi-1")
CLASSES, TOLERANCE = 10, 1e-4
PERIOD_S = 0.03
HANG_S = 300.0
MOST_RESUMES = 20
FIRST_LONG_S = 10_000
TERMS = ("--canary", 1, "--waves", "100%", "--soak", "0.3s", "--on-failure", "back", "--max-latency-ms", FIRST_LONG_S)
"""A busy machine may be slow: no release is refused for that here."""


@dataclass
class Board:
    """A board, and a client that asks it again and again.

    Attributes:
        port: Of its inference process.
        path: Of its agent's file.
        kills: How often something of it was killed.
        dead: How many of these were over, and the process gone.
        settled: After how many of them it has answered again; before that nobody need answer.
        versions: How often each version answered.
        faults: Whatever was not as it should be.
    """

    name: str
    port: int
    path: Path
    kills: int = 0
    dead: int = 0
    settled: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start its agent."""
        self.stack = ExitStack()
        log = self.path.with_suffix(".log")
        self.process = self.stack.enter_context(started("device_agent", "run", "--config", self.path, log=log))

    def inference(self) -> psutil.Process | None:
        """Return its inference process; None where there is none at the moment."""
        with suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children():
                if "device_agent.inference.main" in one.cmdline():
                    return one
        return None

    def kill_inference(self) -> None:
        if one := self.inference():
            self.kills += 1
            with suppress(psutil.Error):
                one.kill()
            until(lambda: not is_alive(one.pid), "the end of the inference process", HANG_S)
            self.dead = self.kills

    def kill_agent(self) -> None:
        """End it as a power cut does; its inference process goes with it, and another agent is started."""
        one = self.inference()
        self.kills += 1
        self.process.kill()
        self.stack.close()
        if one:
            until(lambda: not is_alive(one.pid), "the end of the inference process with its agent", HANG_S)
        self.dead = self.kills
        self.start()

    def ask(self, enough: threading.Event, inputs: np.ndarray, expected: dict[str, np.ndarray]) -> None:
        """Ask until it is enough; of good versions the outputs are known.

        Args:
            enough: Set when it is.
        """
        given = triton.InferInput("input", list(inputs.shape), "FP32")
        given.set_data_from_numpy(inputs)
        client = None
        while not enough.wait(PERIOD_S):
            begun = self.dead
            try:
                client = client or triton.InferenceServerClient(f"127.0.0.1:{self.port}", network_timeout=HANG_S)
                answer = client.infer("digits", [given])
            except Exception as error:  # noqa: BLE001 - of a client that nobody here wrote
                if self.settled == self.kills:
                    self.faults.append(f"{type(error).__name__}: {error}")
                if client:
                    client.close()
                client = None
                continue
            self._judge(answer.get_response()["model_version"], answer.as_numpy("output"), expected)
            self.settled = begun
        if client:
            client.close()

    def _judge(self, version: str, found: np.ndarray, expected: dict[str, np.ndarray]) -> None:
        self.versions[version] += 1
        wanted = expected.get(version)
        if wanted is None or np.abs(found - wanted).max() > TOLERANCE * np.abs(wanted).max():
            self.faults.append(f"version {version} answered {found[0].tolist()}")


@dataclass
class Site:
    """A gateway with its boards.

    Attributes:
        folder: Of the files here.
        first: The release that all boards serve.
        expected: Outputs of the probes by version, of releases that are good.
    """

    folder: Path
    config: Path
    boards: dict[str, Board]
    first: StoredRelease | None = None
    expected: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def probes(self, stored: StoredRelease) -> dict[str, np.ndarray]:
        return load_tensors(stored.path(stored.manifest.probes.sha256).read_bytes())

    def rollout(self, *words: object) -> Forked:
        """Return a context in which a process rolls out."""
        return forked("rollout", *words, "--config", self.config, log=self.folder / "rollout.log")

    def state(self, stored: StoredRelease, attempt: int) -> RolloutState | None:
        """Return what came of a rollout so far; None where it did not begin yet."""
        with suppress(ConfigError, CorruptFile):
            found = open_rollout(self.runs).state
            if (found.plan.sha256, found.plan.attempt) == (stored.sha256, attempt):
                return found
        return None

    def roll_out(self, stored: StoredRelease, attempt: int = 1, devices: str = "*") -> RolloutState:
        """Roll a release out and wait for the end; return what came of it."""
        with self.rollout("start", stored.manifest.reference, *TERMS, "--devices", devices) as process:
            process.wait(HANG_S)
        found = self.state(stored, attempt)
        assert found, (self.folder / "rollout.log").read_text()
        return found

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Have every board asked by a client of its own while the block lasts, and none of them meet a fault."""
        enough, inputs = threading.Event(), self.probes(self.first)["inputs"]
        asking = [
            threading.Thread(target=board.ask, args=[enough, inputs, self.expected], daemon=True)
            for board in self.boards.values()
        ]
        for board in self.boards.values():
            board.versions.clear()
        for thread in asking:
            thread.start()
        try:
            self.until_all_answer()
            yield
            self.until_all_answer()
        finally:
            enough.set()
            for thread in asking:
                thread.join()
        assert not [f"{board.name}: {fault}" for board in self.boards.values() for fault in board.faults]

    def until_nobody_tries(self, stored: StoredRelease) -> None:
        """Wait until no board is about to take a release; none has committed it."""
        stores = [BoardStore(self.folder / name) for name in self.boards]
        until(
            lambda: all(store.record("digits").phase in ENDED for store in stores), "the end of every candidate", HANG_S
        )
        assert all(store.record("digits").committed != stored.manifest.version for store in stores)

    def committed(self) -> set[int]:
        """Return the versions that boards have committed, as they have written down."""
        return {BoardStore(self.folder / name).record("digits").committed for name in self.boards}

    def until_all_answer(self) -> None:
        """Wait until each board has answered from now on."""
        seen = {name: sum(board.versions.values()) for name, board in self.boards.items()}

        def all_answered() -> bool:
            boards = self.boards.items()
            return all(
                sum(board.versions.values()) > seen[name] and board.settled == board.kills for name, board in boards
            )

        until(all_answered, "answers of all boards", HANG_S)


def spoil(value: np.ndarray) -> None:
    """Make one number of one layer NaN."""
    if value.shape == (CLASSES,):
        value[3] = np.nan


def mix_up(value: np.ndarray) -> None:
    """Have each class be called by the name of the one before it: all is finite, and nearly all is wrong."""
    if value.shape[0] == CLASSES:
        value[:] = np.roll(value, 1, axis=0)


def lift(value: np.ndarray) -> None:
    """Raise all outputs alike, which changes no class."""
    if value.shape == (CLASSES,):
        value += 0.5


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a site whose boards trained the demo's plan and serve what came of it."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "deploy/plans/demo.toml").read_text()
    text = text.replace("min_devices = 4", "min_devices = 2").replace("rounds = 10", "rounds = 4")
    (folder / "demo.toml").write_text(text)
    plan = load(folder / "demo.toml", folder)
    with asyncio.Runner() as runner, ExitStack() as ending:
        gateway = make_site(folder / "gateway", "lab")
        gateway.tell_refusals()
        runner.run(gateway.start())
        ending.callback(lambda: runner.run(gateway.stop()))
        config, own = folder / "server.json", gateway.for_server()
        told = {"plan": "demo.toml", "site": "lab", "threads": 1, "broker": own, "data_root": str(folder)}
        config.write_bytes(msgspec.json.encode(told))
        site = Site(folder, config, {name: Board(name, free_port(), folder / f"{name}.json") for name in BOARDS})
        for index, device in enumerate(plan.device):
            board = site.boards[device.name]
            keys = {"device": board.name, "site": "lab", "state_dir": str(folder / board.name), "report_s": 1.0}
            keys |= {"broker": gateway.for_board(board.name), "serve": {"port": board.port}, "trainer": {"threads": 1}}
            if board.name in TRAINING:
                keys["data"] = msgspec.to_builtins(device_data(plan, plan.device, index))
            board.path.write_bytes(msgspec.json.encode(keys))
            board.start()
            ending.callback(lambda board=board: board.stack.close())
        with forked("run", "--config", config, log=folder / "server.log") as process:
            assert process.wait(HANG_S) == 0, (folder / "server.log").read_text()
        made = captured("release", "create", "last", "--config", config, "--name", "digits")
        assert made.code == 0, made.err
        runner.run(all_there(own))
        site.first = find_release(site.runs, "digits")
        site.expected["1"] = site.probes(site.first)["outputs"]
        first = site.roll_out(site.first)
        assert (first.outcome, set(first.offered_boards)) == ("finished", set(BOARDS))
        assert len(first.waves[0]) == 1  # the canary
        yield site
        assert gateway.refusals() == []


async def all_there(own: Broker) -> None:
    """Wait until all boards have said at the broker that they serve."""
    async with asyncio.timeout(HANG_S), watch_site(own, "lab") as look:
        while set(look.models) != set(BOARDS) or len(look.fleet.online) < len(BOARDS):  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.05)


def test_a_poisoned_release_and_one_that_lost_its_accuracy_end_at_the_first_board(site: Site) -> None:
    """Who asks a board meanwhile meets no error, and no answer of theirs."""
    nan = publish_changed(site.runs, site.first, spoil)
    wrong = publish_changed(site.runs, site.first, mix_up, lambda outputs: np.roll(outputs, 1, axis=1))
    with site.asking():
        for stored, gate, devices in ((nan, "NaN", "*"), (wrong, 0.02, "nano-*")):
            found = site.roll_out(stored, devices=devices)
            assert (found.outcome, len(found.offered_boards)) == ("taken-back", 1)
            [reason] = found.failures.values()
            assert names_all(reason, gate)
            assert boards_using(site.runs, stored.manifest.reference) == []
    assert boards_using(site.runs, "digits/1") == list(BOARDS)
    assert all(set(board.versions) == {"1"} for board in site.boards.values())
    assert any(names_all(line, "INFO", "[data]") for line in (site.folder / "pi-0.log").read_text().splitlines())


@dataclass
class Torment:
    """Kills by a seed what takes part in a rollout, at moments of that seed."""

    site: Site
    random: Random

    def through(self, stored: StoredRelease, victims: list[str], devices: str = "*") -> RolloutState:
        """Roll a release out meanwhile; return what came of it.

        Args:
            victims: `server`, or the name of a board behind `agent` or `inference`.
        """
        site = self.site
        with ExitStack() as processes:
            words: tuple[object, ...] = ("start", stored.manifest.reference, *TERMS, "--devices", devices)
            process = processes.enter_context(site.rollout(*words))
            until(lambda: site.state(stored, 1), "the rollout's first record", HANG_S)
            for victim in victims:
                time.sleep(self.random.uniform(0.0, 0.8))  # noqa: TID251 - the moment is the point
                kind, _, name = victim.partition(" ")
                if kind == "server":
                    process.kill()
                    process.wait(HANG_S)
                    process = processes.enter_context(site.rollout("resume"))
                elif kind == "agent":
                    site.boards[name].kill_agent()
                else:
                    site.boards[name].kill_inference()
            process.wait(HANG_S)
        return self._with_all_back(stored)

    def _with_all_back(self, stored: StoredRelease) -> RolloutState:
        """Go on, as an operator does, until no board is behind that was away when the rollout ended."""
        for _ in range(MOST_RESUMES):
            found = self.site.state(stored, 1)
            assert found
            assert found.outcome, (self.site.folder / "rollout.log").read_text()
            if not found.behind:
                return found
            self.site.until_all_answer()
            with self.site.rollout("resume") as process:
                process.wait(HANG_S)
        raise AssertionError(f"still behind: {found}")


def test_the_same_while_agents_inference_processes_and_the_server_are_killed(site: Site) -> None:
    """Only a board that was killed is silent, until it is back. A good release may fail then; a bad one always does."""
    torment = Torment(site, Random(21))
    changes: tuple[tuple[Callable, Callable, str, list[str]], ...] = (
        (spoil, lambda outputs: outputs, "*", ["agent nano-0", "server", "inference pi-1"]),
        (mix_up, lambda outputs: np.roll(outputs, 1, axis=1), "nano-*", ["server", "inference nano-0", "agent nano-0"]),
    )
    good = publish_changed(site.runs, site.first, lift, lambda outputs: outputs + np.float32(0.5))
    site.expected[str(good.manifest.version)] = site.probes(good)["outputs"]
    with site.asking():
        for change, probes, devices, victims in changes:
            bad = publish_changed(site.runs, good, change, probes)
            found = torment.through(bad, victims, devices)
            assert found.outcome == "taken-back", found
            site.until_nobody_tries(bad)
            site.until_all_answer()
        torment.through(good, ["inference nano-0", "agent pi-0", "server", "agent nano-1"])
        site.until_all_answer()
        for attempt in range(2, MOST_RESUMES):
            last = site.roll_out(good, attempt)
            assert last.outcome == "finished", last
            if site.committed() == {good.manifest.version}:
                break
        site.until_all_answer()
    assert site.committed() == {good.manifest.version}
    assert all(board.versions[str(good.manifest.version)] for board in site.boards.values())
    assert all(board.inference() for board in site.boards.values())
