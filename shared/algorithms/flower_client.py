"""Device side of Flower apps: call a `ClientApp`, read its reply.

D. J. Beutel et al. Flower: A Friendly Federated Learning Research Framework. https://arxiv.org/abs/2007.14390

Messages carry the records of both of Flower's interfaces: `fitins.parameters` for a client of `client_fn`
(`NumPyClient`), `arrays` and `config` for functions of `@app.train()`. A client's `context.state` is stored with the
device's state, so that it outlives the trainer process.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.algorithms.base import Outcome, Result
from shared.errors import ConfigError, TaskFailed
from shared.models.base import Model
from shared.models.leaves import tied_names
from shared.protocol.messages import Assignment, Scalar, Value
from shared.registry import FAULTS, Registry, find
from shared.tensors.tree import State, Tree, subtract

log = logging.getLogger("trainer")

APPS = Registry[Any]("Flower app", "flower_apps", {})
"""Apps are `module:attribute`; none is built in."""
ROUND, PARTITION, PARTITIONS = "server-round", "partition-id", "num-partitions"
"""Values of a task: Flower's names for the round, and for a device's part of the data."""
RUN, SERVER, NODE, TTL_S = 1, 1, 2, 1e12
"""Run, sender, receiver and lifetime of messages, which never leave the process; they are of 1970."""
TRAIN, EVALUATE = "train", "evaluate"
REQUESTS: Mapping[str, tuple[str, str]] = {TRAIN: ("fitins", "fitres"), EVALUATE: ("evaluateins", "evaluateres")}
"""Prefixes of the records of `client_fn` in request and reply, by message type."""
COUNTS = ("num_examples", "num-examples")
ACCURACIES = ("accuracy", "eval_accuracy", "eval_acc", "acc", "test_accuracy")
"""Usual names of an accuracy in a client's metrics."""
LOSSES = ("train_loss", "loss", "train-loss")
NODE_CONFIG = "FIELDFLEET_NODE_CONFIG"
"""Environment variable of the agent with the board's `node_config`: `KEY=VALUE KEY=VALUE`, as Flower's
`--node-config`."""


@dataclass(frozen=True)
class FlowerApp:
    """A `ClientApp` and its settings.

    Attributes:
        name: Import name of the app, as `module:attribute`.
        run_config: Values that the app reads as `context.run_config`.
        message_config: Further values of the messages' config, which also has those of `run_config` and the round, as
            strategies commonly copy the former: `ConfigRecord({"lr": context.run_config["lr"]})`.
    """

    name: str
    run_config: Mapping[str, Scalar]
    message_config: Mapping[str, Scalar]


def train_by_app(app: FlowerApp, model: Model, state: State, start: Tree, assignment: Assignment) -> Outcome:
    """Train by the app; return the change of the parameters, weighted by the examples that it reports.

    Raises:
        ConfigError: Flower is not installed, or the app is not allowed or cannot be imported.
        TaskFailed: The app raised an error, or its reply does not fit the network.
    """
    reply, state = _call(TRAIN, app, model, state, start, assignment)
    metrics = _read_metrics(reply)
    count = int(_take(metrics, COUNTS) or 0)
    if count <= 0:
        raise TaskFailed(f"Flower app {app.name!r} trained on {count} examples; return their number from `fit`")
    arrays = _read_arrays(app.name, model, reply, start)
    loss = next((metrics[name] for name in LOSSES if name in metrics), None)
    return state, Result(subtract(arrays, start), float(count), count, loss, metrics=metrics)


def evaluate_by_app(app: FlowerApp, model: Model, state: State, tree: Tree, assignment: Assignment) -> dict[str, float]:
    """Evaluate by the app; return accuracy, loss, number of examples and its other figures, with the prefix `eval_`.

    Raises:
        ConfigError, TaskFailed: As `train_by_app`.
    """
    reply, _ = _call(EVALUATE, app, model, state, tree, assignment)
    metrics = _read_metrics(reply)
    count, accuracy = _take(metrics, COUNTS), _take(metrics, ACCURACIES)
    loss = _take(metrics, ("loss", "eval_loss", "eval-loss"))
    named = {"eval_accuracy": accuracy, "eval_loss": loss, "eval_examples": count}
    others = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
    return {**others, **{name: value for name, value in named.items() if value is not None}}


def _call(
    kind: str, app: FlowerApp, model: Model, state: State, tree: Tree, assignment: Assignment
) -> tuple[Any, State]:
    """Return the content of the app's reply to a message, and the device's state afterwards."""
    flwr = import_flower()
    if not app.name:
        raise ConfigError("algorithm 'flower' has no app; set option app to a ClientApp as module:attribute")
    client = find(APPS, app.name, "Flower app")
    part = {name: assignment.values[name] for name in (PARTITION, PARTITIONS) if name in assignment.values}
    context = flwr.Context(
        run_id=RUN,
        node_id=NODE,
        node_config={**part, **read_node_config(os.environ.get(NODE_CONFIG, ""))},
        state=_load_records(flwr, state),
        run_config=dict(app.run_config),
    )
    settings = {**app.run_config, **app.message_config, ROUND: assignment.values.get(ROUND, 0)}
    message = _build_message(flwr, kind, model, tree, settings)
    with _seed_generators(assignment.seed):
        try:
            reply = client(message, context)
        except FAULTS as error:
            cause = f"{type(error).__name__}: {error}"
            raise TaskFailed(f"Flower app {app.name!r} failed at {kind!r}: {cause}; correct the app") from error
    if not reply.has_content():
        raise TaskFailed(f"Flower app {app.name!r} replied to {kind!r} with an error: {reply.error}")
    _require_success(app.name, kind, reply.content)
    return reply.content, _store_records(context.state)


def import_flower() -> Any:
    """Import Flower's message interface, `flwr.app`, with its telemetry disabled.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        import flwr.app  # noqa: PLC0415 - seconds, and only for its apps
    except ImportError as error:
        remedy = "install it for the trainer's Python: pip install '.[flower]' in a clone of fieldfleet"
        raise ConfigError(f"this plan's apps need Flower ({error}); {remedy}") from error
    return flwr.app


def read_node_config(text: str) -> dict[str, Scalar]:
    """Parse `KEY=VALUE KEY=VALUE`; values are TOML-like numbers, `true`, `false`, or text.

    Raises:
        ConfigError: An entry has no `=`.
    """
    config = dict[str, Scalar]()
    for entry in text.split():
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ConfigError(f"{NODE_CONFIG}: {entry!r} is not KEY=VALUE")
        try:
            config[name] = json.loads(value)
        except ValueError:
            config[name] = value.strip("\"'")
    return config


def _build_message(flwr: Any, kind: str, model: Model, tree: Tree, config: Mapping[str, Value]) -> Any:
    """Return a message with the parameters in the network's order, readable through both interfaces."""
    tied = tied_names(model.layers)
    leaves = {name: tree[tied.get(name, name)] for name in model.layers.state_dict()}
    arrays = flwr.ArrayRecord({name: flwr.Array(leaf.cpu().numpy()) for name, leaf in leaves.items()})
    settings = flwr.ConfigRecord(dict(config))
    prefix = REQUESTS[kind][0]
    records = {f"{prefix}.parameters": arrays, f"{prefix}.config": settings, "arrays": arrays, "config": settings}
    metadata = flwr.Metadata(
        run_id=RUN,
        message_id="",
        src_node_id=SERVER,
        dst_node_id=NODE,
        reply_to_message_id="",
        group_id=str(config[ROUND]),
        created_at=0.0,
        ttl=TTL_S,
        message_type=kind,
    )
    return flwr.Message(content=flwr.RecordDict(records), metadata=metadata)


def _require_success(app: str, kind: str, content: Any) -> None:
    """Raise TaskFailed if a client of `client_fn` has no such method, or reports a failure."""
    status = content.config_records.get(f"{REQUESTS[kind][1]}.status")
    if status and status["code"]:
        raise TaskFailed(f"Flower app {app!r} cannot {kind}: {status['message']}")


def _read_metrics(content: Any) -> dict[str, float]:
    """Return the numbers of a reply's metrics by name; text and lists are left out."""
    metrics = dict[str, float]()
    records = [*content.metric_records.values()]
    records += [record for name, record in content.config_records.items() if name.endswith(".metrics")]
    for record in records:
        numbers = {name: value for name, value in record.items() if isinstance(value, bool | int | float)}
        metrics |= {name: float(value) for name, value in numbers.items()}
        if left_out := record.keys() - numbers.keys():
            log.debug("metrics that are no numbers are not sent: %s", ", ".join(sorted(left_out)))
    return metrics


def _take(metrics: dict[str, float], names: tuple[str, ...]) -> float | None:
    """Remove and return the first of some metrics; None without any."""
    return next((metrics.pop(name) for name in names if name in metrics), None)


def _read_arrays(app: str, model: Model, content: Any, like: Tree) -> Tree:
    """Return the reply's arrays by the network's names: by name if it has these, else in the network's order.

    Raises:
        TaskFailed: Their number or a shape differs.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise TaskFailed(f"Flower app {app!r} returned {len(records)} records of arrays; return one, the parameters")
    names, arrays = list(model.layers.state_dict()), {name: array.numpy() for name, array in records[0].items()}
    if arrays.keys() != set(names):
        if len(arrays) != len(names):
            raise TaskFailed(
                f"Flower app {app!r} returned {len(arrays)} arrays, and the network of the plan has {len(names)} "
                f"parameters and buffers ({names[0]}, …); return the values of its state_dict, in order"
            )
        arrays = dict(zip(names, arrays.values(), strict=True))
    for name in like:
        if arrays[name].shape != tuple(like[name].shape):
            shapes = f"{arrays[name].shape}, and {name} of the network has {tuple(like[name].shape)}"
            raise TaskFailed(f"Flower app {app!r} returned an array of shape {shapes}; return its state_dict, in order")
    return {name: torch.tensor(arrays[name], dtype=like[name].dtype, device=like[name].device) for name in like}


def _load_records(flwr: Any, state: State) -> Any:
    """Return `context.state` from a device's state."""
    arrays = dict[str, dict[str, Any]]()
    for key, leaf in state.tree.items():
        record, name = json.loads(key)
        arrays.setdefault(record, {})[name] = flwr.Array(leaf.cpu().numpy())
    records = {record: flwr.ArrayRecord(values) for record, values in arrays.items()}
    for key, fact in state.facts.items():
        kind, record = json.loads(key)
        make = flwr.MetricRecord if kind == "metrics" else flwr.ConfigRecord
        records[record] = make(json.loads(str(fact)))
    return flwr.RecordDict(records)


def _store_records(records: Any) -> State:
    """Return a device's state with the contents of `context.state`.

    Raises:
        TaskFailed: A value is of a type that cannot be stored.
    """
    tree, facts = Tree(), dict[str, Scalar]()
    for record, arrays in records.array_records.items():
        tree |= {json.dumps([record, name]): torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    for kind, named in (("metrics", records.metric_records), ("configs", records.config_records)):
        for record, values in named.items():
            try:
                facts[json.dumps([kind, record])] = json.dumps(dict(values))
            except TypeError as error:
                raise TaskFailed(f"context.state: record {record!r} cannot be stored ({error}); use text") from error
    return State(tree, facts)


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators inside the block, as torch's are, so that a replay draws the same."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that apps use
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - as above
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above
