"""Latency of inference requests while the same board trains.

Beside it the same with a trainer that gives no way. An application asks at a steady rate, as a camera does: of requests
in a row, which keep their core, the next would not have to be woken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

from device_agent.commands.bench_inference import encode_request, time_requests
from device_agent.config import ServeConfig, TrainerConfig
from device_agent.exchange.outbox import Outbox
from device_agent.inference.messages import compute_percentiles
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.settings import choose_settings
from device_agent.profile.schema import Profile
from device_agent.trainer.interface import Job
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from device_agent.trainer.processor_share import TrainerShare, choose_share
from shared.codecs.dense import dense
from shared.data.spec import Data
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.inference.release import read_manifest
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper, Spec, Task, Transfer
from shared.runtime.executor import background

NETWORK = Spec(name="cnn", options={"side": 8, "width": 16, "hidden": 64})
"""That of the demo's plan, whose steps take milliseconds."""
TURNS, RATE_HZ, ENDLESS, SHARE = 5, 100, 1_000_000_000, (0.95,)
FRAME_BYTES = 1 << 18
GIVES_NO_WAY = TrainerConfig(nice=0, cpus=[])


def slowdowns(files: ReleaseFiles, profile: Profile, seconds: float) -> tuple[float, float, TrainerShare]:
    """Return p95 of requests beside training to p95 without: as the profile says, and by a trainer that gives no way.

    Args:
        files: A release.
    """
    present = os.sched_getaffinity(0)
    usual, none = (choose_share(one, profile, present, serves=True) for one in (TrainerConfig(), GIVES_NO_WAY))
    found = [asyncio.run(_slowdown(files, profile, share, seconds)) for share in (usual, none)]
    return found[0], found[1], usual


async def _slowdown(files: ReleaseFiles, profile: Profile, share: TrainerShare, seconds: float) -> float:
    request = encode_request(files.name, read_manifest(files.manifest, "manifest").graph.input, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = choose_settings(ServeConfig(port=0), folder, "warning", profile.inference)
        process = InferenceProcess(settings, lambda *_: files, {files.name: files})
        trainer = TrainerProcess(folder / "lock", 600.0, TrainerOptions(0, 0, nice=share.nice, cpus=share.cpus))
        async with background(process.run()):
            await process.ready.wait()
            await trainer(training_job(folder, 1, epochs=1))  # torch is loaded, and the examples are
            training = asyncio.create_task(trainer(training_job(folder, 2, epochs=ENDLESS)))
            await asyncio.to_thread(time_requests, settings.socket, request, 0.5)
            taken: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
            for _ in range(TURNS):
                for turn in taken:
                    os.kill(trainer.pid, turn)
                    taken[turn] += await asyncio.to_thread(
                        time_requests, settings.socket, request, seconds / TURNS, 1 / RATE_HZ
                    )
            if training.done():
                training.result()
                raise RuntimeError("the training ended")
            await trainer.close()
            await asyncio.gather(training, return_exceptions=True)
    [without], [beside] = (compute_percentiles(taken[turn], SHARE) for turn in (signal.SIGSTOP, signal.SIGCONT))
    return beside / without


def training_job(folder: Path, number: int, epochs: int, network: Spec = NETWORK) -> Job:
    """Return a job as an agent gives it."""
    data = b"".join(payload.pack(dense().encode(build_initial(network, 1).tree(), None)[0]))
    (folder / "params").write_bytes(data)
    task = Task(
        run="bench",
        round=number,
        device="board",
        algorithm=Spec(name="fedavg"),
        model=network,
        codec=Spec(name="dense"),
        assignment=Assignment(seed=1, hyper=Hyper(local_epochs=epochs, batch_size=16, learning_rate=0.001)),
        params=Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=FRAME_BYTES),
        shared=False,
        deadline_s=3600.0,
    )
    return Job(
        task=task,
        params=str(folder / "params"),
        state=str(folder / "state" / "bench"),
        draft=str(Outbox(folder / "outbox", folder / "state").draft("bench", number)),
        data=Data(source="digits"),
        frame_bytes=FRAME_BYTES,
        cost=Cost(),
    )
