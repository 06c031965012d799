"""HCEF on two sites in virtual time: one coordinator, one joule budget."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from edge_server.journal.decision import Coordinated, Granted, Pledged
from edge_server.journal.records import (
    IMPLAUSIBLE_COST,
    AnyRecord,
    CostSettled,
    Gossiped,
    Noted,
    RoundOpened,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.replay.run import replay_sites
from edge_server.rounds.check_plan import load
from edge_server.sites.cases import ROUND_JOULES
from shared.protocol.measurements import JOULES
from tests.test_hcef import FLEET, LARGE, ledger_joules, make

SITES = (
    '[sites]\nedge_rounds = 2\ngraph = "full"\ndeadline_s = 4000.0\nclusters = { north = ["a", "b"], south = ["c"] }\n'
)
ROUNDS = 4
PLANS = Path(__file__).parents[3] / "deploy" / "plans"


def played(folder: Path, optimizer: str, budget: str) -> dict[str, list[AnyRecord]]:
    """Replay the plan; return each site's journal."""
    folder.mkdir()
    sections = {"measure": "seconds = 1.0", "cohort": "min_devices = 1", "budget": budget}
    plan = make(folder, optimizer, rounds=ROUNDS, model=LARGE, more=SITES + FLEET, **sections)
    found = replay_sites(plan, {site: folder / f"run-{site}" for site in ("north", "south")})
    return {site: records for site, (_, records) in found.items()}


def of(records: list[AnyRecord], kind: type[AnyRecord]) -> list[AnyRecord]:
    return [one for one in records if isinstance(one, kind)]


def test_sites_share_the_joules_of_a_plan_and_none_is_lost(tmp_path):
    """Six tenths of what CEF takes last for all rounds at both, though one spends more than its own share of them."""
    whole = played(tmp_path / "cef", 'baseline = "cef"', "")
    budget = 0.6 * math.fsum(map(ledger_joules, whole.values()))
    ends = played(tmp_path / "hcef", "", f"joules = {budget}")
    assert math.fsum(map(ledger_joules, ends.values())) <= budget * 1.05
    assert ledger_joules(ends["south"]) > budget / 3
    coordinated = of(ends["north"], Coordinated)
    assert [(one.round, one.term, set(one.decision.devices)) for one in coordinated] == [
        (number, 0, {"a", "b", "c"}) for number in range(1, ROUNDS + 1)
    ]
    for site, records in ends.items():
        assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
        assert [one.off for one in of(records, Gossiped)] == [{}, {}]
        assert [one.decision.coordinator for one in of(records, RoundOpened)[:ROUNDS]] == ["north"] * ROUNDS
        grants = {one.round: one.grants[site] for one in coordinated}
        assert {one.round: one.joules for one in of(records, Granted)} == grants
        limits = {one.round: one.decision.limits[ROUND_JOULES] for one in of(records, RoundOpened)[:ROUNDS]}
        assert limits == grants
    pledged = dict.fromkeys(range(1, ROUNDS + 1), 0.0)
    for records in ends.values():
        for one in of(records, Pledged):
            pledged[one.round] += one.joules
    for one in coordinated:
        assert one.decision.limits[ROUND_JOULES] == pytest.approx(pledged[one.round])
        assert math.fsum(one.grants.values()) == pytest.approx(pledged[one.round])


@pytest.mark.parametrize(("options", "joules"), [("gradients = 0", 40.0), ("gradients = 3, estimate_every = 10", 60.0)])
def test_the_ledger_is_what_devices_reported_and_the_budget_ends_the_run(tmp_path, options, joules):
    """Most tasks have no step: those with steps were charged as 0 J, and the budget never ended the run."""
    text = (PLANS / "hcef.toml").read_text()
    text, options_set = re.subn(r"gradients = 3(, estimate_every = \d+)?", options, text)
    text, budget_set = re.subn(
        r"\[budget\].*?\n\n", f"[budget]\ntime_s = 900.0\njoules = {joules}\n\n", text, flags=re.DOTALL
    )
    assert (options_set, budget_set) == (1, 1)
    (tmp_path / "plan.toml").write_text(text)
    plan = load(tmp_path / "plan.toml", tmp_path, several_sites=True)
    found = replay_sites(plan, {site: tmp_path / f"run-{site}" for site in plan.sites.clusters})
    for _, records in found.values():
        costs = {(one.round, one.device): one.update.cost for one in of(records, UpdateAccepted)}
        costs |= {(one.round, one.device): one.cost for one in of(records, CostSettled)}
        reported = math.fsum(getattr(cost, part) or 0.0 for cost in costs.values() for part in JOULES)
        assert ledger_joules(records) == pytest.approx(reported, rel=0.01)
        assert not [one.what for one in of(records, Noted) if one.reason == IMPLAUSIBLE_COST]
        assert "budget.joules" in of(records, RunClosed)[-1].cause
    assert math.fsum(ledger_joules(records) for _, records in found.values()) <= 1.1 * joules
