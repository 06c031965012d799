"""Whether a network can answer for the examples is known before anybody trains."""

import pytest
import torch

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.evaluate import require_fit, score, skeleton
from shared.messages import Spec
from shared.models.init import initial

SPEC = Spec(name="mlp", options={"features": 4, "hidden": 3, "classes": 2})


def test_labels_beyond_the_outputs_are_refused():
    """The remedy names the option and its value."""
    examples = Examples(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match="`classes` to 3"):
        require_fit(skeleton(SPEC), initial(SPEC, 0).tree(), examples)


def test_examples_of_another_shape_are_refused():
    """Before round 1, not after it."""
    with pytest.raises(ConfigError, match=r"examples of shape \(5,\)"):
        require_fit(skeleton(SPEC), initial(SPEC, 0).tree(), Examples(torch.zeros(1, 5), torch.tensor([0])))


def test_a_score_is_that_of_the_parameters_handed_in():
    """By hand: zero weights answer class 0 with probability one half."""
    tree = {key: torch.zeros_like(leaf) for key, leaf in initial(SPEC, 0).tree().items()}
    examples = Examples(torch.ones(4, 4), torch.tensor([0, 0, 0, 1]))
    require_fit(skeleton(SPEC), tree, examples)
    found = score(skeleton(SPEC), tree, examples)
    assert found.accuracy == 0.75
    assert found.loss == pytest.approx(0.693147, abs=1e-5)
