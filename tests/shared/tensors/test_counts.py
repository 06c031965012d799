"""Counts of a share: as on paper, and one function for all who count."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path

import pytest

from shared.algorithms.fedselect import Growth
from shared.algorithms.personal.sparse_update import count_held
from shared.subnetworks.neurons import count_active
from shared.tensors.counts import ceil_share, floor_share, is_at_most

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("count", [3, 7, 10, 25, 50, 100, 300, 1000, 48_000, 11_689_512, 123_456_700])
def test_every_share_of_three_digits_counts_as_on_paper(count):
    for thousandths in range(1001):
        exact = Decimal(thousandths) * count / 1000
        assert floor_share(thousandths / 1000, count) == int(exact)
        assert ceil_share(thousandths / 1000, count) == math.ceil(exact)
        assert floor_share(1 - (1000 - thousandths) / 1000, count) == int(exact)  # as what is pruned is told


def test_who_keeps_prunes_and_grows_counts_alike():
    """0.29 * 100 is 28.999999999999996 in binary, and 71 of 100 are held where 0.29 of them are pruned."""
    assert (floor_share(0.29, 100), count_active(100, 0.29), count_held(100, 0.29)) == (29, 29, 71)
    assert Growth(0.29, 0.0, 0.57, 1).count(100, 0, 0) == 29
    assert Growth(0.1, 1.0, 0.57, 1).count(100, 20, 1) == 37
    assert is_at_most(1 - 0.9 + 0.2, 0.3)


def test_nobody_counts_a_share_for_himself():
    """`math.floor` of a product of a share stands in one file alone."""
    own = re.compile(r"math\.(floor|ceil)\([^)]*(share|ratio|keep|quorum|sparsity|self\.(begin|grow|most))")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for name in ("shared", "edge_server", "device_agent")
        for path in (ROOT / name).rglob("*.py")
        for line in path.read_text().splitlines()
        if own.search(line) and path.name != "counts.py"
    ]
    assert not found, "\n".join(found)
