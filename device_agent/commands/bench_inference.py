"""`device-agent bench-inference`: measure latency, throughput and energy of a served model."""

from __future__ import annotations

import argparse
import math
import selectors
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import msgspec
import psutil  # type: ignore[import-untyped]

from device_agent.config import BoardConfig, Provider, ServeConfig, load
from device_agent.inference.http import BINARY_SIZE, DATATYPES
from device_agent.inference.messages import Figures, compute_percentiles
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles, read_folder
from device_agent.inference.settings import InferenceSettings, choose_settings, runs_on_battery
from device_agent.measurement.board import Board, load_measuring, open_board
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.power_log import describe_energy
from shared.errors import ConfigError
from shared.protocol.inference.release import TensorSpec, read_manifest
from shared.runtime import backports, processes
from shared.runtime.clock import monotonic
from shared.runtime.executor import background, in_thread
from shared.runtime.extras import find_packaged_config
from shared.runtime.text_table import printable_text, write_text

MAX_SECONDS, MAX_CLIENTS = 3600.0, 64
WARM_UP_S = 0.3
SHARES = (0.5, 0.95, 0.99)
MAX_SHOWN = 200
"""Printed bytes of a refusal."""
UNMETERED = "no power source"
"""Reported source of the energy if nothing measures it."""
CHUNK = 1 << 16
FORMATS = {"FP16": "e", "FP32": "f", "FP64": "d", "INT32": "i", "INT64": "q", "UINT8": "B"}


class InferenceBench(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the measurement.

    Attributes:
        batch: Examples in a request.
        clients: Concurrent clients, each with one request in flight.
        provider: Execution provider, as ONNX Runtime names it.
        ready_s: Seconds from the start of the process until the model answers.
        pss_mb: Memory of the process before the first request, in MB; shared memory counts proportionally.
        rss_mb: As `pss_mb`; shared memory counts in full.
        throughput_hz: Requests per second of all clients.
        request_s: p50, p95 and p99 of a request as seen by a client.
        runtime_s: p50, p95 and p99 within ONNX Runtime alone.
        joules: Energy of the board per request; None if unknown.
        source: Source of the energy, or why it is unknown.
        metrics: Metrics of the release's task, as measured where it was made; unset for a classification without a
            table `[task]`.
    """

    model: str
    batch: int
    clients: int
    threads: int
    provider: str
    ready_s: float
    pss_mb: float
    rss_mb: float
    requests: int
    throughput_hz: float
    request_s: tuple[float, float, float]
    runtime_s: tuple[float, float, float]
    joules: float | None
    source: str
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    which = parser.add_mutually_exclusive_group(required=find_packaged_config("agent.toml") is None)
    which.add_argument("--release", type=Path, metavar="DIR", help="a folder written by `edge-server release export`")
    which.add_argument(
        "--config", type=Path, metavar="FILE", help="the agent's TOML file; measure the first release that it serves"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the measurement; default: %(default)g")
    parser.add_argument("--clients", type=int, default=1, help="concurrent clients; default: %(default)d")
    parser.add_argument("--batch", type=int, default=1, help="examples in a request; default: %(default)d")
    help_ = "execution provider, as in `[serve]`: auto, cpu, cuda, tensorrt; run once for each to compare them"
    parser.add_argument("--provider", choices=get_args(Provider), help=help_)
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="output format; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Measure with a process and a socket of its own, which does not disturb a running agent."""
    if not 0 < options.seconds <= MAX_SECONDS or not 1 <= options.clients <= MAX_CLIENTS or options.batch < 1:
        raise ConfigError(f"--seconds must be up to {MAX_SECONDS:g}, --clients 1 to {MAX_CLIENTS}, --batch 1 or more")
    path = options.config or (None if options.release else find_packaged_config("agent.toml"))
    config = load(path) if path else None
    processes.configure("warning", options.verbose)
    serve = (config.serve if config else None) or ServeConfig()
    if not options.release and not serve.releases:
        raise ConfigError(f"{path}: serve.releases names no folder; name one with --release DIR")
    files = read_folder(options.release or Path(serve.releases[0]))
    board_config = config.board if config else BoardConfig()
    board = open_board(
        load_measuring(board_config, Path(config.state_dir)) if config else MeasurementSettings(board=board_config)
    )
    serve = msgspec.structs.replace(serve, port=0, socket="", max_batch=max(serve.max_batch, options.batch))
    if options.provider:
        serve = msgspec.structs.replace(serve, provider=options.provider)
    with tempfile.TemporaryDirectory() as folder:
        battery = runs_on_battery(Path(board_config.root))
        settings = choose_settings(serve, Path(folder), "warning", board.profile.inference, on_battery=battery)
        result = backports.run(measure(files, settings, board, options.seconds, (options.clients, options.batch)))
    text = msgspec.json.encode(result).decode() if options.format == "json" else "\n".join(_format_lines(result))
    write_text(sys.stdout, text)
    return 0


async def measure(
    files: ReleaseFiles, settings: InferenceSettings, board: Board, seconds: float, load_: tuple[int, int]
) -> InferenceBench:
    """Serve a release in a process of its own and measure requests to it.

    Args:
        load_: Number of clients, and examples in each request.
    """
    clients, batch = load_
    manifest = read_manifest(files.manifest, "manifest")
    request = encode_request(files.name, manifest.graph.input, batch)
    process = InferenceProcess(settings, lambda *_: files, {files.name: files})
    began = monotonic()
    async with background(process.run()):
        await process.ready.wait()
        if cause := process.refused.get(files.name):
            raise ConfigError(f"{cause}; the release cannot be measured: export it again")
        ready_s, memory = monotonic() - began, psutil.Process(process.pid).memory_full_info()
        await in_thread(time_requests, settings.socket, request, WARM_UP_S)
        if board.power:
            board.power.start()
            board.power.hurry(seconds)
        began = monotonic()
        durations = await in_thread(time_concurrent_requests, settings.socket, request, seconds, clients)
        ended = monotonic()
        provider = await in_thread(ask_provider, settings.socket, files.name)
        figures: Figures = await process.figures(files.name, files.version)
    joules, source = _read_energy(board, began, ended)
    p50, p95, p99 = compute_percentiles(durations, SHARES)
    return InferenceBench(
        model=manifest.reference,
        batch=batch,
        clients=clients,
        threads=settings.threads,
        provider=provider,
        ready_s=ready_s,
        pss_mb=memory.pss / 1e6,
        rss_mb=memory.rss / 1e6,
        requests=len(durations),
        throughput_hz=len(durations) / (ended - began),
        request_s=(p50, p95, p99),
        runtime_s=(figures.p50_s, figures.p95_s, figures.p99_s),
        joules=None if joules is None else joules / len(durations),
        source=source,
        metrics=manifest.task.values if manifest.task else msgspec.UNSET,
    )


def _read_energy(board: Board, began: float, ended: float) -> tuple[float | None, str]:
    """Return the board's joules between two moments, None if unknown, and their source."""
    energy = board.power.energy(began, ended) if board.power else None
    if board.power is None or energy is None:
        return None, UNMETERED
    return energy.joules, describe_energy(board.power.source, energy).source


def encode_request(name: str, spec: TensorSpec, batch: int) -> bytes:
    """Return a complete inference request with arbitrary numbers, as binary data after JSON."""
    shape = (batch, *spec.shape[1:])
    kind = DATATYPES[spec.dtype]
    data = struct.pack(f"<{FORMATS[kind]}", 1) * math.prod(shape)
    tensor = {"name": spec.name, "shape": shape, "datatype": kind, "parameters": {BINARY_SIZE: len(data)}}
    head = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    lines = (
        f"POST /v2/models/{name}/infer HTTP/1.1",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
    )
    return "\r\n".join([*lines, "", ""]).encode("ascii") + head + data


def ask_provider(path: str, name: str) -> str:
    """Return the execution provider of a model, as ONNX Runtime names it.

    Args:
        path: Unix socket of the inference process.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"GET /v2/models/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("ascii"))
        body = _read_answer(connection).partition(b"\r\n\r\n")[2]
    return str(msgspec.json.decode(body)["parameters"]["provider"])


def time_requests(path: str, request: bytes, seconds: float, every_s: float = 0.0) -> list[float]:
    """Send requests over one connection; return the seconds of each.

    Args:
        path: Unix socket of the inference process.
        every_s: Period of requests; a slower answer delays the next one.

    Raises:
        ConfigError: A request was refused.
    """
    durations, pause = list[float](), threading.Event()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            connection.sendall(request)
            answer = _read_answer(connection)
            durations.append(time.perf_counter() - began)
            if every_s > durations[-1]:
                pause.wait(every_s - durations[-1])
            _require_success(answer)
    return durations


def time_concurrent_requests(path: str, request: bytes, seconds: float, clients: int) -> list[float]:
    """Send requests over several connections without pauses; return the seconds of each.

    One thread serves all connections: several would wait for one another and distort the measurement.

    Args:
        path: Unix socket of the inference process.

    Raises:
        ConfigError: As `time_requests`.
    """
    if clients == 1:
        return time_requests(path, request, seconds)
    durations = list[float]()
    with ExitStack() as stack:
        selector, began = stack.enter_context(selectors.DefaultSelector()), dict[socket.socket, float]()
        for _ in range(clients):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(path)
            selector.register(connection, selectors.EVENT_READ, connection)
            began[connection] = time.perf_counter()
            connection.sendall(request)
        ends = time.perf_counter() + seconds
        while began:
            for key, _ in selector.select():
                connection = key.data
                answer = _read_answer(connection)
                now = time.perf_counter()
                durations.append(now - began.pop(connection))
                _require_success(answer)
                if now < ends:
                    began[connection] = now
                    connection.sendall(request)
    return durations


def _require_success(answer: bytes) -> None:
    if answer.startswith(b"HTTP/1.1 200 "):
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = (head.partition(b"\r\n")[0], body[:MAX_SHOWN])
    status, detail = (printable_text(part.decode("utf-8", "replace")) for part in parts)
    raise ConfigError(f"the request was refused: {status}: {detail}")


def _read_answer(connection: socket.socket) -> bytes:
    data = b""
    while (split := data.find(b"\r\n\r\n")) < 0 or len(data) < split + 4 + _parse_length(data[:split]):
        if not (more := connection.recv(CHUNK)):
            raise ConfigError("the inference process ended; see its messages above")
        data += more
    return data


def _parse_length(head: bytes) -> int:
    """Return the Content-Length of an answer.

    Raises:
        ConfigError: The header is missing or not a number.
    """
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    raise ConfigError("the inference process answered without a Content-Length; reinstall to match the versions")


def _format_lines(result: InferenceBench) -> Sequence[str]:
    request, runtime = (
        ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in zip(("p50", "p95", "p99"), some, strict=True))
        for some in (result.request_s, result.runtime_s)
    )
    joules = f"{result.joules:.4g} J by {result.source}" if result.joules is not None else f"unknown: {result.source}"
    metrics = result.metrics.items() if result.metrics else ()
    load = f"batch {result.batch}, {result.clients} clients, {result.threads} threads"
    return (
        f"model {result.model}, {load}, {result.provider}",
        f"ready in {result.ready_s:.2f} s",
        f"before the first request {result.pss_mb:.1f} MB PSS, {result.rss_mb:.1f} MB RSS",
        f"{result.requests} requests, {result.throughput_hz:.1f} a second",
        f"a request:          {request}",
        f"ONNX Runtime alone: {runtime}",
        f"energy of a request, the whole board's: {joules}",
        *[f"metrics of the release: {', '.join(f'{name} {value:.4g}' for name, value in metrics)}"] * bool(metrics),
    )
