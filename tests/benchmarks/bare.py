"""Baseline without a framework: FedAvg of two forked workers over pipes; also a script."""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection

import torch
import training
from torch import Tensor


def work(pipe: Connection, name: str, inputs: Tensor, labels: Tensor, layout: torch.memory_format) -> None:
    """Train what comes, for ever: a device's number, a seed, and the parameters as bytes."""
    torch.set_num_threads(1)
    model = training.network(name).to(memory_format=layout)
    own = dict(model.named_parameters())
    while True:
        device, seed = json.loads(pipe.recv_bytes())
        put(own, pipe.recv_bytes())
        part = slice(device * training.EXAMPLES, (device + 1) * training.EXAMPLES)
        training.train(model, inputs[part], labels[part], seed, training.EPOCHS[name])
        pipe.send_bytes(flat(own))


def put(own: dict[str, Tensor], data: bytes) -> None:
    """Set parameters to what is in the bytes."""
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    with torch.no_grad():
        start = 0
        for leaf in own.values():
            leaf.copy_(values[start : start + leaf.numel()].view_as(leaf))
            start += leaf.numel()


def flat(own: dict[str, Tensor]) -> memoryview:
    """Return all parameters as bytes."""
    return torch.cat([leaf.detach().flatten() for leaf in own.values()]).numpy().data


def main() -> None:
    """Print the seconds of every round as JSON."""
    name, devices, cohort, rounds, workers = sys.argv[1], *map(int, sys.argv[2:6])
    layout = torch.channels_last if "channels-last" in sys.argv else torch.contiguous_format
    torch.set_num_threads(1)
    inputs, labels = training.examples(devices)
    model = training.network(name)
    own = dict(model.named_parameters())
    context = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, name, inputs, labels, layout), daemon=True).start()
        pipes.append(ours)
    taken = []
    for number in range(rounds):
        began = time.perf_counter()
        chosen = random.Random(number).sample(range(devices), cohort)
        model_bytes, total = flat(own), torch.zeros(sum(leaf.numel() for leaf in own.values()))
        waiting, busy = list(chosen), set()
        for pipe in pipes[: len(waiting)]:
            give(pipe, waiting.pop(0), number, model_bytes)
            busy.add(pipe)
        while busy:
            for pipe in multiprocessing.connection.wait(busy):
                total.add_(torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.float32), alpha=1 / cohort)
                if waiting:
                    give(pipe, waiting.pop(0), number, model_bytes)
                else:
                    busy.discard(pipe)
        put(own, total.numpy().tobytes())
        taken.append(time.perf_counter() - began)
    sys.stdout.write(json.dumps(taken) + "\n")


def give(pipe: Connection, device: int, number: int, model_bytes: memoryview) -> None:
    """Have a worker train one device."""
    pipe.send_bytes(json.dumps([device, number * 1000 + device]).encode())
    pipe.send_bytes(model_bytes)


if __name__ == "__main__":
    main()
