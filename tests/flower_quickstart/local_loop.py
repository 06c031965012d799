"""The quickstart's client in a plain loop of one process: FedAvg over what `fit` returns."""

import random
import sys

import numpy as np
import torch
from flwr.app import Context, RecordDict
from quickstart.client_app import client_fn
from quickstart.task import Net, get_weights

from shared.protocol.messages import derive_seed

PARTS, ROUNDS = 3, 3
CONFIG = {"local-epochs": 2, "learning-rate": 0.05, "batch-size": 16}


def main() -> None:
    """Train, and save parameters and each round's accuracy in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights, accuracies = get_weights(Net()), []
    for number in range(1, ROUNDS + 1):
        results = [client(part, number).fit(weights, {}) for part in range(PARTS)]
        total = sum(count for _, count, _ in results)
        columns = zip(*(arrays for arrays, _, _ in results), strict=True)
        counts = [count for _, count, _ in results]
        weights = [
            sum(array.astype(np.float64) * count / total for array, count in zip(column, counts, strict=True)).astype(
                np.float32
            )
            for column in columns
        ]
        scores = [client(part, number).evaluate(weights, {}) for part in range(PARTS)]
        examples = sum(count for _, count, _ in scores)
        accuracies.append(sum(figures["accuracy"] * count for _, count, figures in scores) / examples)
    named = dict(zip(Net().state_dict(), weights, strict=True))
    np.savez(sys.argv[1], **named, accuracies=np.array(accuracies))


def client(part: int, number: int) -> object:
    """Return a client with the seed that fieldfleet gives a device's task."""
    seed = derive_seed(0, number, f"node-{part}")
    torch.manual_seed(seed)
    random.seed(seed)
    node = {"partition-id": part, "num-partitions": PARTS}
    context = Context(run_id=1, node_id=2, node_config=node, state=RecordDict(), run_config=CONFIG)
    return client_fn(context).numpy_client


if __name__ == "__main__":
    main()
