"""Plans from Python: the same plans as from a file, and the same errors."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from edge_server import api
from edge_server.plan.plan import is_same_plan
from edge_server.rounds.check_plan import load
from shared import registry
from shared.models.base import Model

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "deploy" / "plans" / "demo.toml"


@pytest.fixture(autouse=True)
def _usual_models():
    """Take away what a test allows."""
    before = registry.allowed_entries()
    yield
    registry.allow(before)


def tables() -> dict:
    return tomllib.loads(DEMO.read_text())


def build(width: int = 8) -> Model:
    """Return a network of the user's."""
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))


def test_a_file_a_dict_and_keywords_give_the_same_plan(tmp_path):
    planned = load(DEMO, tmp_path)
    for plan in (api.plan(DEMO), api.plan(str(DEMO)), api.plan(tables()), api.plan(**tables()), api.plan(planned)):
        assert is_same_plan(plan, planned)


def test_keywords_change_single_keys_of_tables():
    changed = api.plan(DEMO, rounds=3, hyper={"learning_rate": np.float64(0.1), "local_epochs": np.int64(2)})
    as_planned = load(DEMO, Path())
    assert (changed.rounds, changed.hyper.learning_rate, changed.hyper.local_epochs) == (3, 0.1, 2)
    assert changed.hyper.momentum == as_planned.hyper.momentum
    assert changed.device == as_planned.device


def test_a_table_that_chooses_something_else_is_replaced():
    changed = api.plan(DEMO, model={"name": build}, partition={"alpha": 2.0})
    assert changed.model.options == {}
    assert (changed.partition.kind, changed.partition.alpha) == ("dirichlet", 2.0)
    assert api.plan(DEMO, model={"name": "cnn", "options": {"width": 4}}).model.options["hidden"] == 64


@pytest.mark.parametrize(
    "fault",
    [
        {"rounds": "ten"},
        {"roundz": 3},
        {"hyper": {"batch_size": 0}},
        {"model": {"name": "cnm"}},
        {"algorithm": {"options": {"mu": 1.0}}},
        {"data": {"source": "npz", "path": "nothere.npz"}},
        {"device": [{"name": "pi 0"}, {"name": "pi-1"}]},
        {"round": {"most_diverged": 3, "on_missed": "panic"}},
    ],
)
def test_a_fault_is_reported_as_for_a_file(tmp_path, fault):
    def merge(table: dict, changes: dict) -> dict:
        inner = {key: merge(table[key], value) for key, value in changes.items() if isinstance(table.get(key), dict)}
        return table | changes | inner

    path, wrong = tmp_path / "plan.json", merge(tables(), fault)
    path.write_bytes(msgspec.json.encode(wrong))
    with pytest.raises(api.ConfigError) as of_file:
        load(path, tmp_path)
    for of in (lambda: api.plan(wrong, data_root=tmp_path), lambda: api.plan(tables(), data_root=tmp_path, **fault)):
        with pytest.raises(api.ConfigError) as of_dict:
            of()
        assert str(of_dict.value) == str(of_file.value).replace(str(path), "plan")


def test_a_value_that_no_file_could_hold_is_refused():
    for wrong in ({"seed": object()}, {"hyper": {"learning_rate": torch.zeros(2)}}, {"model": {"name": lambda: 1}}):
        with pytest.raises(api.ConfigError):
            api.plan(tables(), **wrong)
    with pytest.raises(api.ConfigError):
        api.plan([1, 2])


def test_paths_are_resolved_against_the_folder_of_data_sets(tmp_path):
    np.savez(tmp_path / "some.npz", x=np.zeros((20, 8, 8), np.float32), y=np.arange(20) % 10)
    plan = api.plan(DEMO, data={"source": "npz", "path": Path("some.npz")}, data_root=tmp_path)
    assert plan.data
    assert plan.data.path == str(tmp_path / "some.npz")


def test_a_function_stands_for_its_name_and_is_allowed():
    plan = api.plan(tables() | {"model": {"name": build, "options": {"width": 4}}})
    assert plan.model.name == f"{__name__}:build"
    with pytest.raises(api.ConfigError):
        api.plan(tables() | {"model": {"name": "torch.nn:Linear"}})
