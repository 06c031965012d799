"""SemiSFL studies: equal settings for all methods, one small cell."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.runs import read_versions
from edge_server.plan.devices import expand_devices
from edge_server.replay.study.run import StudyRecord
from edge_server.replay.study.spec import load
from shared.algorithms.semisupervised.supervised_only import supervised_only
from tests.benchmarks.semisfl_orderings import (
    ABLATION,
    FIXED,
    LABELS,
    OURS,
    PLAIN,
    Ran,
    claims,
    key_of,
    read,
    settings_of,
    table,
)
from tests.edge_server.replay.study.shipped import STUDIES, grid, require_only_algorithms_differ, run
from tests.machine import shared

NAMES = ("semisfl", "semisfl-cifar", "semisfl-har")


@pytest.mark.parametrize("name", NAMES)
def test_methods_differ_in_nothing_but_their_algorithm(name):
    found = grid(name)
    assert len(found) == 9 * 3 * 3
    require_only_algorithms_differ(found)
    methods = {key_of(cell.plan)[0] for cell in found}
    varied = {"semisfl-linear", "semisfl-none", "semisfl-inertia-0.999"}
    assert methods == {OURS, FIXED, ABLATION, LABELS, PLAIN, "semifl"} | varied


@pytest.mark.parametrize("name", NAMES)
def test_the_labels_alone_are_trained_on_as_the_method_trains_on_them(name):
    """The same supervised steps, views, head and step size: each option that both know has one value."""
    options = {cell.variant: cell.plan.algorithm.options for cell in grid(name)}
    known = options[OURS].keys() & inspect.signature(supervised_only).parameters.keys()
    assert options[LABELS] == {key: options[OURS][key] for key in known}
    assert options[PLAIN] == {**options[LABELS], "contrastive": False}
    assert options[FIXED] == {**options[OURS], "adapt": False}
    assert options[ABLATION] == options[OURS]


@pytest.mark.parametrize("name", NAMES)
def test_no_device_has_a_label_and_the_servers_are_those_of_the_issue(name):
    plan = grid(name)[0].plan
    drawn = plan.server_data.drawn
    count = drawn.count or 10 * drawn.per_class
    assert (name, count) in {("semisfl", 200), ("semisfl-cifar", 1000), ("semisfl-har", round(0.05 * 7352))}
    assert plan.data.labels == "none"
    assert len(expand_devices(plan.device)) == plan.cohort.min_devices


def small(variant: str, folder: Path) -> None:
    """Run a cell of persons that ends soon, and keep its result where a study has it."""
    cell = next(one for one in grid("semisfl-har") if one.variant == variant and one.plan.partition.kind == "client")
    own, labelled = (
        msgspec.structs.replace(data, path=str(shared("data") / data.path))
        for data in (cell.plan.data, cell.plan.server_data)
    )
    plan = msgspec.structs.replace(
        cell.plan,
        data=own,
        server_data=labelled,
        rounds=2,
        device=cell.plan.device[:3],
        cohort=msgspec.structs.replace(cell.plan.cohort, size=2, min_devices=3),
        algorithm=msgspec.structs.replace(
            cell.plan.algorithm,
            options={**cell.plan.algorithm.options, "supervised_steps": 2, "warmup_steps": 0}
            | ({"steps": 2} if variant != LABELS else {}),
        ),
    )
    run(msgspec.structs.replace(cell, plan=plan), folder)


def test_small_cells_of_it_run_and_are_read_off(tmp_path):
    """Accuracy, bytes and the time until the study's target, of two methods; nothing that was not run is claimed."""
    for variant in (ABLATION, LABELS):
        small(variant, tmp_path)
    path = STUDIES / "semisfl-har.toml"
    study, plan = load(path)
    low = msgspec.structs.replace(study, report=msgspec.structs.replace(study.report, target=1e-3))
    as_run = StudyRecord(study=low, plan=plan, versions=read_versions(), cells={})
    (tmp_path / "study.json").write_bytes(msgspec.json.encode(as_run))
    runs, target = read(tmp_path)
    assert target == 1e-3
    assert runs.keys() == {(ABLATION, "client", "1"), (LABELS, "client", "1")}
    theirs, labels = runs[ABLATION, "client", "1"], runs[LABELS, "client", "1"]
    assert theirs.bytes > 10 * labels.bytes
    assert theirs.target_bytes == theirs.bytes, "it is evaluated after the second round alone"
    assert theirs.target_s > labels.target_s
    found = {one.said: one.holds for one in claims(runs)}
    assert found[f"client: {ABLATION} above {LABELS}"] == (theirs.accuracy > labels.accuracy)
    assert found[f"client: {OURS} above {LABELS}"] is None
    assert table(runs, target).row_count == 2


def ran(accuracy: float) -> Ran:
    return Ran(accuracy, accuracy, None, None, 1e6, 1.0)


def test_claims_are_of_seeds_that_both_ran_with():
    """The third seed has no counterpart; a claim that fails is told; equality is enough only where it is claimed."""
    runs = {(OURS, "0.1", seed): ran(share) for seed, share in (("1", 0.8), ("2", 0.7), ("3", 0.1))}
    runs |= {(ABLATION, "0.1", "1"): ran(0.7), (ABLATION, "0.1", "2"): ran(0.7)}
    runs |= {(LABELS, "0.1", "1"): ran(0.75), (FIXED, "0.1", "1"): ran(0.8)}
    found = {one.said: one for one in claims(runs)}
    assert found[f"0.1: {OURS} above {ABLATION}"].figures == "+5.00 ± 7.07 points, 2 seeds"
    assert found[f"0.1: {OURS} above {ABLATION}"].holds
    assert found[f"0.1: {ABLATION} above {LABELS}"].holds is False
    assert found[f"0.1: {OURS} at least {FIXED}"].holds
    assert found[f"0.1: {OURS} above semifl"].holds is None
    assert found["the gap of semisfl to fedswitch_sl grows with skew"].holds is None


def test_the_gap_is_compared_from_the_least_skewed_setting_to_the_most():
    runs = {(OURS, at, "1"): ran(share) for at, share in (("100", 0.8), ("0.1", 0.7), ("1", 0.9))}
    runs |= {(ABLATION, at, "1"): ran(share) for at, share in (("100", 0.79), ("0.1", 0.6), ("1", 0.1))}
    assert settings_of(runs) == ["100", "1", "0.1"]
    growth = claims(runs)[-1]
    assert growth.holds
    assert growth.figures == "100: +1.00, 0.1: +10.00 points"
