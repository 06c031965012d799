"""Lower bound of serving: the same bytes without HTTP, JSON or checks.

As `python inference_floor.py SOCKET FOLDER REQUEST_BYTES answer` it answers whatever comes on a Unix socket, so many
bytes of it each time, with the bytes of one answer of the release in the folder; with `compute` in place of `answer`
ONNX Runtime runs for each, in the loop. It says `ready` once it listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
from measure import Figure

from device_agent.commands.bench_inference import (
    SHARES,
    WARM_UP_S,
    encode_request,
    time_concurrent_requests,
    time_requests,
)
from device_agent.inference.http.message import Response
from device_agent.inference.http.tensors import InferenceRequest, write_inference
from device_agent.inference.messages import compute_percentiles
from device_agent.inference.release_folder import ReleaseFiles, read_folder
from device_agent.inference.session import open_model
from device_agent.inference.settings import InferenceSettings
from shared.protocol.inference.release import read_manifest
from shared.runtime import malloc

ROOT, CLIENTS = Path(__file__).parents[2], 8
ANSWER, COMPUTE = "answer", "compute"
SMALL_S = 1e-3
"""Beside what takes longer, nobody sees what bytes cost that go in and out."""


class Bare(asyncio.Protocol):
    """Answers.

    Args:
        size: Bytes of a request.
        answer: Returns the bytes of an answer.
    """

    def __init__(self, size: int, answer: Callable[[], bytes]) -> None:
        self._size, self._answer, self._had = size, answer, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._had += len(data)
        while self._had >= self._size:
            self._had -= self._size
            self._transport.write(self._answer())


async def serve(path: str, size: int, answer: Callable[[], bytes]) -> None:
    """Answer until the standard input ends."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_unix_server(lambda: Bare(size, answer), path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    listener.close()


def main() -> None:
    """Serve what the command line names."""
    path, folder, size, what = sys.argv[1:]
    malloc.tune()
    files = read_folder(Path(folder))
    model = open_model(files.manifest, files.parts, InferenceSettings(port=0, socket=path, memory_bytes=1 << 31))
    inputs = np.zeros((1, *model.input.shape[1:]), model.input.dtype)
    body, json_bytes = write_inference(
        model.run(inputs), model.output, (files.name, files.version), InferenceRequest(inputs, "", is_binary=True)
    )
    said = Response(200, body, json_bytes).encode(keep=True)

    def computed() -> bytes:
        model.run(inputs)
        return said

    asyncio.run(serve(path, int(size), computed if what == COMPUTE else lambda: said))


@contextmanager
def bare(path: Path, folder: Path, request_bytes: int, what: str) -> Iterator[str]:
    """Serve so while the block lasts; yields the socket's path.

    Args:
        what: `answer`, or `compute` before it.
    """
    command = [sys.executable, str(Path(__file__)), str(path), str(folder), str(request_bytes), what]
    with Popen(command, stdin=PIPE, stdout=PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        assert process.stdin
        assert process.stdout
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the bare server did not start; its last words stand above")
            yield str(path)
        finally:
            process.stdin.close()


def ask(files: ReleaseFiles, folder: Path, what: str, seconds: float) -> tuple[list[float], float]:
    """Ask a bare loop; return p50, p95 and p99 of one client's requests, and how many a second many clients get.

    Args:
        files: A release.
        folder: In which it lies.
        what: `answer`, or `compute` before it.
        seconds: For how long, one client and then many.
    """
    request = encode_request(files.name, read_manifest(files.manifest, "manifest").graph.input, 1)
    with tempfile.TemporaryDirectory() as name, bare(Path(name) / "s", folder, len(request), what) as path:
        time_requests(path, request, WARM_UP_S)
        one = time_requests(path, request, seconds)
        began = time.perf_counter()
        many = time_concurrent_requests(path, request, seconds, CLIENTS)
        return compute_percentiles(one, SHARES), len(many) / (time.perf_counter() - began)


def rows_of_a_bare_loop(files: ReleaseFiles, folder: Path, seconds: float, alone: tuple[float, float]) -> list[Figure]:
    """Return what is told beside the rows of HTTP.

    Args:
        files: A release.
        folder: In which it lies.
        seconds: For how long each is measured.
        alone: Mean seconds of ONNX Runtime alone, and the 99th percentile of those in the inference process.
    """
    mean_s, p99_s = alone
    bare_loop, rows = f"{files.name}: a bare loop", list[Figure]()
    if mean_s <= SMALL_S:
        (empty, _, _), most_hz = ask(files, folder, ANSWER, seconds)
        rows += [
            Figure(f"{bare_loop} with constant bytes, p50", empty * 1e3, "ms"),
            Figure(f"{bare_loop} with constant bytes to ONNX Runtime alone, {CLIENTS} clients", most_hz * mean_s, "x"),
        ]
    (p50, _, p99), computed_hz = ask(files, folder, COMPUTE, seconds)
    return [
        *rows,
        Figure(f"{bare_loop} and ONNX Runtime, p50", p50 * 1e3, "ms"),
        Figure(f"{bare_loop} and ONNX Runtime to that alone, p99", p99 / p99_s, "x"),
        Figure(f"{bare_loop} and ONNX Runtime to that alone, {CLIENTS} clients", computed_hz * mean_s, "x"),
    ]


if __name__ == "__main__":
    main()
