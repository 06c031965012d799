"""The study of HCEF: the paper's fleet, one thing changed at a time, and what is read off it."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.plan.budget import BudgetPlan
from edge_server.plan.plan import devices
from edge_server.plan.sites import devices_by_site
from edge_server.record.amounts import Amount, amount_or_unknown
from edge_server.replay.study.grid import Cell
from edge_server.report.digest import Digest, RoundDigest, SpentByRound
from shared.models.build import build_blank
from tests.benchmarks.hcef_orderings import claims, times_less
from tests.edge_server.replay.study.shipped import grid

RESNET_BITS = 32 * 269_722
"""Of the paper's CIFAR-10 network."""


def variant(name: str) -> Cell:
    return next(cell for cell in grid("hcef") if cell.variant == name and cell.seeds == {"seed": 1})


def test_the_fleet_is_the_papers():
    """64 devices at eight sites on a ring; an update takes as long as ResNet-20's at 1 to 5 Mbit/s."""
    plan = variant("hcef").plan
    assert plan.sites
    fleet = devices(plan)
    assert [len(those) for those in devices_by_site(plan.sites, [one.name for one in fleet]).values()] == [8] * 8
    assert (plan.sites.graph, plan.sites.edge_rounds, plan.algorithm.options["local_steps"]) == ("ring", 5, 5)
    weights = sum(leaf.numel() for leaf in build_blank(plan.model).tree().values())
    links = fleet[0].link
    assert np.array(links.up_mbit_s) * 1e6 * RESNET_BITS / (32 * weights) == pytest.approx([1e6, 5e6], rel=0.01)


def test_one_thing_changes_at_a_time():
    """CEF and MLL-SGD have no budget, since they heed none: it would end them before the others."""
    ours = variant("hcef").plan
    assert {cell.plan.seed for cell in grid("hcef")} == {1, 2, 3}
    assert len(grid("hcef")) == 16 * 3
    for cell in grid("hcef"):
        free = cell.variant.startswith(("cef-", "mll_sgd")) or cell.variant == "cef"
        assert (cell.plan.budget == BudgetPlan()) == free, cell.variant
        assert cell.plan.rounds == ours.rounds
        assert cell.plan.hyper == ours.hyper or cell.variant.endswith(("-steep", "-fast"))
    assert variant("hcef-anew").plan.algorithm.options.items() - ours.algorithm.options.items() == {
        ("momentum", "anew")
    }


def digest(name: str, curve: list[tuple[float, float, float]]) -> Digest:
    """Return a run whose global rounds came to accuracies, seconds and joules."""
    none = Amount()
    rounds = [
        RoundDigest(
            round=number,
            outcome="aggregated",
            online=None,
            selected=1,
            arrived=1,
            late=0,
            failed=0,
            accuracy=accuracy,
            test_loss=None,
            loss=None,
            device_accuracy=None,
            seconds=seconds,
            joules=amount_or_unknown(joules),
            bytes_up=none,
            bytes_down=none,
            until=SpentByRound(
                seconds=amount_or_unknown(seconds),
                joules=amount_or_unknown(joules),
                bytes=none,
                bytes_up=none,
                bytes_down=none,
            ),
        )
        for number, (accuracy, seconds, joules) in enumerate(curve, 1)
    ]
    plan = variant("hcef").plan
    return Digest(
        run=name,
        live=False,
        started="",
        outcome="finished",
        measuring=none,
        plan=plan,
        rounds=rounds,
        devices=[],
        tasks=[],
    )


def test_what_is_read_off_it():
    slow, quick = digest("cef", [(0.5, 100, 10), (0.8, 200, 20)]), digest("hcef", [(0.8, 100, 16), (0.795, 200, 30)])
    runs = {"cef": {"1": slow}, "hcef": {"1": quick}}
    assert times_less(runs, "hcef", 0.8) == pytest.approx((2.0, 1.25))
    told = dict(claims(runs, 0.8))
    assert told["hcef: 1.5 times less time than cef"] == "yes: 2.00"
    assert told["hcef: 1.4 times less energy than cef"] == "NO: 1.25"
    assert told["hcef ends within a point of cef"] == "yes: 0.50"
    assert told["with more skew hcef gains more"] == "not known"
    assert times_less(runs, "hcef", 0.9) is None
