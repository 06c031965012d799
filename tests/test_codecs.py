"""Whole rounds in which updates travel as the plan's codec has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest

from edge_server.journal.records import AnyRecord, UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Allocation, Cohort, assign_alike
from shared.algorithms.fedavg import fedavg
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.codecs.topk import topk_bytes
from shared.protocol.messages import Assignment, Spec
from shared.registry import build
from shared.tensors.tree import State, Tree
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


def passing(plan: Plan) -> Callable[[Tree], Tree]:
    """Return what becomes of the updates of three devices, told in turn, each of which remembers what it has left."""
    through = build(CODECS, Spec(name=plan.codec.name, options=plan.codec.options), "codec")
    turns, memories = cycle(NAMES), dict[str, Memory]()

    def sent(tree: Tree) -> Tree:
        device = next(turns)
        packed, memories[device] = through.encode(tree, memories.get(device))
        return through.decode(packed).tree

    return sent


TOPK = ["", "error_feedback = true", "random_k = true"]


@pytest.mark.parametrize("more", TOPK)
def test_the_largest_changes_alone_come_to_what_the_textbook_makes_of_them(tmp_path, more):
    """Bit for bit, live and in a replay: of a device's changes or of what it has left of all of them before. Bytes are
    those told beforehand, and as many in both."""
    options = ", ".join(filter(None, ["share = 0.1", more]))
    plan = make_plan(tmp_path, codec=f'name = "topk"\noptions = {{ {options} }}')
    state, records = Site(Network(), plan, tmp_path, name="site").play()
    require_equal(state.tree, textbook(plan, sent=passing(plan)))
    replayed, again = replay_plan(plan, tmp_path / "replayed")
    require_equal(replayed.tree, state.tree)
    assert sizes(again) == sizes(records)
    for size in sizes(records).values():
        assert 0 < size - topk_bytes(WEIGHTS + OTHERS, 0.1) + 40 <= HEADER_BYTES


def test_a_device_sends_the_share_that_it_was_told(tmp_path, monkeypatch):
    """An allocator's `sent` in place of the plan's share; who was told nothing, or all, sends all."""
    shares = {"a": 0.02, "b": 1.0}

    def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
        given = {device: {"sent": share} for device, share in shares.items()}
        return assign_alike(state, cohort, {**allocation, **given}, number)

    monkeypatch.setitem(ALGORITHMS, "shared", lambda: replace(fedavg(), assign=assign))
    plan = make_plan(tmp_path, algorithm='name = "shared"', codec='name = "topk"\noptions = { share = 0.5 }')
    state, records = Site(Network(), plan, tmp_path, name="site").play()
    codecs = cycle([CODECS["topk"](share=share) for share in (0.02, 1.0, 0.5)])

    def sent(tree: Tree) -> Tree:
        through = next(codecs)
        return through.decode(through.encode(tree, None)[0]).tree

    require_equal(state.tree, textbook(plan, sent=sent))
    replayed, again = replay_plan(plan, tmp_path / "replayed")
    require_equal(replayed.tree, state.tree)
    assert sizes(again) == sizes(records)
    for (_, device), size in sizes(records).items():
        told = topk_bytes(WEIGHTS + OTHERS, shares.get(device, 0.5))
        assert 0 < size - told + 40 <= HEADER_BYTES, device


def sizes(records: list[AnyRecord]) -> dict[tuple[int, str], int]:
    """Return the bytes of every update's payload, by round and device."""
    return {(one.round, one.device): one.update.params.size for one in records if isinstance(one, UpdateAccepted)}
