"""Inference process as a real child: foreign client, crash, limits, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import signal
import socket
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from device_agent.inference.http.message import Response
from device_agent.inference.http.routes import NOT_YET
from device_agent.inference.http.server import HttpServer
from device_agent.inference.messages import Ask, Figures
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles, read_folder
from shared.errors import ConfigError, ServingDied, ServingRefused
from shared.protocol.inference.release import PARAMETERS, PROBES, read_manifest, write_manifest
from tests.machine import free_port
from tests.naming import names_all, naming

LIMIT_S = 300.0


class UnixConnection(http.client.HTTPConnection):
    """The standard library's client over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


def asked(path: str, method: str, url: str, told: object = None) -> tuple[int, dict]:
    connection = UnixConnection(path)
    connection.request(method, url, None if told is None else json.dumps(told))
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data else {}


def probe(made: Path) -> tuple[dict, list[float]]:
    """Return a request of one probe, and what PyTorch makes of it."""
    probes = load_file(made / PROBES)
    one = probes["inputs"][:1]
    tensor = {"name": "input", "shape": one.shape, "datatype": "FP32", "data": one.ravel().tolist()}
    return {"inputs": [tensor]}, probes["outputs"][0].tolist()


@pytest.fixture
def served(made, settings, real):
    """Run a test's coroutine beside a process that serves `tiny`, version 1; it may be given others of it."""
    files = {(one.name, one.version): one for one in map(read_folder, made.values())}

    def find(name: str, version: int) -> ReleaseFiles:
        if (name, version) not in files:
            raise ConfigError(f"there is no {name}/{version}")
        return files[name, version]

    def story(routine, start=("tiny", 1), **changes: object):
        async def whole() -> None:
            told = msgspec.structs.replace(settings, **changes)
            process = InferenceProcess(told, find, {start[0]: find(*start)})
            running = asyncio.create_task(process.run())
            try:
                async with asyncio.timeout(LIMIT_S):
                    await process.ready.wait()
                    await routine(process, told)
                assert not running.done()
            finally:
                running.cancel()
                await asyncio.wait({running})
                assert not process.pid

        real(whole())

    return story


def test_tritonclient_asks_it_over_loopback(made, served):
    """Of NVIDIA, for Triton: liveness, metadata, JSON and bytes, versions, and errors that it understands."""
    triton = pytest.importorskip("tritonclient.http")
    port = free_port()

    def ask() -> None:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("lenet")
        assert client.is_model_ready("lenet", "1")
        assert not client.is_model_ready("lenet", "7")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        told = client.get_model_metadata("lenet")
        assert (told["name"], told["versions"]) == ("lenet", ["1"])
        assert told["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 28, 28]}]
        probes = load_file(made["lenet"] / PROBES)
        for binary_in, binary_out in ((True, True), (True, False), (False, True), (False, False)):
            given = triton.InferInput("input", list(probes["inputs"].shape), "FP32")
            given.set_data_from_numpy(probes["inputs"], binary_data=binary_in)
            wanted = triton.InferRequestedOutput("output", binary_data=binary_out)
            answer = client.infer("lenet", [given], outputs=[wanted], request_id="7")
            found = answer.as_numpy("output")
            assert np.abs(found - probes["outputs"]).max() <= 1e-5 * np.abs(probes["outputs"]).max()
            assert answer.get_response()["id"] == "7"
        assert client.infer("lenet", [given], model_version="1").as_numpy("output").shape == (10, 10)
        small = triton.InferInput("input", [1, 2], "FP32")
        small.set_data_from_numpy(np.zeros((1, 2), np.float32))
        with pytest.raises(triton.InferenceServerException, match=r"'input' .*\[n, 1, 28, 28\]"):
            client.infer("lenet", [small])
        large = triton.InferInput("input", [1000, 1, 28, 28], "FP32")
        large.set_data_from_numpy(np.zeros((1000, 1, 28, 28), np.float32))
        with pytest.raises(triton.InferenceServerException, match="max_body_mb"):
            client.infer("lenet", [large])
        client.close()

    async def story(process, settings) -> None:
        await asyncio.to_thread(ask)
        figures = await process.figures("lenet", 1)
        assert (figures.requests, figures.errors) == (5, 0)

    served(story, start=("lenet", 1), port=port)


def test_versions_are_switched_and_what_cannot_be_served_changes_nothing(made, served, copied):
    """The standard library is client enough; the process has neither torch nor onnx in it."""
    told, first = probe(made["tiny-1"])
    _, second = probe(made["tiny-2"])

    async def story(process, settings) -> None:
        async def ask(method: str, url: str, given: object = None) -> tuple[int, dict]:
            return await asyncio.to_thread(asked, settings.socket, method, url, given)

        async def answers() -> list[float]:
            status, found = await ask("POST", "/v2/models/tiny/infer", told)
            assert status == 200
            return found["outputs"][0]["data"]

        assert await answers() == pytest.approx(first, rel=1e-4, abs=1e-5)
        await process.load("tiny", 2)
        assert (await ask("GET", "/v2/models/tiny"))[1]["versions"] == ["1", "2"]
        assert await answers() == pytest.approx(first, rel=1e-4, abs=1e-5)
        assert (await ask("POST", "/v2/models/tiny/versions/2/infer", told))[0] == 200
        await process.switch("tiny", 2)
        assert await answers() == pytest.approx(second, rel=1e-4, abs=1e-5)
        with pytest.raises(ServingRefused, match="tiny/3"):
            await process.load("tiny", 3)
        with pytest.raises(ServingRefused, match=naming(3, "'tiny'")):
            await process.switch("tiny", 3)
        await process.unload("tiny", 2)  # the other one answers
        assert await answers() == pytest.approx(first, rel=1e-4, abs=1e-5)
        await process.load("tiny", 2)
        await process.switch("tiny", 2)
        await process.unload("tiny", 1)
        status, found = await ask("GET", "/v2/models/tiny/versions/1/ready")
        assert (status, names_all(found["error"], 1, "'tiny'")) == (404, True)
        assert (await ask("GET", "/v2/models/other"))[0] == 404
        assert (await ask("GET", "/elsewhere"))[0] == 404
        assert (await ask("GET", "/v2/models/tiny/infer"))[0] == 405
        assert (await ask("POST", "/v2/models/tiny/infer", {"inputs": []}))[0] == 400
        assert (await ask("GET", "/v2/health/live"))[0] == 200
        mapped = {Path(one.path).name for one in psutil.Process(process.pid).memory_maps()}
        assert not [one for one in mapped if one.startswith(("libtorch", "onnx_cpp"))]
        assert os.stat(settings.socket).st_mode & 0o077 == 0  # noqa: PTH116 - at once

    served(story)


def test_a_killed_process_is_started_again_with_what_it_served(made, served):
    """Who asks meanwhile is told at once; the version that answered last answers again."""
    told, _ = probe(made["tiny-1"])
    _, second = probe(made["tiny-2"])

    async def story(process, settings) -> None:
        await process.load("tiny", 2)
        await process.switch("tiny", 2)
        os.kill(process.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(process.figures("tiny", 2))
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ServingDied):
            await asking
        await process.figures("tiny", 1)  # waits for the next one
        assert process.starts == 2
        status, found = await asyncio.to_thread(asked, settings.socket, "POST", "/v2/models/tiny/infer", told)
        assert (status, found["outputs"][0]["data"]) == (200, pytest.approx(second, rel=1e-4, abs=1e-5))
        assert found["model_version"] == "2"

    served(story)


async def test_a_release_that_was_damaged_meanwhile_is_told_and_the_process_goes_on(copied, settings, caplog):
    folder = copied("tiny-1")
    files = read_folder(folder)
    (folder / PARAMETERS).write_bytes(b"")
    process = InferenceProcess(settings, lambda *_: files, {"tiny": files})
    running = asyncio.create_task(process.run())
    async with asyncio.timeout(LIMIT_S):
        await process.ready.wait()
    for path in ("/v2/health/ready", "/v2/models/tiny"):  # as in the moment after a start: it may come yet
        status, told = await asyncio.to_thread(asked, settings.socket, "GET", path)
        assert (status, told["error"]) == (503, NOT_YET)
    running.cancel()
    await asyncio.wait({running})
    [(name, version, error)] = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert (name, version, PARAMETERS in str(error)) == ("tiny", 1, True)


@pytest.mark.virtual_time
async def test_a_process_that_ends_again_and_again_is_started_further_and_further_apart(settings, caplog):
    """In virtual time: after 1, 2, 4 seconds and so on, up to a minute; nothing is raised."""

    starts = []
    loop = asyncio.get_running_loop()
    process = InferenceProcess(settings, lambda *_: None, {}, clock=loop.time)

    async def live() -> str:
        starts.append(loop.time())
        if len(starts) == 1:
            raise OSError(12, "no memory")
        return "it ended"

    process.live = live
    running = asyncio.create_task(process.run())
    await asyncio.sleep(400)
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
    assert starts[:9] == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert "no memory" in caplog.text


async def test_a_process_that_cannot_listen_says_so_and_what_waits_for_it_is_told(made, settings, caplog, tmp_path):
    files = read_folder(made["tiny-1"])
    told = msgspec.structs.replace(settings, socket=str(tmp_path / "no" / "such" / "folder"))
    process = InferenceProcess(told, lambda *_: files, {"tiny": files})
    cause = await asyncio.wait_for(process.live(), LIMIT_S)
    assert names_all(cause, 71, "serve.socket")
    with pytest.raises(ServingDied):
        await process.commands.request(Ask("tiny", 1), Figures)


async def test_a_port_that_is_taken_is_named_by_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = HttpServer(lambda _: Response(200, b""), 1, 1.0, lambda: 0.0)
        with pytest.raises(ConfigError, match=naming("serve.port", port)):
            await server.listen(port, "")
    with pytest.raises(ConfigError, match=naming("serve.socket", "/no/such/folder")):
        await server.listen(0, "/no/such/folder")


async def test_too_little_memory_is_named_by_its_setting(made, settings):
    """However the process dies of it: of a library's own words for that nobody knows what to do."""
    files = read_folder(made["tiny-1"])
    told = msgspec.structs.replace(settings, memory_bytes=8 << 20)
    process = InferenceProcess(told, lambda *_: files, {"tiny": files})
    cause = await asyncio.wait_for(process.live(), LIMIT_S)
    assert names_all(cause, "serve.memory_mb", "8 MiB")


async def test_what_a_folder_has_answers_again_when_a_rollouts_release_is_taken_back(made, settings):
    """Also after a restart, when nothing but the rollout's was loaded; a third version finds room beside the second."""
    files = {(one.name, one.version): one for one in map(read_folder, made.values())}
    told, first = probe(made["tiny-1"])
    folder = {"tiny": files["tiny", 1]}
    process = InferenceProcess(settings, lambda *key: files[key], {"tiny": files["tiny", 2]}, folders=folder)
    running = asyncio.create_task(process.run())
    async with asyncio.timeout(LIMIT_S):
        await process.ready.wait()
        await process.unload("tiny", 2)
        status, found = await asyncio.to_thread(asked, settings.socket, "POST", "/v2/models/tiny/infer", told)
        assert (status, found["model_version"]) == (200, "1")
        assert found["outputs"][0]["data"] == pytest.approx(first, rel=1e-4, abs=1e-5)
        await process.load("tiny", 2)
        await process.switch("tiny", 2)
        third = tmp_third(files["tiny", 2])
        files["tiny", 3] = third
        await process.load("tiny", 3)
        assert (await asyncio.to_thread(asked, settings.socket, "GET", "/v2/models/tiny"))[1]["versions"] == [
            "2",
            "3",
        ]
    running.cancel()
    await asyncio.wait({running})


def tmp_third(files: ReleaseFiles) -> ReleaseFiles:
    """Return the same release with another number."""
    manifest = msgspec.structs.replace(read_manifest(files.manifest, "manifest"), version=3)
    return dataclasses.replace(files, version=3, manifest=write_manifest(manifest))
