"""Latency of a split round over the papers' radio, by cut and dropout."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.journal.costs import costs_by_round
from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import WirelessLink
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared.models.cost import cut_table
from shared.protocol.messages import Spec
from tests.edge_server.harness import write_plan

AT_200_M = "link = { kind = 'wireless', bandwidth_hz = 5e6, distance_m = 200.0, tx_dbm = 23.0, server_dbm = 37.0 }"
PERIOD, BATCH = 5, 16


def rates() -> tuple[float, float]:
    """Return bit/s up and down at 200 m."""
    device = build_behaviour(DevicePlan(name="a", link=WirelessLink(bandwidth_hz=5e6, distance_m=200.0)), 0, 1)
    return device.up.at(0.0), device.down.at(0.0)


def test_both_parts_of_a_round_s_latency_make_a_u_over_the_cuts_of_vgg_19():
    """By bytes over rates, batch 64, an average every 5 mini-batches: 598 + 59 ms at cut 4, 149 + 2415 ms at cut 12."""
    up, down = rates()
    cuts = cut_table(Spec(name="vgg19"), batch_size=64).cuts
    activations = {one.cut: 8000 * (one.features_bytes / up + one.gradient_bytes / down) for one in cuts}
    model = {one.cut: 8000 * 4 * one.below.parameters * (1 / up + 1 / down) / 5 for one in cuts}
    assert activations == pytest.approx({2: 1196, 4: 598, 8: 299, 12: 149.5, 16: 37.4}, rel=0.002)
    assert model == pytest.approx({2: 8.9, 4: 59.4, 8: 531, 12: 2415, 16: 4568}, rel=0.003)
    both = [activations[cut] + model[cut] for cut in activations]
    assert both[0] > both[1] < both[2] < both[3] < both[4]


def seconds_of(folder, drop: float = 0.0) -> tuple[float, float, int, int]:
    """Replay a round of a small convolutional network; return seconds and bytes of its exchange and of its model."""
    drawn = np.random.default_rng(0)
    arrays = {f"x_{name}": drawn.random((BATCH * PERIOD, 1, 16, 16), np.float32) for name in ("train", "test")}
    labels = {f"y_{name}": drawn.integers(0, 10, BATCH * PERIOD) for name in ("train", "test")}
    np.savez(folder / "noise.npz", **arrays, **labels)
    path = write_plan(
        folder,
        rounds=1,
        more=f'[[device]]\nname = "a"\ncompute_s = 0.0\n{AT_200_M}',
        data='source = "npz"\npath = "noise.npz"',
        model='name = "cnn"\noptions = { side = 16, width = 32, hidden = 32 }',
        algorithm=f'name = "splitfed"\noptions = {{ cut = 2, period = {PERIOD}, drop = {drop} }}',
        cohort="min_devices = 1",
        hyper=f"batch_size = {BATCH}\nlearning_rate = 0.01",
        evaluation="every = 0",
    )
    _, records = replay_plan(load(path, folder), folder / f"run-{drop}")
    cost = costs_by_round(records)[1]["a"]
    model_s, model = cost.download_s + cost.upload_s, cost.bytes_up + cost.bytes_down
    return cost.exchange_s, model_s, cost.features_bytes + cost.gradient_bytes, model


def test_a_replayed_round_takes_its_bytes_over_its_rates(tmp_path):
    """At 200 m, 46.8 Mbit/s up and 70.1 down; what else passes, headers and requests, costs less than a tenth."""
    up, down = rates()
    exchange_s, model_s, exchanged, model = seconds_of(tmp_path)
    assert exchange_s == pytest.approx(4 * exchanged * (1 / up + 1 / down), rel=0.1)
    assert model_s == pytest.approx(4 * model * (1 / up + 1 / down), rel=0.1)


def test_latency_falls_with_the_share_of_features_that_is_dropped(tmp_path):
    """The exchange's, and not the model's: at 0.7 less than a third of the columns are left."""
    whole, some, most = (seconds_of(tmp_path, drop) for drop in (0.0, 0.3, 0.7))
    assert whole[0] > some[0] > most[0]
    assert some[0] / whole[0] == pytest.approx(0.7, abs=0.05)
    assert most[0] / whole[0] == pytest.approx(0.3, abs=0.05)
    assert whole[1] == pytest.approx(most[1], rel=0.01)
