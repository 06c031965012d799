"""Whole rounds in which updates travel as the plan's codec has them."""

from __future__ import annotations

import pytest

from edge_server.journal.records import UpdateAccepted, closed_rounds
from shared.codecs import CODECS
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import Tree
from tests.edge_server.fleets import Network, Site
from tests.edge_server.textbook import NAMES, ROUNDS, make_plan, require_equal, textbook

WEIGHTS, OTHERS = 8 * 64 + 64 * 3, 64 + 3
"""Of the plan's network, in matrices and in biases."""
PLANS = {
    'name = "masked"': 4 * WEIGHTS + WEIGHTS // 8 + 4 * OTHERS,
    'name = "quantize"\noptions = { bits = 4, scope = "tree" }': -(-(WEIGHTS + OTHERS) * 5 // 8) + 8,
    'name = "chain"\noptions = { quantize_bits = 8, quantize_scope = "tree" }': (
        WEIGHTS * 9 // 8 + 8 + WEIGHTS // 8 + 4 * OTHERS
    ),
}
HEADER_BYTES = 450
"""Of a payload of four leaves: at most so many are header and gaps."""


@pytest.mark.parametrize("codec", PLANS)
def test_what_arrives_is_what_the_codec_makes_of_an_update(tmp_path, codec):
    """The run is the textbook's with every update encoded and decoded, bit for bit: draws follow from the content. On
    the wire are the formula's bytes, of weights none of which is zero, and a header."""
    plan = make_plan(tmp_path, codec=codec)
    here = Site(Network(), plan, tmp_path, name="site")

    def sent(tree: Tree) -> Tree:
        through = build(CODECS, Spec(name=plan.codec.name, options=plan.codec.options), "codec")
        return through.decode(through.encode(tree, None)[0]).tree

    state, records = here.play()
    require_equal(state.tree, textbook(plan, sent=sent))
    assert [closed.outcome for closed in closed_rounds(records)] == ROUNDS * ["aggregated"]
    updates = [record.update for record in records if isinstance(record, UpdateAccepted)]
    assert len(updates) == ROUNDS * len(NAMES)
    for update in updates:
        assert 0 < update.params.size - PLANS[codec] <= HEADER_BYTES
