"""Semi-supervised methods end to end: real agents, the real server, live, killed and replayed to the same bits.

One fleet of three devices with unlabelled stripes for all methods, and one replay of each, to which all else is
compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_field

from edge_server.journal.outcome import summarise_outcome
from edge_server.journal.records import AnyRecord, CostSettled, Evaluated, RoundOpened, UpdateAccepted, closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.plan.data import device_data, test_data
from edge_server.plan.plan import Plan
from edge_server.replay.devices.behaviour import Work
from edge_server.replay.devices.recorded_run import recorded_behaviours
from edge_server.replay.run import replay_plan
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.replay.trace.trace import Trace
from edge_server.rounds.check_plan import load
from edge_server.rounds.resume import load_trained_network
from edge_server.trial.tables import rounds_table, skipped_lines
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import evaluated_parameters
from shared.data.examples import split_holdout
from shared.data.load import load as load_examples
from shared.errors import ConfigError
from shared.models.build import build_blank
from shared.models.evaluate import score
from shared.models.running_statistics import measure_statistics, statistic_names
from shared.registry import build
from shared.tensors.tree import State
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import RUN, write_plan
from tests.edge_server.textbook import DEVICES, NAMES, require_equal
from tests.naming import names_all, naming

test_data.__test__ = False  # a function of ours, not a test

numbers = itertools.count()
SPLIT = "cut = 2, supervised_steps = 4"
SEMIFL = "epochs = 1, server_epochs = 4, warmup_epochs = {}, threshold = {}, mirrors = false"
METHODS = {
    "semisfl": f"{SPLIT}, steps = 3, hidden = 16, projections = 8, threshold = 0.3",
    "fedswitch_sl": f"{SPLIT}, steps = 3, threshold = 0.3, switch_divergence = 0.0",
    "supervised_only": f"{SPLIT}, hidden = 16, projections = 8",
    "semifl": SEMIFL.format(12, 0.3),
    "fedswitch": "supervised_steps = 4, threshold = 0.11",
    "fedmatch": "least_change = 1e-3, supervised_steps = 4, threshold = 0.11, helper_period = 2, agreement_weight = 2",
}
"""By their options in a plan."""
STEPS = {"semisfl": 3, "fedswitch_sl": 3}
"""Of a round's session; the others have none."""
OVER = [
    *(("memory", method) for method in METHODS),
    *(("mosquitto", method) for method in ("semisfl", "supervised_only", "fedswitch", "fedmatch")),
    *(("embedded", method) for method in ("fedswitch_sl", "semifl")),
]
"""Every method over memory and over one of the brokers; over each broker, split networks and whole ones."""
OWN_TERMS = {
    "semisfl": {"contrastive_loss", "consistency_loss", "clustering_loss"},
    "fedswitch_sl": {"consistency_loss"},
    "supervised_only": {"contrastive_loss"},
    "semifl": {"fix_loss", "mix_loss"},
    "fedswitch": {"consistency_loss"},
    "fedmatch": {"consistency_loss", "agreement_loss", "sparsity_loss", "closeness_loss"},
}
"""What a round's record tells of each method's loss, beside that of its supervised steps, and how many these were."""
FLOAT16 = 'name = "float16"\noptions = { exact = "gradient" }'
NORMED = 'name = "vgg13"\noptions = { width = 0.04, channels = 1 }'


def make_plan(folder: Path, method: str = "semisfl", options: str = "", **sections: str) -> Plan:
    """Return a plan of three devices with unlabelled stripes, thirty of which the server has labels of."""
    rate = 0.1 if method == "semifl" else 0.05
    written = {
        "algorithm": f'name = "{method}"\noptions = {{ {options or METHODS.get(method, "")} }}',
        "model": 'name = "cnn"\noptions = { side = 16, width = 4, hidden = 12 }',
        "hyper": f"batch_size = 8\nlearning_rate = {rate}\nmomentum = 0.9",
        "cohort": "min_devices = 3",
        "data": 'source = "npz"\npath = "pictures.npz"\nlabels = "none"',
        "server_data": 'source = "npz"\npath = "pictures.npz"\ndrawn = { per_class = 3 }',
        "evaluation": "every = 1",
        "partition": 'kind = "even"',
    } | sections
    written = {section: text for section, text in written.items() if text}
    path = write_plan(folder, rounds=3 if method == "semifl" else 2, more=DEVICES, **written)
    path.write_text(f"seed = 11\n{path.read_text()}")
    return load(path, folder)


def write_pictures(folder: Path, side: int = 16, train: int = 120) -> Path:
    """Write a file of pictures whose class is a stripe."""
    random, arrays = np.random.default_rng(3), {}
    for split, count in (("train", train), ("test", 60)):
        labels = np.arange(count) % 10
        noise = random.integers(0, 90, (count, side, side)).astype(np.uint8)
        for picture, label in zip(noise, labels, strict=True):
            picture[label : label + 3] += 150
        arrays |= {f"x_{split}": noise, f"y_{split}": labels}
    np.savez(folder / "pictures.npz", **arrays)
    return folder


@dataclass(frozen=True)
class Run:
    """A method's plan, and what its replay came to."""

    plan: Plan
    state: State
    records: list[AnyRecord]


@pytest.fixture
def pictures(tmp_path) -> Path:
    return write_pictures(tmp_path)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> Callable[[str], Run]:
    """Return a function that replays a method's plan, once; what lives and dies elsewhere is to have its bits."""
    runs: dict[str, Run] = {}

    def run(method: str) -> Run:
        if method not in runs:
            folder = write_pictures(tmp_path_factory.mktemp(method))
            plan = make_plan(folder, method)
            runs[method] = Run(plan, *replay_plan(plan, folder / "replayed"))
        return runs[method]

    return run


def require_same(state: State, run: Run) -> None:
    """Compare a run's end with the replay's, tensors and facts."""
    require_equal(state.tree, run.state.tree)
    assert state.facts == run.state.facts


def kept_of(records) -> dict[tuple[int, str], float]:
    """Return how many examples each device was sure of, by round."""
    accepted = (one for one in records if isinstance(one, UpdateAccepted))
    return {(one.round, one.update.device): one.update.metrics["kept_examples"] for one in accepted}


@pytest.mark.parametrize(("network", "method"), OVER, indirect=["network"])
def test_live_and_replayed_it_comes_to_the_same_bits(network, replayed, method, tmp_path):
    """What is judged is what the method says is to be."""
    run = replayed(method)
    live, records = Site(network, run.plan, tmp_path, name=f"semi{next(numbers)}").play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.refused) for one in rounds] == run.plan.rounds * [("aggregated", NAMES, {})]
    assert {one.steps for one in rounds} == {STEPS.get(method)}
    kept, test = StoredRun(tmp_path / RUN, records), load_examples(test_data(run.plan))
    model, judged = load_trained_network(kept)
    wanted = evaluated_parameters(build(ALGORITHMS, run.plan.algorithm, "algorithm"), build_blank(run.plan.model), live)
    require_equal(judged, wanted)
    shown = summarise_outcome(records, kept.folder)
    assert rounds[-1].accuracy == shown.last.accuracy == score(model.layers.eval(), judged, test).accuracy
    best, parameters = load_trained_network(kept, shown.best.round)
    assert score(best.layers.eval(), parameters, test).accuracy == shown.best.accuracy
    require_same(live, run)
    again = [(one.accuracy, one.terms) for one in closed_rounds(run.records)]
    assert again == [(one.accuracy, one.terms) for one in rounds]
    assert [one.terms for one in closed_rounds(to_records(trace_of(records)))] == [one.terms for one in rounds]


@pytest.mark.parametrize("method", METHODS)
def test_the_terms_of_the_loss_are_in_every_rounds_record(replayed, method):
    """And in the table of rounds. Where devices train alone, their sum is the mean of the updates' losses."""
    run, alone = replayed(method), method in {"semifl", "fedswitch", "fedmatch"}
    rounds, own, usual = closed_rounds(run.records), OWN_TERMS[method], {"supervised_loss", "supervised_steps"}
    columns = {column.heading.replace("\n", "_") for column in rounds_table(run.records).columns}
    assert columns > own | usual
    steps = [4.0 * (4 + 12), 16.0, 16.0] if method == "semifl" else run.plan.rounds * [4.0]  # epochs of four batches
    assert [one.terms["supervised_steps"] for one in rounds] == steps
    for one in rounds:
        updates = (each for each in run.records if isinstance(each, UpdateAccepted) and each.round == one.round)
        losses = [each.update.loss for each in updates if each.update.loss is not None]
        assert one.terms.keys() == usual | (own if losses or not alone else set()), "of semifl's first nobody trained"
        if alone and losses:
            assert sum(one.terms[name] for name in own) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_terms_are_those_that_the_state_keeps(replayed):
    """SemiSFL: the sum of a round's supervised steps, and that of its session's."""
    run = replayed("semisfl")
    found, facts = [one.terms for one in closed_rounds(run.records)], run.state.facts
    both = found[-1]["consistency_loss"] + found[-1]["clustering_loss"]
    assert both == pytest.approx(facts["unlabelled_loss"] / facts["session_steps"])
    both = found[-1]["supervised_loss"] + found[-1]["contrastive_loss"]
    assert both == pytest.approx(facts["supervised_loss"])


def test_judged_is_the_teacher_or_what_the_servers_steps_left(replayed):
    """Each by the prefix of its leaves; of the baseline of supervised steps alone, all of these were taken."""
    for method in METHODS.keys() - {"fedmatch"}:
        run, prefix = replayed(method), "tested/" if method == "semifl" else "teacher/"
        wanted = {key.removeprefix(prefix): leaf for key, leaf in run.state.tree.items() if key.startswith(prefix)}
        algorithm, model = build(ALGORITHMS, run.plan.algorithm, "algorithm"), build_blank(run.plan.model)
        require_equal(
            evaluated_parameters(algorithm, model, run.state), {key: wanted[key] for key in model.layers.state_dict()}
        )
    assert replayed("supervised_only").state.facts["followed"] == 4 * 2


@pytest.mark.parametrize(
    ("method", "kind", "number"),
    [
        ("semisfl", UpdateAccepted, 2),
        ("fedswitch_sl", UpdateAccepted, 2),
        ("fedswitch", RoundOpened, 2),
        ("fedswitch", UpdateAccepted, 2),
        ("semifl", UpdateAccepted, 3),
        ("fedmatch", UpdateAccepted, 2),
    ],
)
def test_after_a_kill_in_a_round_it_ends_at_the_same_bits(replayed, tmp_path, method, kind, number):
    """The server's own steps and the session are done again; all else comes from the checkpoint.

    Of SemiSFL queue, teacher and K_s, of FedSwitch-SL who labels, of FedSwitch what it must know of its devices, of
    SemiFL a momentum that is not zero, of FedMatch the devices' psi, which help in this round.
    """
    run = replayed(method)
    here = Site(Network(), run.plan, tmp_path)
    after, _ = here.play(lambda: here.serve_twice(lambda one: isinstance(one, kind) and one.round == number))
    require_same(after, run)
    if method == "semifl":
        assert any(bool(leaf.any()) for key, leaf in after.tree.items() if key.startswith("momentum/"))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "supervised_only"])
def test_bad_options_are_named_before_anything_begins(tmp_path, method):
    with pytest.raises(ConfigError, match="threshold"):
        make_plan(tmp_path, method, "threshold = 1.5")
    with pytest.raises(ConfigError, match="tresholds"):
        make_plan(tmp_path, method, "tresholds = 0.5")


@pytest.mark.parametrize("codec", ['name = "quantize"\noptions = { bits = 7 }', FLOAT16])
def test_with_a_codec_at_the_cut_the_replay_has_the_live_runs_bits(pictures, replayed, codec):
    """Both batches of features and the gradient go through it, on either side alike; other bits than without it."""
    plan = make_plan(pictures, "semisfl", cut_codec=codec)
    live, records = Site(Network(), plan, pictures).play()
    assert [one.refused for one in closed_rounds(records)] == [{}] * plan.rounds
    require_equal(replay_plan(plan, pictures / "replayed")[0].tree, live.tree)
    plain = replayed("semisfl").state.tree
    assert any(not torch.equal(leaf, live.tree[name]) for name, leaf in plain.items())


def test_with_its_terms_left_out_the_student_labels(replayed):
    """FedSwitch-SL; the second round begins with the students' bottoms alone."""
    facts = replayed("fedswitch_sl").state.facts
    assert [facts[f"labeller/{name}"] for name in NAMES] == ["student"] * len(NAMES)


OWN = 'source = "npz"\npath = "pictures.npz"\nholdout = 0.25'
"""Examples of devices that have labels, a quarter of them held back."""
LABELLED = {"server_data": "", "hyper": "batch_size = 8\nlearning_rate = 0.05"}


@pytest.mark.parametrize(("method", "more"), [(("semisfl", ""), {}), (("splitfed", "cut = 2, period = 3"), LABELLED)])
def test_devices_with_labels_evaluate_the_whole_model_on_what_they_hold_back(pictures, method, more):
    """Where the plan says so: bottom and top go down for it, the teacher's of SemiSFL, and three numbers come up."""
    plan = make_plan(pictures, *method, data=OWN, evaluation="every = 1\ndevices_every = 2", **more)
    live, records = Site(Network(), plan, pictures).play()
    [found] = [one for one in records if isinstance(one, Evaluated)]
    assert found.round == plan.rounds
    judged = evaluated_parameters(build(ALGORITHMS, plan.algorithm, "algorithm"), build_blank(plan.model), live)
    expected, trained = {}, {}
    for place, name in enumerate(NAMES):
        rest, held = split_holdout(load_examples(device_data(plan, plan.device, place)), 0.25, seed=0)
        scored = score(build_blank(plan.model).layers.eval(), judged, held)
        figures = {"eval_accuracy": scored.accuracy, "eval_loss": scored.loss, "eval_examples": float(len(held))}
        trained[name] = len(rest)
        expected[name] = {key: pytest.approx(figure) for key, figure in figures.items()}
    assert found.by_device == expected
    updates = [one for one in records if isinstance(one, UpdateAccepted) and one.round == 1]
    assert {one.device: one.update.num_examples for one in updates} == trained, "what is held back is not trained on"
    again, replayed = replay_plan(plan, pictures / "replayed")
    require_equal(again.tree, live.tree)
    assert [one for one in replayed if isinstance(one, Evaluated)] == [found]


@pytest.mark.parametrize(
    ("method", "sections", "named"),
    [
        ("semisfl", {"evaluation": "on_device = true"}, ("semisfl", "evaluation.on_device", "measure.seconds")),
        ("semifl", {"evaluation": "on_device = true"}, ("semifl", "evaluation.on_device")),
        ("supervised_only", {"evaluation": "devices_every = 1"}, ("evaluation.devices_every", "data.labels", '"none"')),
    ],
)
def test_what_devices_cannot_evaluate_is_refused(pictures, method, sections, named):
    """Before, the devices of a method that reads no labels were asked, and answered with nothing."""
    with pytest.raises(ConfigError, match=naming(*named)):
        make_plan(pictures, method, **sections)


RANGES = 'kind = "ranges", hertz = 1e9, cycles_per_flop = 1.0'


def test_a_device_that_labels_by_itself_is_charged_for_both_views(pictures):
    """In replay: as many cycles a round, though one bottom comes in place of two."""
    ranges = "\n".join(f'[[device]]\nname = "{name}"\ncompute = {{ {RANGES} }}' for name in NAMES)
    make_plan(pictures, "fedswitch_sl")
    path = pictures / "plan.toml"
    path.write_text(path.read_text().replace(DEVICES, ranges))
    _, records = replay_plan(load(path, pictures), pictures / "replayed")
    spent = {(one.round, one.device): one.cost.compute_s for one in records if isinstance(one, CostSettled)}
    assert all(spent[1, name] for name in NAMES)
    assert [spent[2, name] for name in NAMES] == pytest.approx([spent[1, name] for name in NAMES])


def test_only_entries_that_have_changed_travel_up(replayed):
    """FedMatch, by the bytes of its updates: some entries have changed too little."""
    run = replayed("fedmatch")
    count = sum(leaf.numel() for leaf in build_blank(run.plan.model).layers.parameters())
    updates = [one.update for one in run.records if isinstance(one, UpdateAccepted)]
    shares = [one.metrics["changed_entries"] for one in updates]
    assert len(shares) == run.plan.rounds * len(NAMES)
    assert 0 < min(shares) < 1
    for update, share_changed in zip(updates, shares, strict=True):
        values = 4 * round(share_changed * count) + (-(-count // 8) if share_changed < 1 else 0)
        assert values <= update.params.size < values + 1024, "and a header"
    assert {run.state.facts[f"helper/{place}/a"] for place in (0, 1)} == {"b", "c"}, "the last round's"


def test_a_step_size_by_which_psi_diverges_is_refused_before_any_device_has_a_task(pictures):
    plan = make_plan(pictures, "fedmatch", hyper="learning_rate = 0.7\nmomentum = 0.9")
    with pytest.raises(ConfigError, match=naming("hyper.learning_rate", 0.7, 0.679)):
        replay_plan(plan, pictures / "replayed")


def test_a_round_that_a_device_skips_is_told(replayed):
    """SemiFL: a round was skipped by some, and another was not."""
    records = replayed("semifl").records
    kept = kept_of(records)
    assert len(kept) == 3 * len(NAMES)
    assert {bool(one) for one in kept.values()} == {True, False}
    [line] = skipped_lines(records)
    assert names_all(line, list(kept.values()).count(0.0), 9)


def test_where_nobody_is_sure_of_anything_the_run_goes_on_with_the_servers_epochs(pictures):
    """Every round is skipped by all: no loss, nothing trained on, and a record that says so."""
    plan = make_plan(pictures, "semifl", SEMIFL.format(0, 0.999999))
    live, records = Site(Network(), plan, pictures).play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.loss) for one in rounds] == plan.rounds * [("aggregated", NAMES, None)]
    updates = [one.update for one in records if isinstance(one, UpdateAccepted)]
    assert {(one.num_examples, one.loss, one.metrics["skipped"]) for one in updates} == {(0, None, 1.0)}
    [line] = skipped_lines(records)
    assert names_all(line, 9, 3)
    assert live.facts["server_rounds"] == plan.rounds
    assert all(bool((leaf == 0).all()) for key, leaf in live.tree.items() if key.startswith("momentum/"))
    assert all(bool((leaf == live.tree[f"tested/{key}"]).all()) for key, leaf in live.tree.items() if "/" not in key)
    require_equal(replay_plan(plan, pictures / "replayed")[0].tree, live.tree)


def test_updates_of_nothing_pass_a_codec_and_steps_are_timed_before_the_first_round(pictures):
    """Round 1 is skipped by all, the others are not; what is timed is a step, not a round of the method's own."""
    plan = make_plan(pictures, "semifl", measure="seconds = 0.1", codec='name = "quantize"')
    live, records = Site(Network(), plan, pictures).play()
    timed = [one.update.step for one in records if isinstance(one, UpdateAccepted) and not one.round]
    assert len(timed) == len(NAMES)
    assert all(timed)
    kept = kept_of(one for one in records if not isinstance(one, UpdateAccepted) or one.round)
    assert {bool(one) for one in kept.values()} == {True, False}
    require_equal(replay_plan(plan, pictures / "replayed")[0].tree, live.tree)


def test_a_skipped_round_takes_as_long_when_its_record_is_replayed(replayed):
    """A device with nothing to learn from was done at once; what it might have trained is not charged for."""
    run = replayed("semifl")
    assert (kept_of(run.records)[1, "a"], bool(kept_of(run.records)[2, "a"])) == (0.0, True)
    trace = trace_of(run.records)
    tasks = tuple(replace_field(task, compute_s=0.25 if task.round == 1 else 8.0) for task in trace.tasks)
    [device] = recorded_behaviours(Trace(trace.header, {**trace.tables, "tasks": tasks}), ["a"])
    weights = sum(leaf.numel() for leaf in build_blank(run.plan.model).layers.parameters())
    most = Work(steps=4, examples=30, weights=weights, flops=1, run="r", round=1, train=True, share=2 + 1 / 3)
    seconds = [device.compute(replace(most, round=number), 0.0) for number in (1, 2)]
    assert [one.seconds for one in seconds] == [0.25, 8.0]


def test_a_network_with_batchnorm_is_tested_by_the_servers_statistics(tmp_path):
    """No session measures them on devices: what is tested and kept has those of the labelled examples."""
    options = "epochs = 1, server_epochs = 1, warmup_epochs = 2, threshold = 0.11, mirrors = false"
    plan = make_plan(write_pictures(tmp_path, 32, 60), "semifl", options, model=NORMED)
    live, records = Site(Network(), plan, tmp_path).play()
    assert all(kept_of(records).values()), "everybody trained"
    assert {one.statistics_batches for one in closed_rounds(records)} == {None}
    tested = {key.removeprefix("tested/"): leaf for key, leaf in live.tree.items() if key.startswith("tested/")}
    assert plan.server_data
    labelled = load_examples(plan.server_data).inputs
    layers = build_blank(plan.model).layers
    wanted = measure_statistics(layers, tested, [labelled])
    assert statistic_names(layers)
    require_equal({name: tested[name] for name in wanted}, wanted)
    require_equal(replay_plan(plan, tmp_path / "replayed")[0].tree, live.tree)
