"""Count sketches of models: linear, split-invariant, distance-preserving."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_server.sites import mixing, sketch
from edge_server.sites.matrix import mixing_rows, zeta
from edge_server.sites.sketch import SIZE, disagreement, fold, mean, signs, unpack_sketch

RING = dict.fromkeys("abcdefgh", 2)
EDGES = [(one, other) for one, other in zip("abcdefgh", "bcdefgha", strict=True)]


def model(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"b": scale * torch.randn(301, generator=draw), "a": scale * torch.randn(40, 77, generator=draw)}


def sketched(tree: dict[str, torch.Tensor]) -> np.ndarray:
    found = unpack_sketch(mixing.sketch_tree(tree))
    assert found is not None
    return found


def test_signs_are_of_positions_alone():
    """As published, so that journals of two versions can be held against each other."""
    whole = signs(0, 1000)
    assert set(whole) == {-1.0, 1.0}
    assert abs(whole.sum()) < 150
    for start, count in ((0, 1), (63, 2), (64, 64), (130, 700)):
        assert (signs(start, count) == whole[start : start + count]).all()
    first = 0xE220A8397B1DCDAF  # of SplitMix64 with seed 0
    bits = [byte >> place & 1 for byte in first.to_bytes(8, "little") for place in range(7, -1, -1)]
    assert list(whole[:64]) == [-1.0 if bit else 1.0 for bit in bits]


def test_a_model_is_cut_up_as_one_likes(monkeypatch):
    values = np.random.default_rng(0).normal(size=1000)
    parts = sum((fold(values[start : start + 37], start) for start in range(0, 1000, 37)), np.zeros(SIZE))
    assert parts == pytest.approx(fold(values, 0))
    before = sketched(model(1))
    monkeypatch.setattr(mixing, "STRETCH", 100)
    assert sketched(model(1)) == pytest.approx(before)


def test_sketches_are_as_far_apart_as_models():
    """Within six standard deviations of 6 %, of each of twenty pairs."""
    for seed in range(20):
        one, other = model(seed), model(seed + 100, 0.5)
        real = float(sum(((one[key] - other[key]) ** 2).sum() for key in one) ** 0.5)
        assert np.linalg.norm(sketched(one) - sketched(other)) == pytest.approx(real, rel=0.4)
    assert (sketched(model(3)) == sketched(model(3))).all()


def test_mixing_shrinks_the_disagreement_of_sketches_by_zeta_and_keeps_their_mean():
    rows = mixing_rows(RING, EDGES)
    trees = {site: model(seed) for seed, site in enumerate(RING)}
    mixed = {site: mixing.mix_trees(rows[site], {one: trees[one] for one in rows[site]}) for site in RING}
    before, after = ({site: sketched(tree) for site, tree in those.items()} for those in (trees, mixed))
    assert disagreement(after, RING) <= zeta(RING, rows) * disagreement(before, RING) * (1 + 1e-6)
    assert mean(after, RING) == pytest.approx(mean(before, RING), abs=1e-4)


def test_what_is_no_sketch_is_none():
    assert unpack_sketch(b"") is None
    assert unpack_sketch(sketch.pack_sketch(np.full(SIZE, np.nan))) is None
