"""The table `[sites]`: who belongs where, numbers of rounds, and every mistake with its remedy."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.plan.sites import SitesPlan, devices_by_site, parse_round, round_name, round_number, round_position
from edge_server.rounds.check_plan import load, require_one_site
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import captured
from tests.naming import names_all, naming

DEVICES = '[[device]]\nname = "roof"\ncount = 3\n[[device]]\nname = "barn"\ncount = 2\n[[device]]\nname = "yard"'
SITES = 'edge_rounds = 2\nclusters = { roof = ["roof-*"], barn = ["barn-0", "barn-1"], yard = ["yard"] }'


def plan_file(folder, sites=SITES, devices=DEVICES, **sections):
    return write_plan(
        folder, **{"rounds": 4, "cohort": "min_devices = 1"} | sections, more=f"[sites]\n{sites}\n{devices}"
    )


def test_devices_belong_to_the_sites_that_their_names_match(tmp_path):
    plan = load(plan_file(tmp_path), tmp_path, several_sites=True)
    assert plan.sites
    assert plan.sites.names == ("roof", "barn", "yard")
    assert devices_by_site(plan.sites, ["yard", "roof-1", "barn-0", "roof-0"]) == {
        "roof": ("roof-1", "roof-0"),
        "barn": ("barn-0",),
        "yard": ("yard",),
    }
    assert [plan.sites.is_mixed(number) for number in range(1, 5)] == [False, True, False, True]


@pytest.mark.parametrize("edge_rounds", [1, 2, 5])
def test_numbers_count_edge_rounds_through(edge_rounds):
    """l*q + r + 1 and back, and as people write it."""
    table = SitesPlan(clusters={"a": ("*",)}, edge_rounds=edge_rounds)
    for number in range(1, 4 * edge_rounds + 1):
        global_round, edge_round = round_position(number, edge_rounds)
        assert 0 <= edge_round < edge_rounds
        assert round_number(global_round, edge_round, edge_rounds) == number
        assert parse_round(round_name(number, edge_rounds), table) == number
        assert parse_round(str(number), table) == parse_round(str(number), msgspec.UNSET) == number
        assert table.is_mixed(number) == (edge_round == edge_rounds - 1)
    assert round_name(1, edge_rounds) == "0.0"


@pytest.mark.parametrize(
    ("text", "sites"), [("1.2", True), ("1.0", False), ("x", True), ("1.0.0", True), ("-1", True), ("", False)]
)
def test_a_round_that_is_none_is_refused(text, sites):
    with pytest.raises(ConfigError, match=naming(repr(text))):
        parse_round(text, SitesPlan(clusters={"a": ("*",)}, edge_rounds=2) if sites else msgspec.UNSET)


@pytest.mark.parametrize(
    ("sites", "named"),
    [
        ("clusters = {}", ("sites", "clusters")),
        (SITES.replace("edge_rounds = 2", "edge_rounds = 0"), ("sites", "edge_rounds")),
        (SITES.replace("edge_rounds = 2", "edge_rounds = 3"), ("rounds", 4, "sites.edge_rounds", 3)),
        (f'{SITES}\ngraph = "star"', ("sites.graph", "star")),
        (f'{SITES}\ngraph = "erdos_renyi"', ("sites", "p")),
        (f'{SITES}\ngraph = "erdos_renyi"\np = 0.0', ("sites", "p")),
        (f'{SITES}\ngraph = "erdos_renyi"\np = nan', ("sites", "p")),
        (f'{SITES}\ngraph = "erdos_renyi"\np = 1e-9', ("sites.p", 1e-9)),
        (f"{SITES}\np = 0.5", ("sites", "p", "erdos_renyi")),
        (f"{SITES}\nseed = 3", ("sites", "seed", "erdos_renyi")),
        (f'{SITES}\nedges = [["roof", "barn"]]', ("sites", "edges", "graph")),
        (f'{SITES}\ngraph = "edges"', ("sites", "edges", "graph")),
        (f'{SITES}\ngraph = "edges"\nedges = [["roof", "barn"]]', ("sites.edges", "yard", "roof")),
        (f'{SITES}\ngraph = "edges"\nedges = [["roof", "attic"]]', ("sites.edges", "attic", "roof", "barn", "yard")),
        (f'{SITES}\ngraph = "edges"\nedges = [["roof", "roof"]]', ("sites.edges", "roof")),
        (f'{SITES}\ngraph = "edges"\nedges = [["roof", "barn"], ["barn", "roof"]]', ("sites.edges", "roof", "barn")),
        (f'{SITES}\ngraph = "edges"\nedges = [["roof", "barn", "yard"]]', ("sites.edges[0]", 2, 3)),
        (f"{SITES}\ndeadline_s = 0.0", ("sites", "deadline_s")),
        (f"{SITES}\ndeadline_s = inf", ("sites", "deadline_s")),
        (f"{SITES}\nbackhaul_mbit_s = 0.0", ("sites", "backhaul_mbit_s")),
        (f"{SITES}\nbackhaul_delay_s = -1.0", ("sites", "backhaul_delay_s")),
        (f"{SITES}\nbackhaul_ms = 1.0", ("sites", "backhaul_ms")),
        ('clusters = { roof = ["*"], barn = ["barn-0"] }', ("sites.clusters", "barn-0", "roof", "barn")),
        ('clusters = { roof = ["roof-*"], barn = ["barn-*"] }', ("sites.clusters", 1, "yard")),
        ('clusters = { roof = ["*"], barn = [] }', ("sites.clusters.barn",)),
        ('clusters = { roof = ["*"], barn = ["shed-*"] }', ("sites.clusters.barn", "shed-*")),
        ('clusters = { roof = ["*", "shed-*"] }', ("sites.clusters.roof", "shed-*")),
        ('clusters = { "a b" = ["*"] }', ("sites.clusters", "a b")),
        ('clusters = { a = ["roof-*"], A = ["[!r]*"] }', ("sites.clusters", "a", "A")),
    ],
)
def test_a_mistake_names_the_key_and_its_value(tmp_path, sites, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        load(plan_file(tmp_path, sites), tmp_path, several_sites=True)


def test_a_site_must_have_as_many_devices_as_its_rounds_wait_for(tmp_path):
    """The third site has one; a round of it would wait for ever."""
    code, _, err = captured("plan", "check", plan_file(tmp_path, cohort="min_devices = 2"))
    assert code == 2
    assert names_all(err, "cohort.min_devices", "yard", 1, 2)


def test_a_plan_without_devices_has_no_clusters(tmp_path):
    with pytest.raises(ConfigError, match=naming("clusters", "[[device]]")):
        load(plan_file(tmp_path, devices=""), tmp_path, several_sites=True)


def test_only_methods_that_say_what_is_mixed_run_on_sites(tmp_path):
    """FedAvg and FedProx; the others are named as they are refused."""
    able = [name for name, builder in ALGORITHMS.items() if builder().mixing]
    assert {"fedavg", "fedprox"} <= set(able)
    load(plan_file(tmp_path, algorithm='name = "fedprox"'), tmp_path, several_sites=True)
    with pytest.raises(ConfigError, match=naming("sites", "fedselect", "fedavg", "fedprox")):
        load(plan_file(tmp_path, algorithm='name = "fedselect"'), tmp_path, several_sites=True)


def test_what_runs_one_server_refuses_sites(tmp_path):
    """Rather than run one that asks all devices."""
    path = plan_file(tmp_path)
    with pytest.raises(ConfigError, match=naming(path, "sites", "[[peer]]")):
        load(path, tmp_path)
    with pytest.raises(ConfigError, match=naming(path, "sites", "[[peer]]")):
        require_one_site(load(path, tmp_path, several_sites=True), path)


def test_plan_check_shows_sites_weights_and_zeta(tmp_path):
    """A ring of three is complete; 3, 2 and 1 devices: each edge carries the smaller of N / 3."""
    code, out, _ = captured("plan", "check", plan_file(tmp_path))
    assert code == 0
    assert "ring" in out
    assert "roof-0, roof-1, roof-2" in out
    assert "roof 0.6667, barn 0.2222, yard 0.1111" in out
    code, out, _ = captured("plan", "check", plan_file(tmp_path), "--format", "json")
    report = msgspec.json.decode(out)
    assert report["graph"] == "ring"
    assert 0 < report["zeta"] < 1
    assert [site["neighbours"] for site in report["sites"]] == [["barn", "yard"], ["roof", "yard"], ["roof", "barn"]]
    assert report["sites"][2]["weights"] == pytest.approx({"roof": 1 / 3, "barn": 1 / 3, "yard": 1 / 3})


def test_plan_check_takes_any_plan_and_says_what_is_wrong(tmp_path):
    path = write_plan(tmp_path)
    code, out, _ = captured("plan", "check", path)
    assert code == 0
    assert names_all(out, "tiny", 2, "fedavg", 0)
    path = plan_file(tmp_path, 'clusters = { roof = ["roof-*"] }')
    code, _, err = captured("plan", "check", path)
    assert code == 2
    assert names_all(err, path, "sites.clusters", 3, "barn-0", "yard")
