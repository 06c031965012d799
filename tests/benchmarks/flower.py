"""The same training as a Flower simulation; runs in an environment of its own and prints its rounds.

Set up as by somebody who knows Flower: as many actors as processes, each with a processor and a thread of its own, that
live as long as the simulation; nothing is evaluated, no dashboard runs. A function of this script travels to the actors
by value with every task, and what it kept would be lost with it. So `training`, which an actor imports once, keeps the
examples, and the actors map them from one file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import flwr
import ray
import torch
import training
from flwr.client import ClientApp, NumPyClient
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

PATH, NAME, DEVICES, COHORT, ROUNDS, WORKERS = *sys.argv[1:3], *map(int, sys.argv[3:7])
marks: list[float] = []


class Client(NumPyClient):
    """One device."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters: list, config: dict) -> tuple[list, int, dict]:
        """Train."""
        torch.set_num_threads(1)
        model, (inputs, labels) = training.network(NAME), training.own(PATH, self.number)
        with torch.no_grad():
            for leaf, value in zip(model.parameters(), parameters, strict=True):
                leaf.copy_(torch.from_numpy(value))
        training.train(model, inputs, labels, self.number, training.EPOCHS[NAME])
        return [leaf.detach().numpy() for leaf in model.parameters()], len(labels), {}


class Timed(FedAvg):
    """FedAvg that notes when each round was aggregated."""

    def aggregate_fit(self, server_round, results, failures):
        """Aggregate; a device that failed would make a round quick."""
        if failures or len(results) != COHORT:
            raise RuntimeError(f"{len(results)} of {COHORT} devices trained")
        found = super().aggregate_fit(server_round, results, failures)
        marks.append(time.perf_counter())
        return found


def main() -> None:
    """Simulate, then print with what, and the seconds between one round's end and the next one's."""
    first = [leaf.detach().numpy() for leaf in training.network(NAME).parameters()]
    strategy = Timed(
        fraction_fit=COHORT / DEVICES,
        fraction_evaluate=0.0,
        min_fit_clients=COHORT,
        min_available_clients=DEVICES,
        initial_parameters=flwr.common.ndarrays_to_parameters(first),
    )
    server = ServerApp(
        server_fn=lambda _: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))
    )
    client = ClientApp(client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client())
    flwr.simulation.run_simulation(
        server,
        client,
        num_supernodes=DEVICES,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": WORKERS, "log_to_driver": False},
        },
    )
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (flwr, ray, torch))
    sys.stdout.write(f"\n{versions}; {WORKERS} actors of 1 CPU and 1 thread, kept; examples mapped from one file\n")
    sys.stdout.write(json.dumps([after - before for before, after in pairwise(marks)]) + "\n")


if __name__ == "__main__":
    main()
