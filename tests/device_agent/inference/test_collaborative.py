"""A network whose upper half the server runs, as an application on the board sees it: answers, 503, fall-back."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.commands.run import serve
from device_agent.config import ServeConfig, load
from device_agent.inference.collaborative import pipe as pipe_module
from device_agent.inference.collaborative.interface import Half, TopReply
from device_agent.inference.collaborative.pipe import TopPipe, TopRelay
from device_agent.inference.http.routes import NOT_YET
from device_agent.inference.release_folder import read_folder
from device_agent.inference.session import open_model
from edge_server.plan.server_config import ServerConfig
from edge_server.release.store import export_release
from edge_server.release.top_server import service
from shared.errors import ConfigError, InferenceRefused, Unreachable, WireError
from shared.protocol.inference.collaborative import TopTiming
from shared.protocol.inference.release import PARAMETERS, PROBES
from shared.protocol.topics import TOPS
from shared.runtime.executor import background
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import build_presence
from tests.device_agent.inference.test_process import UnixConnection
from tests.edge_server.release.runs import release_with_halves

SITE = "collaborative"
CLOSE = 1e-5
OK, UNAVAILABLE = 200, 503
FEATURE_BYTES = 10 * 6 * 14 * 14 * 4
"""Of ten probes at the first cut of LeNet."""


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> tuple[Path, Path]:
    """Return the folder of runs, and that of a release with halves as a board has it."""
    runs = tmp_path_factory.mktemp("runs")
    stored = release_with_halves(runs, "lenet", cut=1)
    export_release(stored, runs / "board")
    return runs, runs / "board"


def asked(path: str, method: str, url: str, told: object = None) -> tuple[int, dict]:
    """Return status and answer of a request over the Unix socket; 0 where nobody listens."""
    connection = UnixConnection(path)
    try:
        connection.request(method, url, None if told is None else json.dumps(told))
        answer = connection.getresponse()
        data = answer.read()
    except OSError:
        return 0, {}
    finally:
        connection.close()
    return answer.status, json.loads(data) if data else {}


@dataclass
class Board:
    """A board that runs a test, with an application on it that asks again and again."""

    config: Path
    probes: dict[str, np.ndarray]

    async def ask(self, method: str, url: str, told: object = None) -> tuple[int, dict]:
        path = str(self.config.with_name("state") / "serve.sock")
        return await asyncio.to_thread(asked, path, method, f"/v2/{url}", told)

    async def stats(self, name: str) -> dict:
        """Return what a model has done, once it is served: models begin one after the other."""
        status, told = await self.ask("GET", f"models/{name}/stats")
        while status != OK:
            await asyncio.sleep(0.05)
            status, told = await self.ask("GET", f"models/{name}/stats")
        return told["model_stats"][0]["parameters"]

    async def infer(self, *states: object) -> dict:
        """Have all probes inferred until the answer is by one of these, or has one of these codes; return it."""
        inputs = self.probes["inputs"]
        tensor = {"name": "input", "shape": inputs.shape, "datatype": "FP32", "data": inputs.ravel().tolist()}
        while True:
            status, answer = await self.ask("POST", "models/digits/infer", {"inputs": [tensor]})
            found = {status, answer.get("parameters", {}).get("computed_by")} & set(states)
            if found and answer.get("error") != NOT_YET:
                break
            await asyncio.sleep(0.05)
        if status == OK:
            [output] = answer["outputs"]
            expected = self.probes["outputs"]
            found = np.array(output["data"], np.float32).reshape(expected.shape)
            assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()
        return answer

    async def infer_alone(self, why: str, *, whole: bool) -> None:
        """Have them inferred where no server is: by the whole network, or not at all, and why is said."""
        answer = await self.infer("device" if whole else UNAVAILABLE)
        if whole:
            assert answer["parameters"]["server_s"] == answer["parameters"]["bytes_up"] == 0
        else:
            assert why in answer["error"]

    async def infer_by_both(self) -> None:
        """Have them inferred by both halves, and look at the parts."""
        parts = (await self.infer("server"))["parameters"]
        assert min(parts["device_s"], parts["link_s"], parts["server_s"]) > 0
        assert parts["bytes_up"] > FEATURE_BYTES > parts["bytes_down"] > self.probes["outputs"].nbytes


@asynccontextmanager
async def serving_tops(broker: Broker, runs: Path, number: int):
    presence = build_presence(TOPS, SITE, f"instance {number}", number)
    transport = MqttTransport(broker, f"{SITE}.{TOPS}", lambda: presence)
    config = ServerConfig(plan="none.toml", site=SITE, data_dir=str(runs))
    async with transport.running(), background(service.compose(config, transport).run()):
        yield


@pytest.mark.broker
@pytest.mark.parametrize("whole", [False, True])
async def test_an_application_is_answered_by_both_halves(mosquitto_port, released, made, tmp_path, whole):
    """Without a server, with one, when it has ended: told apart in every answer, and in the statistics."""
    (runs, folder), broker = released, Broker(port=mosquitto_port)
    board = Board(tmp_path / "agent.toml", load_file(folder / PROBES))
    board.config.write_text(
        f'device = "pi"\nsite = "{SITE}"\nstate_dir = "state"\n[broker]\nport = {broker.port}\n'
        f'[serve]\nport = 0\nreleases = ["{folder}", "{made["tiny-1"]}"]\nsplit = "cut"\n'
        f"[serve.cut]\ndeadline_s = 2.0\nwhole = {str(whole).lower()}\n"
    )
    async with background(serve(load(board.config))):
        await board.infer_alone("", whole=whole)
        assert "cut" not in (await board.stats("tiny"))  # it has no halves
        for number in (1, 2):
            async with serving_tops(broker, runs, number):
                await board.infer_by_both()
            await board.infer_alone("ended", whole=whole)
        figures = await board.stats("digits")
        assert figures["errors"] == 0
        assert figures["cut"]["answered"]["server"] >= 2
        assert figures["cut"]["refused"]["unreachable"] >= 3
        assert 0 < figures["cut"]["link_s"]["p50"] <= figures["cut"]["link_s"]["p99"]


def test_the_lower_half_takes_no_more_parameters_than_it_has(released, settings, copied):
    """And a release without halves says how to make one that has."""
    files = read_folder(released[1])
    half = open_model(files.manifest, files.parts, settings, is_half=True)
    probes = load_file(released[1] / PROBES)
    assert half.output.name == "features"
    assert half.run(probes["inputs"]).shape[1:] == tuple(half.output.shape[1:])
    assert 0 < len(half.graph.parameters) < len(load_file(released[1] / PARAMETERS))
    other = read_folder(copied("tiny-1"))
    with pytest.raises(ConfigError, match="--halves"):
        open_model(other.manifest, other.parts, settings, is_half=True)


HALF = Half("digits", 1, bytes(32))


@asynccontextmanager
async def joined(ask):
    """Join the two ends of a pipe; yields the process's, and what ends the agent's."""
    ours, theirs = socket.socketpair()
    pipe = TopPipe(*await asyncio.open_connection(sock=theirs))
    relaying = asyncio.create_task(TopRelay(ask).run(ours))
    hearing = asyncio.create_task(pipe.run())
    try:
        yield pipe, relaying, hearing
    finally:
        for task in (relaying, hearing):
            task.cancel()
        await asyncio.gather(relaying, hearing, return_exceptions=True)


async def test_requests_pass_the_pipe_beside_one_another():
    """Answers come in any order, and so do refusals, each to whoever asked."""
    both = asyncio.Event()

    async def ask(half: Half, parts, deadline_s: float) -> TopReply:
        assert half == HALF
        data = b"".join(parts)
        if data == b"first":
            await both.wait()
        both.set()
        if data == b"busy":
            raise InferenceRefused("too many", reason="busy")
        if data == b"gone":
            raise Unreachable("nobody is there")
        if data == b"odd":
            raise WireError("it says what nobody understands")
        return TopReply(data * 2, TopTiming(waited_s=1.0, compute_s=2.0), deadline_s, 10, 20)

    async with joined(ask) as (pipe, _, _):
        words = (b"first", b"second", b"busy", b"gone", b"odd", bytes(1 << 20))
        told = await asyncio.gather(
            *(pipe(HALF, [memoryview(one[:1]), memoryview(one[1:])], 4.0) for one in words), return_exceptions=True
        )
    assert told[0] == TopReply(b"firstfirst", TopTiming(waited_s=1.0, compute_s=2.0), 4.0, 10, 20)
    assert told[1].outputs == b"secondsecond"
    assert isinstance(told[2], InferenceRefused)
    assert told[2].reason == "busy"
    assert isinstance(told[3], Unreachable)
    assert isinstance(told[4], Unreachable)
    assert told[5].outputs == bytes(2 << 20)


async def test_an_agent_that_is_gone_leaves_nobody_waiting():
    async def ask(*_: object) -> TopReply:
        await asyncio.Event().wait()
        raise AssertionError

    async with joined(ask) as (pipe, relaying, hearing):
        waiting = asyncio.ensure_future(pipe(HALF, [memoryview(b"features")], 60.0))
        await asyncio.sleep(0)
        relaying.cancel()
        with pytest.raises(Unreachable):
            await waiting
        await hearing
        with pytest.raises(Unreachable):
            await pipe(HALF, [memoryview(b"features")], 60.0)


async def test_an_agent_that_does_not_answer_is_waited_for_no_longer_than_the_deadline_and_a_little(monkeypatch):
    async def ask(*_: object) -> TopReply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(pipe_module, "SLACK_S", 0.0)
    async with joined(ask) as (pipe, relaying, _):
        with pytest.raises(Unreachable):
            await pipe(HALF, [memoryview(b"features")], 0.01)
        assert not relaying.done()


def test_how_the_server_is_asked_is_checked_when_the_file_is_read():
    for wrong in ({"codec": "masked"}, {"bits": 0}, {"bits": 17}, {"deadline_s": 0.0}, {"deadline_s": 61.0}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"split": "cut", "cut": wrong}, ServeConfig)
