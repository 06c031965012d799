"""A mistyped name is answered with the one that was probably meant."""

from __future__ import annotations

import pytest

from device_agent.profile.load import load_for_board
from edge_server.allocation.coordinator import find_allocator
from edge_server.journal.runs import find_run
from edge_server.plan.optimizer import OptimizerPlan
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from shared.models.build import build_blank
from shared.protocol.messages import Spec
from shared.registry import build
from shared.spelling import guess


def test_the_nearest_name_is_asked_for_whatever_its_case():
    assert guess("FedAvgg", ["fedavg", "fedprox"]) == "; did you mean 'fedavg'?"
    assert guess("nothing like it", ["fedavg"]) == ""
    assert guess("x", []) == ""


def run_named(tmp_path, name):
    (tmp_path / "demo-20261127T000000Z-abcd").mkdir()
    (tmp_path / "demo-20261127T000000Z-abcd" / "journal.sqlite").touch()
    find_run(tmp_path, name)


MISTAKES = {
    "fedavg": lambda _: build(ALGORITHMS, Spec(name="fedagv"), "algorithm"),
    "width": lambda _: build_blank(Spec(name="cnn", options={"widht": 3})),
    "cnn": lambda _: build_blank(Spec(name="cnnn")),
    "hcef": lambda _: find_allocator(OptimizerPlan(name="hceff")),
    "raspberry-pi-5": lambda root: load_for_board(root, "raspberry-pi5"),
    "demo-20261127T000000Z-abcd": lambda root: run_named(root, "demo-20261127T00000Z-abcd"),
}


def test_an_optimizer_of_training_is_not_an_allocator():
    with pytest.raises(ConfigError, match=r"hyper\.optimizer"):
        find_allocator(OptimizerPlan(name="adam"))
    with pytest.raises(ConfigError) as caught:
        find_allocator(OptimizerPlan(name="hceff"))
    assert "hyper.optimizer" not in str(caught.value)


@pytest.mark.parametrize("meant", MISTAKES)
def test_names_of_every_kind(tmp_path, meant):
    with pytest.raises(ConfigError, match=f"'{meant}'"):
        MISTAKES[meant](tmp_path)
