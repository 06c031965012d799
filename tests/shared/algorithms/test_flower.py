"""Flower apps as a method, in an environment without Flower: tasks, settings, and the remedy."""

from __future__ import annotations

import importlib.util

import pytest

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.algorithms.flower import flower
from shared.algorithms.flower_client import import_flower, read_node_config
from shared.errors import ConfigError
from shared.protocol.messages import Hyper, Spec
from shared.registry import build
from shared.tensors.tree import State

COHORT = Cohort(("b", "c"), Hyper(), seed=3, rounds=4)


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (4, 4), (5, 4), (7, 2), (9, 4)])
def test_a_task_has_the_round_and_the_devices_part(number, expected):
    """Tasks that only evaluate have numbers above all rounds: 5 for the last one, or 5 + the round."""
    tasks = flower("app:app", devices="a, b").assign(State(), COHORT, {"c": {"steps": 2}}, number)
    assert tasks["b"].values == {"server-round": expected, "partition-id": 1, "num-partitions": 2}
    assert tasks["c"].values == {"server-round": expected, "steps": 2}
    assert len({task.seed for task in tasks.values()}) == len(tasks)


def test_options_are_the_apps_own_settings():
    """Whatever their names are."""
    options = {"app": "x:app", "local-epochs": 3, "message.lr": 0.1, "nested.key": "text"}
    program = build(ALGORITHMS, Spec(name="flower", options=options), "algorithm").program
    assert program
    (app,) = program.evaluate.args
    assert (app.name, app.run_config) == ("x:app", {"local-epochs": 3, "nested.key": "text"})
    assert app.message_config == {"lr": 0.1}


def test_the_boards_node_config_is_read_as_flowers_command_reads_it():
    assert read_node_config('partition-id=2 rate=0.5 path="/srv/x" fast=true name=pi') == {
        "partition-id": 2,
        "rate": 0.5,
        "path": "/srv/x",
        "fast": True,
        "name": "pi",
    }
    with pytest.raises(ConfigError):
        read_node_config("partition-id")


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_the_extra_is_named():
    with pytest.raises(ConfigError, match=r"\[flower\]"):
        import_flower()
