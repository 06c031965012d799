"""Several sites in one virtual time: hierarchical FedAvg as a textbook has it, its traffic, its seconds, its runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, Gossiped, RoundOpened, closed_rounds
from edge_server.learner import initial_network, plan_frozen
from edge_server.plan.plan import Plan, devices
from edge_server.plan.sites import devices_by_site
from edge_server.replay.run import replay_plan, replay_sites, run_replay
from edge_server.replay.trace import files
from edge_server.sites.graph import graph_edges
from edge_server.sites.matrix import mixing_rows, zeta
from edge_server.sites.mixing import mix_trees
from edge_server.sites.model_payload import pack_model
from edge_server.sites.sketch import disagreement, mean, unpack_sketch
from shared.errors import ConfigError
from shared.models.build import DRAW
from shared.tensors.tree import State
from tests.edge_server.harness import beginning
from tests.edge_server.processes import captured
from tests.edge_server.textbook import DEVICES, make_plan, require_equal, textbook_round
from tests.naming import naming

FLEET = (
    '[[device]]\nname = "roof"\ncount = 2\n[[device]]\nname = "barn"\ncount = 2\n[[device]]\nname = "yard"\ncount = 2'
)
EQUAL = 'clusters = { roof = ["roof-*"], barn = ["barn-*"], yard = ["yard-*"] }'
NETWORK = 'name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }'
UNEQUAL = 'clusters = { roof = ["roof-*", "yard-0"], barn = ["barn-*"], yard = ["yard-1"] }'
ALL = {"cohort": "min_devices = 1"}


def plan_of(folder: Path, sites: str, fleet: str = FLEET, **sections: str) -> Plan:
    return make_plan(folder, **{"rounds": 4, **ALL} | sections, more=f"[sites]\n{sites}\n{fleet}")


def played(plan: Plan, folder: Path, **how: int) -> dict[str, tuple[State, list[AnyRecord]]]:
    assert plan.sites
    return replay_sites(plan, {site: folder / f"run-{site}" for site in plan.sites.names}, **how)


def gossips(records: list[AnyRecord]) -> list[Gossiped]:
    return [one for one in records if isinstance(one, Gossiped)]


def hierarchical(plan: Plan) -> dict[str, dict[str, torch.Tensor]]:
    """FedAvg at each site, and after every global round each takes the mixing matrix's part of all models."""
    assert plan.sites
    clusters = devices_by_site(plan.sites, [one.name for one in devices(plan)])
    rows = mixing_rows({site: len(those) for site, those in clusters.items()}, graph_edges(plan.sites))
    trees = {site: beginning(plan) for site in clusters}
    for number in range(1, plan.rounds + 1):
        trees = {site: textbook_round(plan, number, trees[site], those) for site, those in clusters.items()}
        if plan.sites.is_mixed(number):
            trees = {site: mix_trees(rows[site], {one: trees[one] for one in rows[site]}) for site in clusters}
    return trees


@pytest.mark.parametrize("clusters", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("graph", ['graph = "full"', 'graph = "edges"\nedges = [["roof", "barn"], ["barn", "yard"]]'])
def test_a_replay_of_sites_is_hierarchical_fedavg_bit_for_bit(tmp_path, clusters, graph):
    """Two edge rounds a global round, over links that take their time, each site with its own devices' examples."""
    plan = plan_of(tmp_path, f"{clusters}\nedge_rounds = 2\n{graph}\nbackhaul_mbit_s = 0.05\nbackhaul_delay_s = 0.2")
    found, expected = played(plan, tmp_path), hierarchical(plan)
    for site, (state, records) in found.items():
        require_equal(state.tree, expected[site])
        require_equal(checkpoints.load(tmp_path / f"run-{site}" / "checkpoints", 4).tree, expected[site])
        assert [one.round for one in gossips(records)] == [2, 4]
        assert not any(one.off for one in gossips(records))
        assert [closed.outcome for closed in closed_rounds(records)] == ["aggregated"] * 4
    require_contraction(plan, {site: gossips(records) for site, (_, records) in found.items()})


def require_contraction(plan: Plan, gossiped: dict[str, list[Gossiped]]) -> None:
    """Check by the journals' sketches that each gossip kept the mean over devices and shrank disagreement by zeta."""
    assert plan.sites
    clusters = devices_by_site(plan.sites, [one.name for one in devices(plan)])
    sizes = {site: len(those) for site, those in clusters.items()}
    factor = zeta(sizes, mixing_rows(sizes, graph_edges(plan.sites)))
    for records in zip(*gossiped.values(), strict=True):
        before, after = (
            {site: unpack_sketch(getattr(one, name)) for site, one in zip(gossiped, records, strict=True)}
            for name in ("before", "after")
        )
        whole, apart = mean(before, sizes), disagreement(before, sizes)
        assert mean(after, sizes) == pytest.approx(whole, abs=1e-6 * float(abs(whole).max()))
        assert apart > 0
        assert disagreement(after, sizes) <= factor * apart + 1e-6 * float(abs(whole).max())


def test_on_a_full_graph_all_edge_models_are_equal_after_each_gossip(tmp_path):
    """To the last bit, with weights 1/3; in between they differ."""
    plan = plan_of(tmp_path, f'{EQUAL}\nedge_rounds = 2\ngraph = "full"', rounds=6)
    found = played(plan, tmp_path)
    first, *others = (state.tree for state, _ in found.values())
    for tree in others:
        require_equal(tree, first)
    before = [checkpoints.load(tmp_path / f"run-{site}" / "checkpoints", 5).tree for site in found]
    assert not torch.equal(*(tree["1.weight"] for tree in before[:2]))
    accuracies = {tuple(one.accuracy for one in closed_rounds(records))[1::2] for _, records in found.values()}
    assert len(accuracies) == 1, "rounds 2, 4 and 6 are evaluated with the mixed model"


def test_gossip_is_one_model_for_each_neighbour_and_way(tmp_path):
    """Within 2 % of its bytes; on a ring of four each site has two neighbours."""
    fleet = f'{FLEET}\n[[device]]\nname = "shed"'
    clusters = f'{EQUAL[:-2]}, shed = ["shed"] }}'
    plan = plan_of(tmp_path, clusters, fleet, rounds=2, model='name = "mlp"\noptions = { features = 8, hidden = 3000 }')
    sites = ("roof", "barn", "yard", "shed")
    for site, (state, records) in played(plan, tmp_path).items():
        model = sum(len(part) for part in pack_model(state.tree))
        place = sites.index(site)
        for one in gossips(records):
            assert set(one.on) == {sites[place - 1], sites[(place + 1) % 4]} == one.bytes_up.keys()
            for size in (*one.bytes_up.values(), *one.bytes_down.values()):
                assert size == pytest.approx(model, rel=0.02)
        assert len(gossips(records)) == 2


@pytest.mark.parametrize(
    "sections",
    [{"model": f'{NETWORK}\nfreeze = ["1"]'}, {"model": NETWORK, "lora": "rank = 2"}],
    ids=["freeze", "lora"],
)
def test_sites_exchange_what_is_trained(tmp_path, sections):
    """Frozen leaves are equal on all sites: they stay as they are, and cost no bytes."""
    hyper = "batch_size = 8\nlearning_rate = 0.02"
    plan = plan_of(tmp_path, f'{EQUAL}\nedge_rounds = 2\ngraph = "full"', hyper=hyper, **sections)
    found, first = played(plan, tmp_path), initial_network(plan, DRAW).tree()
    frozen = plan_frozen(plan)
    size = sum(leaf.nbytes for name, leaf in first.items() if name not in frozen)
    states = [state for state, _ in found.values()]
    for state, records in found.values():
        require_equal(state.tree, states[0].tree)
        assert {name for name, leaf in first.items() if torch.equal(leaf, state.tree[name])} == frozen
        for gossip in gossips(records):
            assert all(size <= sent <= size + 2000 for sent in (*gossip.bytes_up.values(), *gossip.bytes_down.values()))


def test_the_seconds_of_gossip_are_those_of_the_backhaul(tmp_path):
    """A model of 100 kB at 1 Mbit/s and 50 ms: both ways at once, so about one transfer; it waits for the slowest."""
    slow = FLEET.replace('"yard"', '"yard"\ncompute_s = 5.0')
    table = f'{EQUAL}\nbackhaul_mbit_s = 1.0\nbackhaul_delay_s = 0.05\ngraph = "edges"\n'
    table += 'edges = [["roof", "barn"], ["barn", "yard"]]'
    model = 'name = "mlp"\noptions = { features = 8, hidden = 2000, classes = 3 }'
    plan = plan_of(tmp_path, table, slow, rounds=1, model=model)
    found = played(plan, tmp_path)
    size = 4 * (8 * 2000 + 2000 + 3 * 2000 + 3)
    seconds = {site: gossips(records)[0].seconds for site, (_, records) in found.items()}
    transfer = 8 * size / 1e6
    assert transfer < seconds["yard"] < transfer + 10 * 0.05, "it is there last, and waits for no second offer"
    assert seconds["barn"] > 4.0, "it waits for the yard, whose devices take 5 s"
    for _, records in found.values():
        [closed] = closed_rounds(records)
        assert closed.seconds > transfer, "gossip is part of its round"


def test_two_replays_of_sites_write_the_same_bytes(tmp_path):
    """In one process or with three."""
    plan = plan_of(tmp_path, f"{UNEQUAL}\nedge_rounds = 2\nbackhaul_mbit_s = 0.1")
    for place, workers in (("one", 1), ("several", 3)):
        played(plan, tmp_path / place, workers=workers)
    for site in ("roof", "barn", "yard"):
        one, other = ((tmp_path / place / f"run-{site}" / "journal.jsonl").read_bytes() for place in ("one", "several"))
        assert one == other


def test_one_site_alone_is_the_plan_without_sites(tmp_path):
    """The same model bit for bit, the same rounds."""
    alone = make_plan(tmp_path, more=DEVICES)
    state, records = replay_plan(alone, tmp_path / "alone")
    found = played(make_plan(tmp_path, more=f'[sites]\nclusters = {{ lab = ["*"] }}\n{DEVICES}'), tmp_path)
    require_equal(found["lab"][0].tree, state.tree)
    seconds = [[one.seconds for one in closed_rounds(those)] for those in (records, found["lab"][1])]
    assert seconds[0] == seconds[1]


def test_the_command_records_a_run_for_each_site(tmp_path):
    """Beside each other, so that `runs`, `show` and `report` take them; what has no meaning for several is refused."""
    plan_of(tmp_path, f"{EQUAL}\nedge_rounds = 2", rounds=2)
    path, runs = tmp_path / "plan.toml", tmp_path / "runs"
    places = "--data-dir", runs, "--data-root", tmp_path
    code, out, _ = captured("replay", path, *places, "--workers", 1)
    assert code == 0
    names = sorted(folder.name for folder in runs.iterdir() if folder.is_dir())
    assert [name.rpartition("-")[2] for name in names] == ["barn", "roof", "yard"]
    assert len({name.rpartition("-")[0] for name in names}) == 1
    assert all(name in out for name in names)
    code, out, _ = captured("runs", "--data-dir", runs, "--format", "json")
    assert sorted(one["run"] for one in msgspec.json.decode(out)) == names
    code, out, _ = captured("show", names[0], "--data-dir", runs)
    assert code == 0
    code, _, _ = captured("report", *names, "--data-dir", runs, "--out", tmp_path / "page.html")
    assert code == 0
    assert all(name in (tmp_path / "page.html").read_text() for name in names)
    code, out, _ = captured("replay", path, *places, "--workers", 1, "--format", "json")
    assert [Path(one["record"]).name for one in msgspec.json.decode(out)] == [names[1], names[0], names[2]]


def test_what_sites_cannot_be_replayed_from_or_into_is_refused(tmp_path):
    plan_of(tmp_path, EQUAL, rounds=1)
    path, runs = tmp_path / "plan.toml", tmp_path / "runs"
    with pytest.raises(ConfigError, match=naming("--devices")):
        run_replay(path, tmp_path, runs, 3, 1)
    [(folder, _), *_] = run_replay(path, tmp_path, runs, 0, 1)
    with pytest.raises(ConfigError, match=naming("--devices")):
        run_replay(folder, tmp_path, runs, 0, 1)


def test_one_site_decides_for_the_devices_of_all(tmp_path):
    """The first of the plan; each site records what its own were given, and from whom, and rounds go by GLOBAL.EDGE."""
    table = f'{EQUAL}\nbackhaul_mbit_s = 1.0\n[optimizer]\nname = "clusters"'
    plan = plan_of(tmp_path, table, rounds=2, algorithm='name = "fedprox"')
    for site, (_, records) in played(plan, tmp_path).items():
        opened = [one for one in records if isinstance(one, RoundOpened)]
        assert [one.decision.coordinator for one in opened if one.decision] == ["roof", "roof"]
        assert all(one.decision and one.decision.devices.keys() == {f"{site}-0", f"{site}-1"} for one in opened)
        assert [closed.outcome for closed in closed_rounds(records)] == ["aggregated"] * 2
    code, out, _ = captured("explain", "run-yard", "1.0", "--data-dir", tmp_path)
    assert (code, "yard-0" in out, "roof-0" in out) == (0, True, False)
    assert out.startswith("round 1.0: clusters decided")
    shown = captured("show", "run-yard", "--data-dir", tmp_path)[1]
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:3] in ("0.0", "1.0")] == ["0.0", "1.0"]
    assert "after round 1.0" in shown
    where = "--out", tmp_path / "model", "--format", "safetensors", "--data-dir", tmp_path
    assert captured("export", "run-yard", "--round", "1.0", *where)[0] == 0
    assert captured("export", "run-yard", "--round", "1.1", *where)[0] == 2
    assert captured("explain", "run-yard", "1.1", "--data-dir", tmp_path)[0] == 2


def test_the_run_of_a_site_is_a_trace_as_any_other(tmp_path):
    """With its own devices alone."""
    plan = plan_of(tmp_path, EQUAL, rounds=1)
    played(plan, tmp_path / "runs")
    words = "trace", "export", "run-barn", "--out", tmp_path / "trace", "--data-dir", tmp_path / "runs"
    assert captured(*words)[0] == 0
    assert captured("trace", "check", tmp_path / "trace")[0] == 0
    trace = files.read(tmp_path / "trace")
    assert [device.name for device in trace.header.devices] == ["barn-0", "barn-1"]
