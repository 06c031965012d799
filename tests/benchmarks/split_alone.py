"""Split session steps in one process without a network, one device after another.

As `python split_alone.py PLAN DEVICES THREADS` it prints JSON: the seconds of each step, the processor seconds of one,
and the memory that it has at the end, in bytes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import torch

from device_agent.trainer.workspace import TaskBatches
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort, Session
from shared.data import load as data
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Assignment, derive_seed
from shared.protocol.topics import SERVER
from shared.registry import build
from shared.runtime import malloc
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State, Tree


def alone(plan: Plan, count: int) -> tuple[list[float], float]:
    """Do the steps of a plan's first round; return the seconds of each, and the processor seconds of one."""
    fleet, algorithm, model = (
        devices(plan, count),
        build(ALGORITHMS, plan.algorithm, "algorithm"),
        build_blank(plan.model),
    )
    names = tuple(device.name for device in fleet)
    state = algorithm.init(build_initial(plan.model, plan.seed), plan.seed)
    told = algorithm.assign(state, Cohort(names, plan.hyper, plan.seed, plan.rounds), {}, 1)
    sessions = dict[str, Session]()
    for place, name in enumerate(names):
        own = TaskBatches(data.load(device_data(plan, fleet, place)), told[name], lambda: False)
        start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told[name]).items()}
        sessions[name] = algorithm.local(model, State(), start, own, told[name])
    taken, downs, before = list[float](), dict.fromkeys(names), time.process_time()
    for step in range(1, told[names[0]].steps + 1):
        began = time.perf_counter()
        ups = {name: _up(sessions[name], downs[name], told[name], step, name) for name in names}
        with seed_torch(derive_seed(plan.seed, step, SERVER)):
            state, downs = algorithm.split.serve(model, state, told, ups)
        taken.append(time.perf_counter() - began)
    return taken, (time.process_time() - before) / len(taken)


def _up(session: Session, down: Tree | None, told: Assignment, step: int, device: str) -> Tree:
    """Go back through a device's last batch, then forward through its next."""
    with seed_torch(derive_seed(told.seed, step, device)):
        return session.send(down)


def main() -> None:
    """Do what the command line names."""
    path, count, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    malloc.tune()
    malloc.enable_huge_pages()
    torch.set_num_threads(threads)
    taken, spent = alone(load(path, path.parent), count)
    sys.stdout.write(json.dumps([taken, spent, psutil.Process().memory_info().rss]) + "\n")


if __name__ == "__main__":
    main()
