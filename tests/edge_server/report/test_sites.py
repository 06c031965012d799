"""The report of a plan's sites: edge models, disagreement, budgets, who decided, edges and the backhaul's bytes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.decision import TermBegan
from edge_server.journal.records import AnyRecord, Gossiped, RoundOpened, closed_rounds
from edge_server.journal.runs import find_site_runs
from edge_server.replay.run import replay_sites
from edge_server.report.csv_export import csv_site_lines
from edge_server.report.page import render_page
from edge_server.report.sites.digest import SitesDigest
from edge_server.report.sites.summarise import digest_sites
from edge_server.report.summarise import digest_run
from edge_server.sites.overview import write_rounds
from shared.errors import ConfigError, NoSuchRun
from tests.edge_server.processes import called
from tests.edge_server.replay.test_sites import EQUAL, plan_of
from tests.edge_server.report.test_page import parsed, section
from tests.edge_server.sites import test_hcef_sites
from tests.naming import names_all, naming
from tests.test_hcef import ledger_joules

SITES = ("roof", "barn", "yard")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the runs of three sites in a row, which mix after every second round."""
    folder = tmp_path_factory.mktemp("sites")
    table = f'{EQUAL}\nedge_rounds = 2\ngraph = "edges"\nedges = [["roof", "barn"], ["barn", "yard"]]'
    plan = plan_of(folder, table, rounds=6)
    replay_sites(plan, {site: folder / "runs" / f"tiny-{site}" for site in SITES})
    return folder / "runs"


def records_of(runs: Path) -> dict[str, list[AnyRecord]]:
    return {site: run.records for site, run in zip(SITES, find_site_runs(runs, "tiny"), strict=True)}


def together(records: dict[str, list[AnyRecord]]) -> list[SitesDigest]:
    return digest_sites([(digest_run(those), those) for those in records.values()])


def test_mixing_contracts_by_zeta_keeps_the_mean_and_the_papers_metric_is_the_mean_over_sites(runs):
    """(h).8, as the journals have it of a run: disagreement by at most zeta, the mean to 1e-6."""
    records = records_of(runs)
    [found] = together(records)
    assert [one.named for one in found.mixings] == ["0.1", "1.1", "2.1"]
    for one in found.mixings:
        assert 0 < one.after <= found.zeta * one.before
        assert one.moved < 1e-6 * one.before + 1e-6
        accuracies = [
            closed.accuracy
            for those in records.values()
            for closed in closed_rounds(those)
            if closed.round == one.round
        ]
        assert one.mean == pytest.approx(sum(accuracies) / 3)
        assert one.of == 3
    assert found.zeta == pytest.approx(2 / 3)
    assert [(edge.one, edge.other, edge.on, edge.off) for edge in found.edges] == [
        ("roof", "barn", 3, 0),
        ("barn", "yard", 3, 0),
    ]
    sent = {
        site: sum(sum(one.bytes_up.values()) for one in those if isinstance(one, Gossiped))
        for site, those in records.items()
    }
    assert {one.site: one.bytes_up for one in found.sites} == sent
    assert sum(edge.bytes for edge in found.edges) == sum(sent.values())


def test_the_whole_takes_the_seconds_of_the_slowest_site_of_each_global_round(runs):
    """(8) of the paper, from the rounds of each journal."""
    records = records_of(runs)
    [found] = together(records)
    seconds = {site: {one.round: one.seconds for one in closed_rounds(those)} for site, those in records.items()}
    expected = sum(max(one[number - 1] + one[number] for one in seconds.values()) for number in (2, 4, 6))
    assert found.mixings[-1].whole_s == pytest.approx(expected)


def test_edges_that_were_off_and_terms_are_told(runs):
    """At one end alone, and at both; a second term for a stretch of rounds."""
    records = records_of(runs)

    def torn(one: AnyRecord, site: str) -> AnyRecord:
        if isinstance(one, Gossiped) and one.round == 4 and site in ("roof", "barn"):
            other = "barn" if site == "roof" else "roof"
            return msgspec.structs.replace(one, on=tuple(set(one.on) - {other}), off={other: "deadline"})
        if isinstance(one, Gossiped) and (one.round, site) == (6, "yard"):
            return msgspec.structs.replace(one, on=(), off={"barn": "unheard"})
        return one

    [found] = together({site: [torn(one, site) for one in those] for site, those in records.items()})
    first, second = found.edges
    assert (first.on, first.off, first.causes, first.rounds, first.unlike) == (2, 1, {"deadline": 2}, ["1.1"], [])
    assert (second.on, second.off, second.rounds, second.unlike) == (2, 1, ["2.1"], ["2.1"])
    assert [one.off for one in found.mixings] == [[], ["roof - barn"], ["barn - yard"]]


def test_without_all_journals_what_needs_them_is_not_told(runs):
    records = records_of(runs)
    [found] = together({site: records[site] for site in ("roof", "yard")})
    assert found.missing == ["barn"]
    assert all(one.before is one.after is None and one.of == 2 for one in found.mixings)
    assert [(edge.on, edge.off) for edge in found.edges] == [(3, 0), (3, 0)]
    root = parsed(render_page([digest_run(records["roof"])], sites=[found]))
    assert names_all(section(root, "sites").words(), "barn")


def test_runs_of_sites_are_found_by_what_their_names_begin_with(runs, tmp_path, capsys):
    """Or by their folder; a folder of other runs beside them is refused; one site's whole name is that site."""
    for name in ("tiny", "ti", str(runs), "last"):
        assert [run.folder.name for run in find_site_runs(runs, name)] == [f"tiny-{site}" for site in SITES]
    assert [run.folder.name for run in find_site_runs(runs, "tiny-barn")] == ["tiny-barn"]
    with pytest.raises(NoSuchRun):
        find_site_runs(runs, "huge")
    (tmp_path / "mixed").mkdir()
    for name in ("tiny-roof", "tiny-barn"):
        (tmp_path / "mixed" / name).symlink_to(runs / name)
    (tmp_path / "mixed" / "other").symlink_to(runs / "tiny-yard")
    with pytest.raises(ConfigError, match=naming(tmp_path / "mixed", 3)):
        find_site_runs(tmp_path, "mixed")
    assert called("report", "tiny", "--data-dir", runs, "--format", "json") == 0
    [told] = json.loads(capsys.readouterr().out)["sites"]
    assert names_all(told["name"], "tiny")
    assert [one["site"] for one in told["sites"]] == list(SITES)
    assert called("report", "tiny", "--data-dir", runs, "--format", "csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    of_all = {line["figure"]: line for line in lines if line["run"] == told["name"] and line["round"] == "6"}
    assert {"accuracy.mean", "disagreement.before", "disagreement.after", "seconds.whole"} <= of_all.keys()
    assert of_all["seconds.whole"]["clock"] == "virtual"
    assert called("report", str(runs), "--out", tmp_path / "page.html") == 0
    shown = section(parsed((tmp_path / "page.html").read_text()), "sites")
    assert any("disagreement" in one.text for one in shown.all("figcaption"))


def test_budgets_and_who_decided_are_told(tmp_path):
    """Two sites under HCEF with joules: shares, grants, rho and theta, one coordinator; then a term taken over."""
    records = test_hcef_sites.played(tmp_path / "run", "", "joules = 300.0\ntime_s = 500.0")
    [found] = together(records)
    north, south = found.sites
    assert (north.share_joules, south.share_joules) == (pytest.approx(200.0), pytest.approx(100.0))
    assert north.moved_joules + south.moved_joules == pytest.approx(0.0, abs=1e-6)
    for one in found.sites:
        assert one.joules.value == pytest.approx(ledger_joules(records[one.site]))
    last = found.mixings[-1]
    assert (last.allowed_s, last.allowed_joules) == (500.0, 300.0)
    assert last.whole_joules.value == pytest.approx(sum(map(ledger_joules, records.values())))
    assert {"steps", "sent"} == found.given.keys()
    assert all(0 < one.least <= one.median <= one.most <= 1 for those in found.given.values() for one in those)
    [only] = found.coordinated
    assert (only.coordinator, only.term, only.sites) == ("north", 0, ["north", "south"])
    assert (only.first, only.last, only.rounds, north.decided, south.decided) == ("0.0", "1.1", 4, 4, 0)
    later = {site: [_later(one) for one in those] for site, those in records.items()}
    later["south"].append(TermBegan(round=3, term=1, cause="gone"))
    later["north"].append(TermBegan(round=3, term=1, cause="heard"))
    stretches = together(later)[0].coordinated
    assert [(one.coordinator, one.first, one.last, one.cause) for one in stretches] == [
        ("north", "0.0", "0.1", ""),
        ("south", "1.0", "1.1", "gone"),
    ]
    digests = [digest_run(those) for those in records.values()]
    words = section(parsed(render_page(digests, sites=[found])), "sites").words()
    assert names_all(words, "J", "north", "south")
    assert {line.figure for line in csv_site_lines(found)} >= {"joules.allowed", "given.sent.median", "coordinated"}


def _later(one: AnyRecord) -> AnyRecord:
    """Return a record as if site south had taken over before round 3."""
    if isinstance(one, RoundOpened) and one.round >= 3 and one.decision:
        return msgspec.structs.replace(one, decision=msgspec.structs.replace(one.decision, coordinator="south", term=1))
    return one


def test_sites_shows_the_round_that_a_peer_has_begun(runs, capsys):
    """Of a live run, while it lasts; a replay has none."""
    assert called("sites", "tiny-barn", "--data-dir", runs, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["site"], one["round"], one["last"]) for one in found["peers"]] == [
        ("roof", "", "2.1"),
        ("yard", "", "2.1"),
    ]
    write_rounds(runs / "tiny-barn", {"yard": 3})
    assert called("sites", "tiny-barn", "--data-dir", runs) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if line.startswith("yard")]
    assert rows == [["yard", "1.0", "3", "0"]]


def test_two_runs_of_one_plan_at_the_same_sites_stand_apart(runs):
    records = list(records_of(runs).values())
    found = digest_sites([(digest_run(those), those) for those in (*records, *records)])
    assert [[one.site for one in each.sites] for each in found] == [list(SITES)] * 2
