"""Inference on a board: ONNX Runtime beside PyTorch, what HTTP adds, the process's memory and start.

All at batch 1 on one thread. ONNX Runtime and PyTorch take turns, so that a machine that has something else to do
disturbs both; clients are one thread of this process, over the Unix socket, with tensors as bytes. What HTTP adds is
against what ONNX Runtime took in the same process for the same requests. The rows of a bare loop tell what no server
by asyncio gets below here, see `inference_floor`: they are told beside the targets, and change none.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from inference_floor import rows_of_a_bare_loop
from measure import Figure
from serving_beside import RATE_HZ as BESIDE_HZ
from serving_beside import slowdowns

from device_agent.commands.bench_inference import InferenceBench, encode_request, measure, time_requests
from device_agent.config import BoardConfig, ServeConfig
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles, read_folder
from device_agent.inference.session import open_model
from device_agent.inference.settings import InferenceSettings, choose_settings
from device_agent.measurement.board import Board, open_board
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.profile.schema import Inference
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.release.create import create_release
from edge_server.release.run_model import RunModel
from edge_server.release.store import export_release
from shared.models.build import build_initial
from shared.protocol.inference.release import Preprocessing, ReleaseSource, read_manifest
from shared.protocol.messages import Spec
from shared.runtime.executor import background

NETWORKS = {"lenet": 5.0, "resnet20": 2.5, "vgg16": 1.5}
"""With how much faster than PyTorch ONNX Runtime should be."""
SPENT_S, QUICK_S, CLIENTS = 6.0, 0.5, 8
MIN_RUNS, TURN = 10, 5
TWO_MILLION, RATE_HZ = {"width": 32, "hidden": 640}, 20
FLOOR = "import os, psutil, numpy, onnxruntime; print(psutil.Process().memory_info().rss)"


def released(
    name: str, folder: Path, *, cut: int | None = None, **options: int
) -> tuple[ReleaseFiles, torch.nn.Module]:
    """Return a release of a network as it is before training, and the network; with halves where a cut is named."""
    spec = Chosen(name=name, options=options)
    model = build_initial(spec, 1)
    model.layers.eval()
    plan = Plan(name="bench", rounds=1, algorithm=Chosen(name="fedavg"), model=spec)
    source = ReleaseSource(run="bench", round=1, plan="bench", algorithm=Spec(name="fedavg"))
    tree = dict(model.layers.state_dict())
    found = RunModel(plan, model, tree, tuple(model.example), (), Preprocessing(), source)
    export_release(create_release(found, folder / "runs", name, cut), folder / name)
    return read_folder(folder / name), model.layers


def alternate(calls: tuple[Callable[[], object], ...], seconds: float) -> list[list[float]]:
    """Return the seconds of each call, taken in turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken[0]) < MIN_RUNS:
        for one, call in zip(taken, calls, strict=True):
            for _ in range(TURN):
                began = time.perf_counter()
                call()
                one.append(time.perf_counter() - began)
    return taken


def against_pytorch(files: ReleaseFiles, layers: torch.nn.Module, settings: InferenceSettings, seconds: float) -> list:
    """Return the seconds of ONNX Runtime and of PyTorch for one example."""
    model = open_model(files.manifest, files.parts, settings)
    given = torch.randn((1, *model.input.shape[1:]), generator=torch.Generator().manual_seed(1))
    array = given.numpy()

    def eager() -> None:
        with torch.no_grad():
            layers(given)

    return alternate((lambda: model.run(array), eager), seconds)


def served(files: ReleaseFiles, board: Board, seconds: float, clients: int) -> InferenceBench:
    """Return what the inference process gives so many clients."""
    with tempfile.TemporaryDirectory() as folder:
        settings = choose_settings(ServeConfig(port=0), Path(folder), "warning", Inference())
        return asyncio.run(measure(files, settings, board, seconds, (clients, 1)))


def cpu_share(files: ReleaseFiles, seconds: float) -> float:
    """Return how much of a core the process takes where it is asked so often, as a share."""

    async def asked() -> float:
        with tempfile.TemporaryDirectory() as folder:
            settings = choose_settings(ServeConfig(port=0), Path(folder), "warning", Inference())
            process = InferenceProcess(settings, lambda *_: files, {files.name: files})
            request = encode_request(files.name, read_manifest(files.manifest, "manifest").graph.input, 1)
            async with background(process.run()):
                await process.ready.wait()
                await asyncio.to_thread(time_requests, settings.socket, request, QUICK_S)
                seen = psutil.Process(process.pid)
                before, began = sum(seen.cpu_times()[:2]), time.perf_counter()
                await asyncio.to_thread(time_requests, settings.socket, request, seconds, 1 / RATE_HZ)
                return float(sum(seen.cpu_times()[:2]) - before) / (time.perf_counter() - began)

    return asyncio.run(asked())


def floor_mb() -> float:
    """Return the RSS of a Python that has imported numpy and onnxruntime, in MB."""
    done = subprocess.run([sys.executable, "-c", FLOOR], check=True, capture_output=True, text=True, env=os.environ)
    return int(done.stdout) / 1e6


def beside_training(files: ReleaseFiles, board: Board, seconds: float) -> list[Figure]:
    """Return what training beside costs a request."""
    way, none, share = slowdowns(files, board.profile, seconds)
    what = f"p95 at {BESIDE_HZ} Hz beside training to without"
    gives = f"trainer of nice {share.nice} on {len(share.cpus) or 'all'} CPUs"
    return [
        Figure(f"lenet: {what}, {gives}", way, "x", "<= 2"),
        Figure(f"lenet: {what}, trainer that gives no way", none, "x"),
    ]


def run(*, quick: bool = False) -> list[Figure]:
    """Measure every network; a quick run the smallest alone."""
    torch.set_num_threads(1)
    seconds, rows = QUICK_S if quick else SPENT_S, list[Figure]()
    board = open_board(MeasurementSettings(board=BoardConfig()))
    with tempfile.TemporaryDirectory() as name:
        settings = choose_settings(ServeConfig(port=0), Path(name), "warning", Inference())
        for network, ratio in list(NETWORKS.items())[: 1 if quick else None]:
            files, layers = released(network, Path(name))
            alone, eager = against_pytorch(files, layers, settings, seconds)
            p50 = statistics.median(alone)
            rows += [
                Figure(f"{network}: ONNX Runtime, p50", p50 * 1e3, "ms"),
                Figure(
                    f"{network}: PyTorch to ONNX Runtime, p50", statistics.median(eager) / p50, "x", f">= {ratio:g}"
                ),
            ]
            one, many = (served(files, board, seconds, clients) for clients in (1, CLIENTS))
            is_small = network == "lenet"
            rows += [
                Figure(
                    f"{network}: HTTP adds, p50",
                    (one.request_s[0] - one.runtime_s[0]) * 1e3,
                    "ms",
                    "<= 1" if is_small else "",
                ),
                Figure(
                    f"{network}: a request to ONNX Runtime alone, p99",
                    one.request_s[2] / one.runtime_s[2],
                    "x",
                    "<= 1.25",
                ),
                Figure(
                    f"{network}: {CLIENTS} clients to ONNX Runtime alone, throughput",
                    many.throughput_hz * statistics.fmean(alone),
                    "x",
                    ">= 0.8",
                ),
            ]
            rows += rows_of_a_bare_loop(
                files, Path(name) / network, seconds, (statistics.fmean(alone), one.runtime_s[2])
            )
            if is_small:
                rows += [
                    Figure("inference process with lenet, PSS idle", one.pss_mb, "MB", "<= 60"),
                    Figure("inference process with lenet, RSS idle, as if nothing were shared", one.rss_mb, "MB"),
                    Figure("of it Python with numpy and onnxruntime imported", floor_mb(), "MB"),
                    Figure("inference process with lenet, ready", one.ready_s, "s", "<= 1.5"),
                ]
                rows += beside_training(files, board, seconds)
        cnn, _ = released("cnn", Path(name), **TWO_MILLION)
        share = cpu_share(cnn, seconds)
        rows.append(Figure(f"2.0 million parameters at {RATE_HZ} Hz, of a core", 100 * share, "%", "<= 3"))
    return rows
