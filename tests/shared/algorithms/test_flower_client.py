"""The device side of Flower apps, with Flower's own classes: both interfaces, what is stored, what is refused.

Flower needs an environment of its own: `tests/test_flower_app.py` runs this file there.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from shared import registry
from shared.algorithms.base import Result
from shared.algorithms.flower_client import FlowerApp, evaluate_by_app, train_by_app
from shared.errors import ConfigError, TaskFailed
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper
from shared.tensors.tree import State

VALUES = {"server-round": 2, "partition-id": 1, "num-partitions": 3}
TASK = Assignment(seed=5, hyper=Hyper(), values=VALUES)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))


@pytest.fixture
def start(model):
    return {name: leaf.clone() for name, leaf in model.tree().items()}


@pytest.fixture
def make_app(monkeypatch):
    """Return a function that makes an app importable and allowed."""

    def make(app: ClientApp) -> FlowerApp:
        module = ModuleType("flower_test_app")
        module.app = app
        monkeypatch.setitem(sys.modules, "flower_test_app", module)
        registry.allow(["flower_test_app:app"])
        return FlowerApp("flower_test_app:app", {"local-epochs": 2}, {"lr": 0.5})

    yield make
    registry.allow([])


class Adding(NumPyClient):
    """Adds its partition's number to all arrays, and returns what it was given."""

    def __init__(self, context):
        self.context = context

    def fit(self, parameters, config):
        by = self.context.node_config["partition-id"]
        assert all(isinstance(array.sum().item(), int | float) for array in parameters)
        figures = {"train_loss": 0.25, "lr": config["lr"], "round": config["server-round"], "note": "text"}
        return [array + by for array in parameters], 7, {**figures, "epochs": self.context.run_config["local-epochs"]}

    def evaluate(self, parameters, config):
        return float(len(parameters)), 4, {"accuracy": 0.5, "parts": self.context.node_config["num-partitions"]}


def test_a_numpy_client_gets_parameters_and_settings(model, start, make_app):
    """In the network's order; its change, weight and figures are the device's update."""
    app = make_app(ClientApp(lambda context: Adding(context).to_client()))
    state, result = train_by_app(app, model, State(), start, TASK)
    assert isinstance(result, Result)
    assert list(result.tree) == list(start)
    for name, leaf in result.tree.items():
        torch.testing.assert_close(leaf, torch.ones_like(start[name]))
    assert (result.weight, result.num_examples, result.loss) == (7.0, 7, 0.25)
    assert result.metrics == {"train_loss": 0.25, "lr": 0.5, "round": 2.0, "epochs": 2.0}
    assert (state.tree, state.facts) == ({}, {})
    figures = evaluate_by_app(app, model, State(), start, TASK)
    assert figures == {"eval_accuracy": 0.5, "eval_loss": 7.0, "eval_examples": 4.0, "eval_parts": 3.0}


def test_functions_of_messages_keep_their_state(model, start, make_app):
    """Arrays, numbers and text of `context.state` come back in the next task, in another process too."""
    client = ClientApp()

    @client.train()
    def train(message, context):
        seen = context.state["count"]["rounds"] if "count" in context.state else 0
        if seen:
            assert context.state["last"]["w"].numpy().tolist() == [1.5]
            assert context.state["names"]["all"] == ["a", "b"]
        context.state["count"] = MetricRecord({"rounds": seen + 1})
        context.state["last"] = ArrayRecord({"w": ArrayRecord([torch.tensor([1.5]).numpy()])["0"]})
        context.state["names"] = ConfigRecord({"all": ["a", "b"]})
        named = message.content["arrays"].to_torch_state_dict()
        metrics = MetricRecord({"num-examples": 3, "seen": seen, "lr": message.content["config"]["lr"]})
        return Message(RecordDict({"arrays": ArrayRecord(named), "metrics": metrics}), reply_to=message)

    app = make_app(client)
    state, result = train_by_app(app, model, State(), start, TASK)
    assert all(not leaf.any() for leaf in result.tree.values())
    assert result.metrics == {"seen": 0.0, "lr": 0.5}
    _, result = train_by_app(app, model, state, start, TASK)
    assert result.metrics["seen"] == 1
    with pytest.raises(TaskFailed, match="evaluate"):
        evaluate_by_app(app, model, state, start, TASK)


def test_the_generators_of_python_and_numpy_are_seeded(model, start, make_app):
    """By the task's seed, as torch's is by the trainer; a replay draws the same."""

    class Drawing(Adding):
        def fit(self, parameters, config):
            return parameters, 1, {"python": random.random(), "numpy": float(np.random.rand())}  # noqa: NPY002 - as apps do

    app = make_app(ClientApp(lambda context: Drawing(context).to_client()))
    before = random.getstate()
    draws = [train_by_app(app, model, State(), start, replace_seed(seed))[1].metrics for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert random.getstate() == before


def replace_seed(seed: int) -> Assignment:
    return Assignment(seed=seed, hyper=Hyper(), values=VALUES)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (lambda arrays: (arrays[:-1], 1, {}), "parameters and buffers"),
        (lambda arrays: ([arrays[0].T, *arrays[1:]], 1, {}), r"\(3, 2\)"),
        (lambda arrays: (arrays, 0, {}), "0 examples"),
        (lambda arrays: (arrays, 1), "TypeError"),
        (lambda _: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_reply_that_does_not_fit_fails_the_task(model, start, make_app, reply, cause):
    """With the app's name and the cause."""

    class Faulty(Adding):
        def fit(self, parameters, config):
            return reply(parameters)

    app = make_app(ClientApp(lambda context: Faulty(context).to_client()))
    with pytest.raises(TaskFailed, match=cause) as caught:
        train_by_app(app, model, State(), start, TASK)
    assert "flower_test_app:app" in str(caught.value)


def test_an_app_that_the_operator_does_not_list_is_refused(model, start, make_app):
    app = make_app(ClientApp(lambda context: Adding(context).to_client()))
    registry.allow([])
    with pytest.raises(ConfigError, match="not allowed"):
        train_by_app(app, model, State(), start, TASK)
    with pytest.raises(ConfigError, match="no app"):
        train_by_app(replace(app, name=""), model, State(), start, TASK)
