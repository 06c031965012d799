"""What the server's part of a network knows of features: how large they usually are, by its own examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edge_server.rounds.split.top_model import TopModel
from shared.algorithms import ALGORITHMS
from shared.codecs.dense import dense
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import State

CNN = Spec(name="cnn")


def top_of(method: str, examples: torch.Tensor | None) -> TopModel:
    algorithm, network = build(ALGORITHMS, Spec(name=method), "algorithm"), build_initial(CNN, 1)
    model = replace(build_blank(CNN), example=() if examples is None else tuple(examples.shape[1:]))
    return TopModel(algorithm, model, State(network.tree()), dense(), {}, seed=1, before=0, examples=examples)


@pytest.mark.parametrize("method", ["fedsl", "semisfl"])
def test_usual_features_are_as_large_as_the_network_makes_them_of_the_servers_examples(method):
    """A device cannot move them, and inputs that are a thousand times as large make them so too."""
    examples = torch.rand((8, 1, 28, 28), generator=torch.Generator().manual_seed(3))
    small, large = (top_of(method, scale * examples) for scale in (1.0, 1000.0))
    before = {key: leaf.clone() for key, leaf in small.state.tree.items()}
    assert 0.01 < small.usual_size() < 10
    assert small.usual_size() == top_of(method, examples).usual_size()
    assert large.usual_size() > 300 * small.usual_size()
    assert all(torch.equal(leaf, small.state.tree[key]) for key, leaf in before.items())


def test_a_server_without_examples_takes_them_to_be_about_one():
    assert top_of("fedsl", None).usual_size() == 1.0
