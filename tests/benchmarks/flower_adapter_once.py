"""One process of `flower-adapter`, in Flower's environment: tasks of the quickstart and its `fit` alone, in turns.

A task is what the trainer does: it reads the parameters, calls the app and writes the update to disk.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from device_agent.exchange.outbox import Outbox
from device_agent.measurement.task_meter import BlockCost, FixedMeter
from device_agent.trainer.interface import Job
from device_agent.trainer.perform import perform
from device_agent.trainer.workspace import Workspace
from shared import registry
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.codecs.dense import dense
from shared.data.spec import NONE, Data
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.measurements import Cost
from shared.protocol.messages import Hyper, Spec, Task, Transfer
from shared.registry import build
from tests.flower_environment import APP

MODEL, CLIENT = "quickstart.task:Net", "quickstart.client_app:app"
OPTIONS = {"app": CLIENT, "devices": "board,other,third", "batch-size": 16, "learning-rate": 0.05}


def main() -> None:
    """Print the CPU seconds of tasks, and of `fit` with the same parameters."""
    repetitions, epochs = map(int, sys.argv[1:3])
    sys.path.insert(0, str(APP))
    torch.set_num_threads(1)
    registry.allow([MODEL, CLIENT])
    from quickstart.client_app import FlowerClient  # noqa: PLC0415 - of the app's folder
    from quickstart.task import Net, get_weights, load_data  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as name:
        folder, workspace, tasks, alone = Path(name), Workspace(), list[float](), list[float]()
        job, outbox = make_job(folder, epochs), Outbox(folder / "outbox", folder / "states")
        weights = get_weights(build_initial(Spec(name=MODEL), 0).layers)
        for number in range(repetitions + 1):
            draft = str(outbox.draft("flower", number + 1))
            began = time.process_time()
            perform(with_draft(job, draft), workspace, FixedMeter(BlockCost(0.0)).task, lambda: False)
            between = time.process_time()
            FlowerClient(Net(), load_data(0, 3, 16), epochs, 0.05).fit(weights, {})
            tasks.append(between - began)
            alone.append(time.process_time() - between)
    sys.stdout.write(json.dumps({"task": tasks[1:], "fit": alone[1:]}) + "\n")  # the first imports Flower


def with_draft(job: Job, draft: str) -> Job:
    """Return the job with another draft."""
    return Job(**{name: getattr(job, name) for name in job.__struct_fields__} | {"draft": draft})


def make_job(folder: Path, epochs: int) -> Job:
    """Return a job of algorithm `flower` for the quickstart's network."""
    spec = Spec(name="flower", options={**OPTIONS, "local-epochs": epochs})
    algorithm, network = build(ALGORITHMS, spec, "algorithm"), build_initial(Spec(name=MODEL), 0)
    state = algorithm.init(network, 0)
    assignment = algorithm.assign(state, Cohort(("board",), Hyper(), 0, rounds=2), {}, 1)["board"]
    tree = algorithm.broadcast(state, "board", assignment)
    start = bytes(bytearray(b"".join(payload.pack(dense().encode(tree, None)[0]))))
    (folder / "params").write_bytes(start)
    task = Task(
        run="flower",
        round=1,
        device="board",
        algorithm=spec,
        model=Spec(name=MODEL),
        codec=Spec(name="dense"),
        assignment=assignment,
        params=Transfer(digest=payload.digest([start]), size=len(start), frame_bytes=1024),
        shared=False,
        deadline_s=600.0,
    )
    return Job(
        task=task,
        params=str(folder / "params"),
        state=str(folder / "state"),
        draft="",
        data=Data(source=NONE),
        frame_bytes=1024,
        cost=Cost(),
    )


if __name__ == "__main__":
    main()
