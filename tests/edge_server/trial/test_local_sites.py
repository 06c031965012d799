"""Local trial of several sites equals its replay, one run for each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, Gossiped, RoundClosed, RunOpened, closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.replay.comparison.compare_sites import compare_sites
from edge_server.replay.comparison.stored_runs import gap_between_runs
from edge_server.replay.run import replay_sites
from edge_server.rounds.check_plan import load
from edge_server.sites.overview import accuracy_line, read_rounds
from edge_server.sites.sketch import disagreement, mean, unpack_sketch
from edge_server.trial.local import SERVER, Local, until_closed
from edge_server.trial.local_sites import local_sites, new_names
from shared.errors import TaskFailed
from shared.protocol.measurements import joule_parts
from shared.protocol.topics import is_name
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import ROOT, TINY, called, captured, final
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto
from tests.naming import names_all, naming

ROUNDS = 4
SITES = """
[sites]
edge_rounds = 2
deadline_s = 300.0
clusters = { north = ["a"], south = ["b"] }
[[device]]
name = "a"
up_mbit_s = 20.0
down_mbit_s = 50.0
delay_s = 0.005
power = { kind = "given", busy_w = 5.0, idle_w = 1.0, tx_w = 2.0, rx_w = 1.0 }
[[device]]
name = "b"
[emulation]
links = true
power = true
"""
PLAN = TINY | {
    "evaluation": "every = 1",
    "model": 'name = "mlp"\noptions = { features = 64, hidden = 256, classes = 10 }',
    "cohort": "min_devices = 1",
    "round": "deadline_s = 90.0",
    "more": f"{TINY['more']}{SITES}",
}


def planned(folder: Path, **sections: str) -> Path:
    return write_plan(folder, rounds=ROUNDS, **PLAN | sections)


@pytest.mark.broker
@pytest.mark.slow
@needs_mosquitto
def test_a_trial_of_sites_is_its_replay_bit_for_bit(tmp_path):
    """Two brokers, two servers, two agents; exit code 0, and the end says each site's accuracy and their mean.

    Their links are emulated, and the joules of the device that the plan gives watts are modelled. Of each gossip, the
    models of both sites are there once in each direction, within 2 %; the mean is kept, and they agree.
    """
    plan, runs = planned(tmp_path), tmp_path / "runs"
    done = captured("trial", "run", plan, "--data-dir", runs, limit_s=300.0)
    assert done.code == 0, done.err
    assert names_all(done.err.splitlines()[0], "tiny", 2, 4, "fedavg")
    assert any(names_all(line, "north", "south") for line in done.err.splitlines())
    folders = {path.parents[1].name: path.parent for path in runs.glob(f"sites/*/*/{JOURNAL}")}
    assert sorted(folders) == ["north", "south"]
    assert all((runs / "sites" / site / "session").is_file() for site in folders)  # each server's own
    assert len({folder.name.rpartition("-")[0] for folder in folders.values()}) == 1
    replayed = replay_sites(
        load(plan, tmp_path, several_sites=True), {site: tmp_path / f"replay-{site}" for site in folders}
    )
    for site, folder in folders.items():
        records, (state, others) = read_records(folder), replayed[site]
        require_equal(final(folder, ROUNDS), state.tree)
        assert [(one.loss, one.accuracy) for one in closed_rounds(records)] == [
            (one.loss, one.accuracy) for one in closed_rounds(others)
        ]
        assert [(one.round, one.off) for one in records if isinstance(one, Gossiped)] == [(2, {}), (4, {})]
        assert (folder / "local" / "edge-server.log").exists()
        assert read_rounds(folder) == dict.fromkeys(folders.keys() - {site}, ROUNDS)
        size = sum(leaf.nbytes for leaf in state.tree.values())
        for gossiped in (one for one in records if isinstance(one, Gossiped)):
            passed = [*gossiped.bytes_up.values(), *gossiped.bytes_down.values()]
            assert len(passed) == 2
            assert all(size < count < 1.02 * size for count in passed)
    require_mixed([read_records(folder) for folder in folders.values()])
    require_modelled(read_records(folders["north"]))
    live = {site: StoredRun(folder, read_records(folder)) for site, folder in folders.items()}
    again = {site: StoredRun(tmp_path / f"replay-{site}", replayed[site][1]) for site in folders}
    gaps = {site: gap_between_runs(live[site], again[site]) for site in folders}
    before, after = ({site: run.records for site, run in runs.items()} for runs in (live, again))
    gap = compare_sites(before, after, gaps)
    assert gap.model == "same"
    assert (gap.spread("loss").most, gap.spread("mean_accuracy").most) == (0.0, 0.0)
    accuracy = closed_rounds(read_records(folders["north"]))[-1].accuracy  # of a full graph: the same model at both
    *_, told, following = done.out.splitlines()
    assert names_all(told, f"north {accuracy:.4f}", f"south {accuracy:.4f}", f"mean {accuracy:.4f}", 1.1)
    assert "edge-server report tiny-" in following


def require_mixed(runs: list[list[AnyRecord]]) -> None:
    """Check by the journals' sketches that every gossip kept the mean of two models, and left them equal."""
    for gossips in zip(*([one for one in run if isinstance(one, Gossiped)] for run in runs), strict=True):
        before, after = ({str(k): unpack_sketch(one) for k, one in enumerate(those)} for those in sketches(gossips))
        sizes = dict.fromkeys(before, 1)
        assert mean(after, sizes) == pytest.approx(
            mean(before, sizes), abs=1e-6 * float(abs(mean(before, sizes)).max())
        )
        assert disagreement(before, sizes) > 0
        assert disagreement(after, sizes) == 0


def sketches(gossips: Sequence[Gossiped]) -> tuple[list[bytes], list[bytes]]:
    return [one.before for one in gossips], [one.after for one in gossips]


def require_modelled(records: list[AnyRecord]) -> None:
    """Check that the joules of the device to which the plan gives watts follow from these."""
    costs = [cost for by_device in costs_by_round(records).values() for cost in by_device.values()]
    assert len(costs) == ROUNDS
    for cost in costs:
        assert cost.idle_w == 1.0
        assert cost.compute_joules == pytest.approx(cost.compute_s + 4.0 * cost.cpu_s)
        assert cost.upload_joules == pytest.approx(2.0 * cost.upload_s)
        assert cost.download_joules == pytest.approx(cost.download_s)
        assert {cost.provenance[name].quality for name in joule_parts(split=False)} == {"modelled"}


def test_sites_whose_last_figures_are_not_of_one_round_say_so(tmp_path):
    """A mean over those that have one."""
    plan = load(planned(tmp_path), tmp_path, several_sites=True)
    begun = RunOpened(run="tiny", plan=plan)

    def ended(number: int, accuracy: float | None) -> RoundClosed:
        return RoundClosed(round=number, outcome="aggregated", arrived=("a",), seconds=1.0, accuracy=accuracy)

    one, other = [begun, ended(1, 0.5), ended(2, 0.75)], [begun, ended(1, 0.25), ended(2, None)]
    found = accuracy_line({"tiny-south": [begun], "tiny-north": [begun]})
    assert not any(char.isdigit() for char in found)
    found = accuracy_line({"tiny-south": one, "tiny-north": [begun]})  # in the plan's order, which a journal has not
    assert names_all(found, "south 0.7500, north -", 1, 0.1)
    found = accuracy_line({"tiny-south": one, "tiny-north": other})
    assert names_all(found, "south 0.7500, north 0.2500", "0.5000", "0.0", "0.1")


@pytest.mark.parametrize(
    ("words", "sections", "named"),
    [
        (("--local", 3), {}, (3,)),
        ((), {"cohort": "min_devices = 2"}, ("cohort.min_devices", "north", 1, 2)),
        (("--config", "server.toml"), {}, ("sites", "edge-server trial run PLAN")),
        ((), {"more": PLAN["more"].replace("north", "n" * 33)}, ("n" * 33, 32)),
    ],
)
def test_what_no_trial_of_sites_can_be(tmp_path, capsys, words, sections, named):
    """One line, code 2, and nothing is begun."""
    plan = planned(tmp_path, **sections)
    (tmp_path / "server.toml").write_text('plan = "plan.toml"\nsite = "lab"')
    words = [tmp_path / word if str(word).endswith("toml") else word for word in words]
    assert called("trial", "run", plan, *words, "--data-dir", tmp_path / "runs") == 2
    assert names_all(capsys.readouterr().err, *named)
    assert not list((tmp_path / "runs").glob("*/*"))


@pytest.mark.parametrize("name", ["hierarchical", "hcef"])
def test_the_shipped_plans_have_three_sites_of_three(tmp_path, name):
    """Without Fashion-MNIST too."""
    path = ROOT / "deploy" / "plans" / f"{name}.toml"
    plan = load(path, tmp_path, several_sites=True)
    sites = local_sites(Local(path, plan, tmp_path, tmp_path, new_names(plan), 9))
    assert list(sites) == ["roof", "barn", "yard"]
    assert all(one.run.endswith(f"-{site}") for site, one in sites.items())
    assert [one.data_dir for one in sites.values()] == [tmp_path / "sites" / site for site in sites]


def test_a_runs_name_has_room_for_that_of_its_site(tmp_path):
    plan = load(planned(tmp_path, more=PLAN["more"].replace("north", "n" * 32)), tmp_path, several_sites=True)
    for name in ("p", "p" * 32, "p" * 64):
        stem = new_names(msgspec.structs.replace(plan, name=name))
        assert is_name(f"{stem}-{'n' * 32}")
        assert stem.startswith("p")


def test_what_a_server_says_at_its_end_is_told(tmp_path, real):
    """Its own last words, its exit code, and where its log is."""

    async def ended() -> None:
        with (tmp_path / f"{SERVER}.log").open("wb") as output:
            command = "import sys; print('INFO before', flush=True); sys.exit('edge-server: model: it takes no such')"
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", command, stdout=output, stderr=output)
        await until_closed(tmp_path / "run", {SERVER: child}, lambda _record: None, tmp_path)

    with pytest.raises(TaskFailed, match=naming(1, "edge-server: model: it takes no such", f"{SERVER}.log")):
        real(ended())
