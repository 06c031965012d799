"""Whether a network can answer for the examples is known before anybody trains."""

import pytest
import torch
from torch import nn

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.models import evaluate
from shared.models.build import build_initial
from shared.models.evaluate import build_skeleton, require_matching_examples, score
from shared.protocol.messages import Spec
from tests.naming import naming

SPEC = Spec(name="mlp", options={"features": 4, "hidden": 3, "classes": 2})


def test_labels_beyond_the_outputs_are_refused():
    """The remedy names the option and its value."""
    examples = Examples(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match=naming("`classes`", 3)):
        require_matching_examples(build_skeleton(SPEC), build_initial(SPEC, 0).tree(), examples)


def test_examples_of_another_shape_are_refused():
    """Before round 1, not after it."""
    with pytest.raises(ConfigError, match=naming((5,))):
        require_matching_examples(
            build_skeleton(SPEC), build_initial(SPEC, 0).tree(), Examples(torch.zeros(1, 5), torch.tensor([0]))
        )


def test_a_score_is_that_of_the_parameters_handed_in():
    """By hand: zero weights answer class 0 with probability one half."""
    tree = {key: torch.zeros_like(leaf) for key, leaf in build_initial(SPEC, 0).tree().items()}
    examples = Examples(torch.ones(4, 4), torch.tensor([0, 0, 0, 1]))
    require_matching_examples(build_skeleton(SPEC), tree, examples)
    found = score(build_skeleton(SPEC), tree, examples)
    assert found.accuracy == 0.75
    assert found.loss == pytest.approx(0.693147, abs=1e-5)
    assert found.by_class == (1.0, 0.0)


def test_a_class_without_examples_has_no_score_and_many_classes_have_none(monkeypatch):
    """Nobody can tell how good a model is at what it is not tried on; a record of 101 figures a round is too much."""
    monkeypatch.setattr(evaluate, "BATCH_SIZE", 2)
    for classes, by_class in ((3, (0.5, None, 0.0)), (100, (0.5, None, 0.0, *[None] * 97)), (101, ())):
        network = nn.Linear(2, classes)
        tree = {"weight": torch.zeros(classes, 2), "bias": -torch.arange(float(classes))}
        tree["weight"][1] = torch.tensor([0.0, 2.0])
        examples = Examples(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 0, 2]))
        assert score(network, tree, examples).by_class == by_class


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))


@pytest.mark.parametrize("train", [True, False])
def test_a_network_is_evaluated_in_evaluation_mode_and_nothing_moves(train, monkeypatch):
    """Whatever mode it is in, which it keeps: running statistics are used, and stay to the bit."""
    monkeypatch.setattr(evaluate, "BATCH_SIZE", 16)
    network, examples = normed().train(train), Examples(torch.randn(40, 4), torch.arange(40) % 2)
    tree = {key: leaf.clone() + 0.5 for key, leaf in network.state_dict().items()}
    before = {key: leaf.clone() for key, leaf in tree.items()}
    alone = normed().eval()
    alone.load_state_dict(tree)
    logits = alone(examples.inputs)
    require_matching_examples(network, tree, examples)
    found = score(network, tree, examples)
    assert found.accuracy == (logits.argmax(1) == examples.labels).double().mean().item()
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, examples.labels).item(), rel=1e-5)
    assert all(torch.equal(leaf, before[key]) for key, leaf in tree.items())
    assert network.training == train


@pytest.mark.parametrize("wide", [64, 250_000])
def test_a_wide_layer_has_fewer_examples_at_a_time(wide):
    """What layers take and give stays below the parameters' size or 64 MiB; a narrow layer has 512 at once."""
    network = nn.Sequential(nn.Linear(2, wide), nn.ReLU(), nn.Linear(wide, 2))
    held: list[int] = []
    network[1].register_forward_hook(lambda _layer, given, gives: held.append(given[0].nbytes + gives.nbytes))
    examples = Examples(torch.randn(600, 2), torch.arange(600) % 2)
    found = score(network, network.state_dict(), examples)
    assert max(held) <= evaluate.BATCH_BYTES
    assert sum(held) == (600 + 1) * 2 * 4 * wide
    assert len(held) - 1 == (2 if wide == 64 else 19)
    with torch.no_grad():
        logits = network(examples.inputs[:64])
    assert score(network, network.state_dict(), Examples(examples.inputs[:64], logits.argmax(1))).accuracy == 1.0
    assert found.by_class == score(network, network.state_dict(), examples).by_class
