"""Flower apps: devices run a user's `ClientApp`, and the server averages as FedAvg does.

D. J. Beutel et al. Flower: A Friendly Federated Learning Research Framework. https://arxiv.org/abs/2007.14390

    w <- w + sum_k (n_k / n) * (w_k - w)        w_k, n_k: parameters and number of examples that `fit` returns

The arrays are the parameters and buffers of the plan's network, in the order of its `state_dict`. Flower is imported on
devices only, by the process that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Batches,
    Cohort,
    Mixing,
    Outcome,
    Program,
    assign_alike,
    network_leaves,
)
from shared.algorithms.fedavg import absorb, aggregate, mix
from shared.algorithms.flower_client import PARTITION, PARTITIONS, ROUND, FlowerApp, evaluate_by_app, train_by_app
from shared.models.base import Model
from shared.protocol.messages import Assignment, Scalar
from shared.tensors.tree import State, Tree

MESSAGE_PREFIX = "message."
"""Prefix of options that are sent in the messages' config, as a Flower strategy does, and not in `run_config`."""


def flower(app: str = "", devices: str = "", **config: Scalar) -> Algorithm:
    """Build the algorithm.

    Args:
        app: Flower `ClientApp` as `module:attribute`; each board's operator allows it in `agent.toml`.
        devices: Comma-separated names of devices: the n-th one gets `partition-id` n - 1 in its `node_config`.
        config: The app's `run_config`; keys that begin with `message.` are sent in the messages' config instead.
    """
    names = [name.strip() for name in devices.split(",") if name.strip()]
    sent = {key.removeprefix(MESSAGE_PREFIX): value for key, value in config.items() if key.startswith(MESSAGE_PREFIX)}
    flower_app = FlowerApp(app, {key: config[key] for key in config if not key.startswith(MESSAGE_PREFIX)}, sent)

    def local(model: Model, state: State, start: Tree, _batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: the app's `fit`, or its function of `train` messages."""
        return train_by_app(flower_app, model, state, start, assignment)

    return Algorithm(
        init=lambda model, _seed: State({key: leaf.clone() for key, leaf in model.tree().items()}),
        assign=_assign_by_name(names),
        broadcast=lambda state, _device, _assignment: network_leaves(state.tree),
        local=local,
        absorb=absorb,
        aggregate=aggregate,
        program=Program(partial(evaluate_by_app, flower_app)),
        sends_changes=True,
        mixing=Mixing(lambda state: network_leaves(state.tree), mix),
    )


def _assign_by_name(names: Sequence[str]) -> Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]:
    """Return `assign` of the record: the task also has the round and the device's part of the data."""
    parts = {name: {PARTITION: place, PARTITIONS: len(names)} for place, name in enumerate(names)}

    def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
        tasks = assign_alike(state, cohort, allocation, number)
        round_ = _round_of_task(number, cohort.rounds)
        return {
            device: msgspec.structs.replace(task, values={**task.values, ROUND: round_, **parts.get(device, {})})
            for device, task in tasks.items()
        }

    return assign


def _round_of_task(number: int, rounds: int) -> int:
    """Return the round of a task; tasks that only evaluate have numbers above all rounds."""
    return number if number <= rounds or not rounds else (number - rounds - 1) or rounds
