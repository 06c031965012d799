"""The same training as a Flower simulation; runs in an environment of its own and prints its rounds."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import flwr
import torch
import training
from flwr.client import ClientApp, NumPyClient
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

NAME, DEVICES, COHORT, ROUNDS, WORKERS = sys.argv[1], *map(int, sys.argv[2:6])
marks: list[float] = []


class Client(NumPyClient):
    """One device."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters: list, config: dict) -> tuple[list, int, dict]:
        """Train one epoch."""
        torch.set_num_threads(1)
        model, (inputs, labels) = training.network(NAME), own(self.number)
        with torch.no_grad():
            for leaf, value in zip(model.parameters(), parameters, strict=True):
                leaf.copy_(torch.from_numpy(value))
        training.train(model, inputs, labels, self.number)
        return [leaf.detach().numpy() for leaf in model.parameters()], len(labels), {}


_kept: list = []


def own(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a device's examples; a process reads the data set once."""
    if not _kept:
        _kept.extend(training.examples(DEVICES))
    part = slice(number * training.EXAMPLES, (number + 1) * training.EXAMPLES)
    return _kept[0][part], _kept[1][part]


class Timed(FedAvg):
    """FedAvg that notes when each round was aggregated."""

    def aggregate_fit(self, server_round, results, failures):
        """Aggregate."""
        found = super().aggregate_fit(server_round, results, failures)
        marks.append(time.perf_counter())
        return found


def main() -> None:
    """Simulate, then print the seconds between one round's end and the next one's."""
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
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": WORKERS}},
    )
    sys.stdout.write("\n" + json.dumps([after - before for before, after in pairwise(marks)]) + "\n")


if __name__ == "__main__":
    main()
