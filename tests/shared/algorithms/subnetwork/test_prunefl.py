"""PruneFL: the gradient of incoming weights decides."""

from __future__ import annotations

import math

from shared.algorithms.subnetwork.prunefl import prunefl
from tests.shared.algorithms.dropouts import require_choice


def test_keeps_the_neurons_with_the_largest_gradients_of_an_epoch():
    require_choice(prunefl(), lambda row: math.hypot(*row.flatten().tolist()), gradients=True)
