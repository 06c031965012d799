"""Hermes: the Euclidean norm of incoming weights decides."""

from __future__ import annotations

import math

import pytest

from shared.algorithms.subnetwork.hermes import hermes
from tests.shared.algorithms.dropouts import require_choice


def test_keeps_the_neurons_with_the_largest_weights_after_an_epoch():
    require_choice(hermes(), lambda row: math.hypot(*row.flatten().tolist()))


@pytest.mark.parametrize("bad", [{"keep": 0.0}, {"share": -1.0}, {"early_stopping": True, "min_alive": 0}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"keep|share|min_alive"):
        hermes(**bad)
