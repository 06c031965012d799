"""Runs of other tasks than classification: live as in replay, and devices' metrics as those of the pooled examples."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from device_agent.inference.release_folder import read_folder
from device_agent.inference.session import open_model
from device_agent.inference.settings import InferenceSettings
from device_agent.trainer import train
from edge_server.journal.compared import measured_rounds
from edge_server.journal.compared_metric import ComparedMetric
from edge_server.journal.outcome import summarise_outcome
from edge_server.journal.records import AnyRecord, Evaluated, Noted, RunClosed, closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.plan.data import device_data
from edge_server.plan.data import test_data as server_data
from edge_server.plan.plan import Plan
from edge_server.release.create import create_release
from edge_server.release.run_model import read_model
from edge_server.release.store import export_release
from edge_server.replay.comparison.compare import compare_runs
from edge_server.replay.run import plan_for_exact_bits, replay_plan
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.report.csv_export import csv_text
from edge_server.report.page import render_page
from edge_server.report.summarise import digest_run
from edge_server.report.targets import best_value, default_targets, round_reaching
from shared import registry
from shared.data.examples import Examples, split_holdout
from shared.data.load import load
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.models.evaluate import score
from shared.objectives.release_metric import find_objective, measure
from shared.objectives.training import build_training_objective
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import RUN
from tests.edge_server.processes import called
from tests.edge_server.textbook import make_plan, require_equal
from tests.naming import names_all
from tests.task_files import TASKS, write_code, write_data

numbers = itertools.count()


@pytest.fixture(autouse=True)
def code(tmp_path, monkeypatch):
    write_code(tmp_path, monkeypatch)
    registry.allow(["fieldtask:*"])
    yield
    registry.allow([])


def plan_of(folder: Path, name: str, /, rounds: int = 3, **sections: str) -> Plan:
    objective, model = TASKS[name]
    sections = {
        "task": objective,
        "model": model,
        "data": write_data(folder, name),
        "partition": 'kind = "even"',
        "hyper": "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.05",
        "evaluation": "every = 1\non_device = true\ndevices_every = 2",
    } | sections
    return make_plan(folder, rounds, **sections)


def figures(records: list[AnyRecord]) -> list[object]:
    rounds = [
        (one.outcome, one.arrived, one.loss, one.test_loss, one.metrics, one.device_metrics)
        for one in closed_rounds(records)
    ]
    return rounds + [(one.round, one.by_device, one.metrics) for one in records if isinstance(one, Evaluated)]


@pytest.mark.parametrize("name", TASKS)
def test_live_and_replayed_it_comes_to_the_same_bits(network, name, tmp_path):
    plan = plan_of(tmp_path, name)
    live, records = Site(network, plan, tmp_path, name=f"task{next(numbers)}").play()
    again, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    require_equal(live.tree, again.tree)
    assert figures(records) == figures(others)
    for closed in closed_rounds(records):
        assert closed.outcome == "aggregated"
        assert closed.metrics
        assert closed.device_metrics
        assert closed.accuracy is None


@pytest.mark.parametrize("name", TASKS)
def test_metrics_over_the_devices_are_those_of_all_held_out_examples(name, tmp_path):
    plan = plan_of(tmp_path, name)
    state, records = replay_plan(plan, tmp_path / RUN)
    held_out = [split_holdout(load(device_data(plan, plan.device, index)), 0.25, 0)[1] for index in range(3)]
    pooled = Examples(*(torch.cat([getattr(one, name) for one in held_out]) for name in ("inputs", "labels")))
    network = build_initial(plan.model, plan.seed).layers
    expected = score(network, state.tree, pooled, build_training_objective(plan.objective))
    evaluated = [record for record in records if isinstance(record, Evaluated)][-1]
    assert evaluated.round == plan.rounds
    assert evaluated.metrics == pytest.approx({**expected.metrics, "loss": expected.loss}, rel=1e-6)


def test_the_metric_with_its_direction_decides_which_model_is_best(tmp_path):
    plan = plan_of(tmp_path, "regression", hyper="batch_size = 8\nlearning_rate = 0.4", rounds=8)
    _, records = replay_plan(plan, tmp_path / RUN)
    measured = measured_rounds(records)
    best = min(measured)
    assert best[1] < 7, measured
    found = summarise_outcome(records, tmp_path / RUN)
    assert (found.best.value, found.best.round) == best
    assert found.metric == ComparedMetric(name="rmse", direction="min")
    assert found.best.model.endswith(f"best-{best[1]:06d}.safetensors")


def test_a_target_value_ends_the_run_after_the_round_that_reaches_it(tmp_path):
    plan = plan_of(tmp_path, "regression")
    _, records = replay_plan(plan, tmp_path / "whole")
    first, second, _ = measured_rounds(records)
    assert second < first
    value = (first[0] + second[0]) / 2
    plan = plan_of(tmp_path, "regression", task=f'kind = "regression"\ntarget = {{ value = {value} }}')
    _, records = replay_plan(plan, tmp_path / RUN)
    assert [closed.round for closed in closed_rounds(records)] == [1, 2]
    assert records[-1].outcome == "finished"
    assert names_all(records[-1].cause, "rmse", 2)


METHODS = {
    "hcef": "",
    "fedspu": "",
    "pruned_personalization": "",
    "fedsl": "cut = 1",
}
"""Methods of the papers with their options."""


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_the_papers_train_a_regression(method, tmp_path):
    algorithm = f'name = "{method}"\noptions = {{ {METHODS[method]} }}'
    evaluation = "every = 1" if method == "fedsl" else "every = 0\ndevices_every = 1"
    plan = plan_of(tmp_path, "regression", algorithm=algorithm, evaluation=evaluation)
    live, records = Site(Network(), plan, tmp_path).play()
    again, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    require_equal(live.tree, again.tree)
    assert figures(records) == figures(others)
    losses = [closed.loss for closed in closed_rounds(records)]
    assert losses[-1] < losses[0]


COHORT = '[[device]]\nname = "board"\ncount = 8'


@pytest.mark.parametrize("name", [name for name in TASKS if name != "segmentation"])
def test_devices_of_a_replay_learn_every_task_at_once(name, tmp_path):
    """To 1e-5 of what they learn one after the other; images in a network of the user are left to that."""
    plan = plan_of(tmp_path, name, more=COHORT, cohort="min_devices = 8", replay="together = true")
    fast, records = replay_plan(plan, tmp_path / "fast" / RUN)
    exact, others = replay_plan(plan_for_exact_bits(plan), tmp_path / "exact" / RUN)
    assert any(isinstance(record, Noted) and names_all(record.what, 2) for record in records), "two in each pass"
    for key, leaf in exact.tree.items():
        assert float((fast.tree[key] - leaf).abs().max()) <= 1e-5 * float(leaf.abs().max()), key
    for found, expected in zip(closed_rounds(records), closed_rounds(others), strict=True):
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "devices"),
    [
        ({}, "a, b, c"),
        (
            {"more": COHORT, "cohort": "min_devices = 8", "replay": "together = true"},
            "board-0, board-1, board-2, board-3",
        ),
    ],
    ids=["alone", "at once"],
)
def test_a_loss_that_is_no_number_ends_the_run_and_names_step_and_devices(tmp_path, sections, devices):
    task = 'kind = "regression"\nloss = "fieldtask:not_a_number"'
    plan = plan_of(tmp_path, "regression", task=task, **sections)
    _, records = replay_plan(plan, tmp_path / RUN)
    [end] = [record for record in records if isinstance(record, RunClosed)]
    assert end.outcome == "diverged"
    assert names_all(end.cause, devices, "step 1", "nan")


@pytest.mark.parametrize("section", ['metrics = ["fieldtask:raising"]', 'loss = "fieldtask:raising"'])
def test_a_metric_or_loss_that_raises_is_named_before_the_first_round(section, tmp_path):
    plan = plan_of(tmp_path, "regression", task=f'kind = "regression"\n{section}')
    with pytest.raises(ConfigError) as refused:
        replay_plan(plan, tmp_path / RUN)
    assert names_all(refused.value, f"task.{section.partition(' ')[0]}", "fieldtask:raising", "of its own")


def test_a_metric_that_raises_on_the_devices_alone_ends_the_run_with_its_name(tmp_path):
    plan = plan_of(
        tmp_path,
        "regression",
        task='kind = "regression"\nmetrics = ["fieldtask:raising"]',
        evaluation="every = 0\non_device = true",
    )
    _, records = replay_plan(plan, tmp_path / RUN)
    assert records[-1].outcome == "refused"
    assert names_all(records[-1].cause, "a, b, c", "task.metrics", "fieldtask:raising", "of its own")


def test_a_network_with_other_outputs_than_targets_is_refused_with_both_shapes(tmp_path):
    plan = plan_of(tmp_path, "regression", model='name = "mlp"\noptions = { features = 5, classes = 3 }')
    with pytest.raises(ConfigError) as refused:
        replay_plan(plan, tmp_path / RUN)
    assert names_all(refused.value, "model", 3, 2)


@pytest.mark.parametrize(("forged", "counted"), [([1e300] * 7, "ab"), ([float("inf")], ""), ([1.0] * 9000, "")])
def test_forged_sums_of_one_device_do_not_end_the_run(tmp_path, monkeypatch, forged, counted):
    """Its update is refused, or its sums do not count because their number is not that of most devices."""
    plan = plan_of(tmp_path, "regression", rounds=1, round="deadline_s = 5.0")
    build = train.build_update

    def forge(job, usage, scored, **named):
        if job.task.device == "c":
            scored = replace(scored, sums=dict.fromkeys(scored.sums, forged))
        return build(job, usage, scored, **named)

    _, records = replay_plan(plan, tmp_path / "honest")
    monkeypatch.setattr(train, "build_update", forge)
    _, others = replay_plan(plan, tmp_path / RUN)
    [honest], [closed] = closed_rounds(records), closed_rounds(others)
    assert closed.outcome == "aggregated"
    assert ("c" in closed.arrived) == bool(counted)
    assert closed.device_metrics
    assert closed.device_metrics != honest.device_metrics
    assert closed.device_metrics["rmse"] < 100


def test_anomalies_are_found_by_boards_without_any_label(tmp_path):
    """The devices train and evaluate on unlabelled examples, the server tests on labelled ones."""
    random, arrays = np.random.default_rng(3), {}
    for split in ("train", "test"):
        inputs = np.repeat(random.normal(size=(90, 1)), 5, axis=1) * np.arange(1, 6)
        odd = np.arange(90) % 6 == 0 if split == "test" else np.zeros(90, bool)
        inputs[odd] = random.normal(size=(odd.sum(), 5)) * 4
        arrays |= {f"x_{split}": inputs.astype(np.float32), f"y_{split}": odd.astype(np.int64)}
    np.savez(tmp_path / "readings.npz", **arrays)
    plan = plan_of(
        tmp_path,
        "regression",
        rounds=6,
        task='kind = "anomaly"',
        model='name = "mlp"\noptions = { features = 5, hidden = 3, classes = 5 }',
        data='source = "npz"\npath = "readings.npz"\nlabels = "none"\nholdout = 0.25',
    )
    _, records = replay_plan(plan, tmp_path / RUN)
    measured = measured_rounds(records)
    assert measured[-1][0] > 0.8
    evaluated = [record for record in records if isinstance(record, Evaluated)]
    assert [set(record.metrics) for record in evaluated] == [{"loss"}] * 3
    assert evaluated[-1].metrics["loss"] < evaluated[0].metrics["loss"]


def test_a_regression_is_released_with_its_metrics_and_served_as_numbers(tmp_path, capsys):
    plan = plan_of(tmp_path, "regression")
    _, records = replay_plan(plan, tmp_path / RUN)
    stored = create_release(read_model(StoredRun(tmp_path / RUN, records)), tmp_path, "air")
    last = closed_rounds(records)[-1]
    assert called("release", "list", "--data-dir", tmp_path) == 0
    heading, row = capsys.readouterr().out.splitlines()[:2]
    assert "accuracy" not in heading
    assert names_all(row, "air/1", f"rmse {last.metrics['rmse']:.4g}")
    assert called("release", "list", "--data-dir", tmp_path, "--format", "json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["accuracy"], listed["metric"], listed["value"]) == (None, "rmse", last.metrics["rmse"])
    released = stored.manifest.task
    assert (released.kind, released.metrics, released.direction) == ("regression", ("rmse", "mae", "r2"), "min")
    assert released.values == last.metrics
    assert stored.manifest.source.accuracy is None
    export_release(stored, tmp_path / "air")
    files = read_folder(tmp_path / "air")
    settings = InferenceSettings(port=0, socket="", memory_bytes=2 << 30)
    model = open_model(files.manifest, files.parts, settings)
    test = load(server_data(plan))
    objective = find_objective(released)
    assert measure(objective, model.run, test.inputs.numpy(), test.labels.numpy()) == pytest.approx(
        last.metrics["rmse"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"task": 'kind = "classification"'}, ("task.kind", "classification", "values")),
        ({"task": 'kind = "segmentation"'}, ("task.kind", "segmentation", "values", "mask")),
        (
            {"task": 'kind = "regression"\ntarget = { value = 0.5 }', "evaluation": "every = 0"},
            ("task.target.value", "evaluation.every"),
        ),
        ({"data": 'source = "npz"\npath = "regression.npz"\nlabels = "none"\nholdout = 0.1', "task": ""}, ("holdout",)),
        ({"algorithm": 'name = "fedmatch"'}, ("task.kind", "fedmatch", "classification", "regression", "fedavg")),
    ],
)
def test_a_task_that_does_not_fit_the_plan_is_refused_when_it_is_checked(tmp_path, sections, named):
    with pytest.raises(ConfigError) as refused:
        plan_of(tmp_path, "regression", **sections)
    assert names_all(refused.value, *named)


def test_reports_traces_and_lists_go_by_the_metric(tmp_path, capsys):
    plan = plan_of(tmp_path, "regression")
    _, records = replay_plan(plan, tmp_path / RUN)
    last = closed_rounds(records)[-1]
    digest = digest_run(records)
    assert [round_.metric_value() for round_ in digest.rounds] == [value for value, _ in measured_rounds(records)]
    assert best_value(digest) == min(measured_rounds(records))[0]
    [target, *worse] = default_targets([digest])
    assert target >= best_value(digest)
    assert worse == sorted(worse)
    assert round_reaching(digest, target).round == min(measured_rounds(records))[1]
    lines = list(csv_text([digest]))
    assert any(line.startswith(f"run,3,,rmse,{last.metrics['rmse']}") for line in lines)
    assert not any(",accuracy," in line for line in lines)
    page = render_page([digest, digest])
    assert "best rmse" in page
    again = to_records(trace_of(records))
    assert figures(again) == figures(records)
    assert digest_run(again).rounds == digest.rounds
    gap = compare_runs(records, again)
    assert (gap.spread("rmse").count, gap.spread("rmse").exact, gap.spread("accuracy")) == (3, 3, None)
    called("show", tmp_path / RUN)
    called("runs", "--data-dir", tmp_path)
    shown = capsys.readouterr().out
    assert names_all(shown, "rmse", f"{last.metrics['rmse']:.4g}")
    assert "accuracy" not in shown


def test_boards_without_torch_evaluate_a_regression(tmp_path):
    evaluation = "every = 1\ndevices_every = 1"
    plan = plan_of(tmp_path, "regression", evaluation=f'{evaluation}\nruntime = "onnx"')
    _, records = Site(Network(), plan, tmp_path).play()
    plan = plan_of(tmp_path, "regression", evaluation=evaluation)
    _, others = replay_plan(plan, tmp_path / "torch" / RUN)
    by_graph, by_torch = (
        [record.metrics for record in those if isinstance(record, Evaluated)] for those in (records, others)
    )
    assert len(by_graph) == 3
    for one, other in zip(by_graph, by_torch, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
