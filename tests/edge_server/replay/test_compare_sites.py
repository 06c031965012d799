"""Recorded runs of several sites played again together, and how far they are from these, by site and whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.records import Gossiped
from edge_server.journal.runs import StoredRun, find_site_runs
from edge_server.replay.comparison.compare_page import sites_page
from edge_server.replay.comparison.compare_sites import OF_ALL, SitesGap, compare_sites
from edge_server.replay.comparison.compare_text import sites_lines
from edge_server.replay.comparison.stored_runs import gap_between_runs
from edge_server.replay.run import run_replay
from edge_server.replay.source import find_site_traces
from shared.errors import ConfigError
from tests.edge_server.processes import called
from tests.edge_server.replay.test_sites import EQUAL, plan_of
from tests.naming import names_all, naming

SITES = ("roof", "barn", "yard")
LINKS = 'edges = [["roof", "barn"], ["barn", "yard"]]\nbackhaul_mbit_s = 0.1\nbackhaul_delay_s = 0.05'
SLOW = (
    '[[device]]\nname = "roof"\ncount = 2\ncompute_s = 0.5\n[[device]]\nname = "barn"\ncount = 2\ncompute_s = 1.25\n'
    '[[device]]\nname = "yard"\ncount = 2\ncompute_s = 2.0\n'
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a plan, and in `runs` its runs at three sites."""
    folder = tmp_path_factory.mktemp("recorded")
    plan_of(folder, f'{EQUAL}\nedge_rounds = 2\ngraph = "edges"\n{LINKS}', SLOW)
    run_replay(folder / "plan.toml", folder, folder / "runs", 0, 1)
    return folder


@pytest.fixture(scope="module")
def name(recorded: Path) -> str:
    """Return what the names of these runs begin with."""
    return min(run.name for run in (recorded / "runs").iterdir() if run.is_dir()).removesuffix("-barn")


def test_runs_of_sites_played_again_are_the_same_models_and_seconds(recorded, name, tmp_path, capsys):
    """Through the command, from the runs themselves: by the name that they begin with."""
    where = ("--data-dir", recorded / "runs", "--data-root", recorded)
    words = (
        "replay",
        name,
        "--compare",
        name,
        *where,
        "--workers",
        1,
        "--html",
        tmp_path / "gap.html",
        "--fail-above",
        0.01,
    )
    assert called(*words, "--format", "json") == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), SitesGap)
    assert (found.model, tuple(found.sites)) == ("same", SITES)
    assert names_all(found.recorded, name)
    for gap in found.sites.values():
        assert gap.model == "same"
        assert gap.updates.same == gap.updates.of == 8
        assert gap.rounds == 4
    for figure in ("loss", "accuracy", "compute_s", "bytes_up", "bytes_down", "gossip_bytes_up", "mean_accuracy"):
        spread = found.spread(figure)
        assert (spread.count, spread.most) == (spread.exact, 0.0), figure
    assert found.spread("round_s").most < 0.01
    assert found.spread("whole_s").most < 0.01
    assert OF_ALL.keys() <= {one.figure for one in found.pairs}
    text = (tmp_path / "gap.html").read_text()
    assert all(site in text for site in SITES)


def test_a_replay_of_the_plan_is_held_against_its_runs(recorded, name, capsys):
    """The same plan in the same virtual time: nothing differs at all."""
    runs = recorded / "runs"
    words = "replay", recorded / "plan.toml", "--compare", name, "--data-dir", runs, "--data-root", recorded
    assert called(*words, "--workers", 1, "--format", "json") == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), SitesGap)
    assert {spread.most for spread in found.spreads} == {0.0}
    assert called(*words, "--workers", 1) == 0
    out = capsys.readouterr().out
    assert any(names_all(line, "yard", "8 of 8") for line in out.splitlines())


def test_gossips_with_others_and_sites_that_are_missing_are_not_compared(recorded, name):
    runs = dict(zip(SITES, find_site_runs(recorded / "runs", name), strict=True))

    def torn(run: StoredRun) -> StoredRun:
        records = [
            msgspec.structs.replace(one, on=(), off={"barn": "deadline"})
            if isinstance(one, Gossiped) and one.round == 4
            else one
            for one in run.records
        ]
        return StoredRun(run.folder, records)

    gaps = {"roof": gap_between_runs(runs["roof"], torn(runs["roof"])), "barn": gap_between_runs(*[runs["barn"]] * 2)}
    [skipped] = [one for one in gaps["roof"].skipped if one.what == "gossip"]
    assert skipped.count == 1
    assert names_all(skipped.why, "barn")
    journals = {site: run.records for site, run in runs.items()}
    found = compare_sites(journals, {site: journals[site] for site in gaps}, gaps)
    [line] = [line for line in sites_lines(found) if names_all(line, "yard")]
    assert not names_all(line, "8 of 8"), "it is only recorded"
    headings = re.findall(r"<h\d[^>]*>([^<]*)", sites_page(found))
    assert any("roof" in heading for heading in headings)
    assert not any("yard" in heading for heading in headings)


def test_what_is_no_whole_run_of_sites_is_refused(recorded, name, tmp_path):
    runs = recorded / "runs"
    with pytest.raises(ConfigError, match=naming(f"{name}-roof")):
        run_replay(Path(f"{name}-roof"), recorded, runs, 0, 1)
    for site in ("roof", "yard"):
        (tmp_path / f"{name}-{site}").symlink_to(runs / f"{name}-{site}")
    with pytest.raises(ConfigError, match=naming("barn")):
        find_site_traces(Path(name), tmp_path, recorded)
    assert find_site_traces(Path("plan.toml"), runs, recorded) is None
