"""FedMP: the sum of absolute incoming weights decides."""

from __future__ import annotations

from shared.algorithms.subnetwork.fedmp import fedmp
from tests.shared.algorithms.dropouts import require_choice


def test_keeps_the_neurons_with_the_largest_sums_after_an_epoch():
    require_choice(fedmp(), lambda row: sum(map(abs, row.flatten().tolist())))
