"""A plan is refused before anything starts, in one line: the file, the key, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.plan.data import device_data, test_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import devices
from edge_server.rounds.check_plan import load
from shared.data.spec import Client, Dirichlet, Even, Shards
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.naming import names_all, naming

test_data.__test__ = False  # type: ignore[attr-defined] - a function of ours, not a test


def test_the_demo_plan_can_be_used():
    """What a newcomer runs first."""
    plan = load(Path(__file__).parents[3] / "deploy" / "plans" / "demo.toml", Path())
    assert len(devices(plan)) == 4
    assert plan.rounds == 10


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"more": "[plan]"}, ("plan", "name", "rounds")),
        ({"round": "deadline = 3.0"}, ("round", "deadline", "deadline_s")),
        ({"round": "deadline_s = 0.0"}, ("round", "deadline_s")),
        ({"round": "deadline_s = nan"}, ("round", "deadline_s")),
        ({"round": "quorum = 1.5"}, ("round", "quorum")),
        ({"round": "quorum = 0.0"}, ("round", "quorum")),
        ({"round": "min_updates = 0"}, ("round", "min_updates")),
        ({"round": 'on_missed = "panic"'}, ("round.on_missed", "panic")),
        ({"rounds": 0}, ("rounds", 0)),
        ({"cohort": "size = -1"}, ("cohort", "size")),
        ({"cohort": "min_devices = 0"}, ("cohort", "min_devices")),
        ({"cohort": "wait_s = 0.0"}, ("cohort", "wait_s")),
        ({"cohort": "over_selection = 0.3"}, ("cohort", "over_selection", "size")),
        ({"cohort": "size = 3\nover_selection = -0.1"}, ("cohort", "over_selection")),
        ({"cohort": "size = 3\nover_selection = nan"}, ("cohort", "over_selection")),
        ({"cohort": "size = 3\nover_selection = 11.0"}, ("cohort", "over_selection")),
        ({"evaluation": "every = -1"}, ("evaluation", "every")),
        ({"hyper": "batch_size = 0"}, ("hyper", "batch_size", 0)),
        (
            {"hyper": "learning_rate = -1.0\nmomentum = 1.5\nweight_decay = -1.0"},
            ("hyper", "learning_rate", "momentum", 1.5, "weight_decay", -1.0),
        ),
        ({"hyper": 'learning_rate = "fast"'}, ("hyper.learning_rate",)),
        ({"algorithm": 'name = "magic"'}, ("algorithm", "magic", "fedavg")),
        ({"algorithm": 'name = "fedprox"\noptions = { nu = 1 }'}, ("algorithm", "nu", "mu")),
        ({"algorithm": 'name = "fedprox"\noptions = { mu = -1 }'}, ("algorithm", "mu")),
        ({"early_stopping": "share = 1.5"}, ("early_stopping", "share")),
        ({"early_stopping": "share = nan"}, ("early_stopping", "share")),
        ({"early_stopping": "min_alive = 0"}, ("early_stopping", "min_alive")),
        ({"early_stopping": ""}, ("early_stopping", "fedmp", "fedselect", "fedspu")),
        (
            {"algorithm": 'name = "fedprox"\noptions = { early_stopping = true }'},
            ("early_stopping", "fedprox", "fedmp"),
        ),
        (
            {"algorithm": 'name = "fedspu"\noptions = { share = 0.5 }', "early_stopping": ""},
            ("[early_stopping]", "share"),
        ),
        ({"model": 'name = "brain"'}, ("model", "brain", "mlp")),
        ({"model": 'name = "mlp"\noptions = { hidden = -1 }'}, ("model", "mlp", -1)),
        ({"more": '[codec]\nname = "zip"'}, ("codec", "zip", "chain", "dense", "float16", "masked", "quantize")),
        ({"more": '[codec]\nname = "topk"\noptions = { share = 0.0 }'}, ("topk", "share")),
        ({"more": '[codec]\nname = "topk"\noptions = { share = "x" }'}, ("topk", "share", "x")),
        (
            {"more": '[codec]\nname = "topk"\noptions = { exact = "1.weight, 9.bias" }'},
            ("codec.exact", "9.bias", "1.bias"),
        ),
        ({"more": '[codec]\nname = "quantize"\noptions = { bits = 2.5 }'}, ("bits", 2.5)),
        ({"more": '[codec]\nname = "topk"', "algorithm": 'name = "fedselect"'}, ("topk", "fedselect", "float16")),
        ({"more": '[cut_codec]\nname = "topk"'}, ("cut_codec", "topk", "float16")),
        ({"data": 'source = "idx"'}, ("data", "path")),
        ({"more": '[partition]\nkind = "random"'}, ("partition.kind", "random", "shards")),
        ({"more": '[[device]]\nname = "a"\n[[device]]\nname = "a"'}, ("device",)),
        ({"more": '[[device]]\nname = "a b"'}, ("device.name", "a b")),
        ({"more": '[[device]]\nname = "a"\ncompute_s = -1.0'}, ("device", "compute_s")),
        ({"more": '[[device]]\nname = "a"\nup_mbit_s = 0.0'}, ("device", "up_mbit_s")),
        ({"more": '[[device]]\nname = "a"\nup_mbit_s = inf'}, ("device", "up_mbit_s")),
        ({"more": '[partition]\nkind = "even"\nalpha = nan'}, ("partition", "alpha")),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path, sections, named):
    path = write_plan(tmp_path, **sections)
    with pytest.raises(ConfigError, match=naming(path, *named)) as caught:
        load(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_relative_data_path_starts_at_the_data_root(tmp_path):
    path = write_plan(tmp_path, data='source = "csv"\npath = "wine.csv"')
    assert load(path, Path("root")).data.path == "root/wine.csv"
    path = write_plan(tmp_path, data='source = "csv"\npath = "/srv/wine.csv"')
    assert load(path, Path("root")).data.path == "/srv/wine.csv"


def test_a_path_that_is_not_there_is_named_with_the_data_root(tmp_path):
    """Only where this machine needs it: a plan whose server evaluates nothing leaves the data to the devices."""
    section = 'source = "csv"\npath = "wine.csv"'
    named = naming("data.path", f"{tmp_path}/sets/wine.csv", "data_root", f"{tmp_path}/sets", "--data-root")
    with pytest.raises(ConfigError, match=named):
        load(write_plan(tmp_path, data=section, evaluation="every = 1"), tmp_path / "sets")
    load(write_plan(tmp_path, data=section, evaluation="every = 0"), tmp_path / "sets")


def test_a_plan_without_data_evaluates_nothing_and_runs_on_devices_alone(tmp_path):
    path = write_plan(tmp_path)
    path.write_text(path.read_text().replace('[data]\nsource = "digits"', "").replace("every = 0", ""))
    plan = load(path, tmp_path)
    assert plan.evaluation.every == 0
    with pytest.raises(ConfigError, match=naming("tiny", "[data]")):
        device_data(plan, devices(plan, 2), 0)
    path.write_text(path.read_text().replace("[evaluation]", "[evaluation]\nevery = 2"))
    with pytest.raises(ConfigError, match=naming("evaluation.every", "fallback", "[data]")):
        load(path, tmp_path)


def test_all_devices_together_are_bounded(tmp_path):
    """Each count alone is: 200 x 1,000,000 in a plan of 20 kB took all memory."""
    more = "".join(f'[[device]]\nname = "d{number}"\ncount = 1000000\n' for number in range(200))
    with pytest.raises(ConfigError, match=naming("device", 200_000_000, 1_000_000)):
        load(write_plan(tmp_path, more=more), tmp_path)


def test_devices_are_the_plans_own_then_made_up_ones(tmp_path):
    more = '[[device]]\nname = "pi"\n[[device]]\nname = "nano"'
    plan = load(write_plan(tmp_path, cohort="min_devices = 1", more=more), tmp_path)
    assert [device.name for device in devices(plan)] == ["pi", "nano"]
    assert [device.name for device in devices(plan, 1)] == ["pi"]
    assert [device.name for device in devices(plan, 4)] == ["pi", "nano", "device-2", "device-3"]
    with pytest.raises(ConfigError, match=naming("tiny", "[[device]]", "--local")):
        devices(load(write_plan(tmp_path), tmp_path))


def test_fewer_devices_than_a_round_waits_for_are_refused_at_once(tmp_path):
    """Every round would wait for those who never come, and be missed."""
    plan = load(write_plan(tmp_path, cohort="min_devices = 4"), tmp_path)
    assert len(devices(plan, 4)) == 4
    with pytest.raises(ConfigError, match=naming("tiny", 2, "cohort.min_devices", 4)):
        devices(plan, 2)
    with pytest.raises(ConfigError, match=naming(-1, "cohort.min_devices")):
        devices(
            load(write_plan(tmp_path, cohort="min_devices = 1", more='[[device]]\nname = "pi"\ncount = 3'), tmp_path),
            -1,
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (
            'kind = "dirichlet"\nalpha = 0.1\nseed = 3\nmin_examples = 2',
            Dirichlet(alpha=0.1, parts=2, index=1, seed=3, min_examples=2),
        ),
        ('kind = "shards"\nshards_per_device = 3', Shards(shards_per_device=3, parts=2, index=1)),
        ('kind = "even"\nseed = 9', Even(parts=2, index=1, seed=9)),
        ('kind = "client"', Client(client="f7")),
    ],
)
def test_a_device_gets_its_share_and_the_server_the_whole_test_split(tmp_path, text, expected):
    plan = load(write_plan(tmp_path, data='source = "digits"\nholdout = 0.2', more=f"[partition]\n{text}"), tmp_path)
    fleet = [DevicePlan(name="f3"), DevicePlan(name="f7")]
    own = device_data(plan, fleet, 1)
    assert own.partition == expected
    assert (own.source, own.split, own.holdout) == ("digits", "train", 0.2)
    whole = test_data(plan)
    assert (whole.split, whole.partition, whole.holdout) == ("test", None, 0.0)


def test_an_option_beside_options_is_an_error(tmp_path):
    """Else a trial would run with the default of what its plan sets."""
    path = tmp_path / "plan.toml"
    rest = '[model]\nname = "mlp"\n[data]\nsource = "digits"\n'
    path.write_text(f'name = "x"\nrounds = 1\n[algorithm]\nname = "fedprox"\nmu = 0.5\n{rest}')
    with pytest.raises(ConfigError, match=naming("algorithm", "mu")):
        load(path, tmp_path)


FALLBACK = '[fallback]\ndata = { source = "digits" }\nmodel = { name = "mlp", options = { features = 64 } }'


def test_a_plan_falls_back_only_where_its_data_is_not_there(tmp_path, caplog):
    """What stands in the record is what was trained; what the fallback does not name stays the plan's own."""
    path = write_plan(tmp_path, data='source = "npz"\npath = "far.npz"', more=FALLBACK)
    away = load(path, tmp_path)
    assert (away.data.source, away.model.name, away.algorithm.name) == ("digits", "mlp", "fedavg")
    assert away.fallback is None
    [warning] = [record for record in caplog.records if record.name == "edge_server.plan.data"]
    assert names_all(warning.getMessage(), "far.npz", "digits")
    (tmp_path / "far.npz").touch()
    here = load(path, tmp_path)
    assert (here.data.source, here.fallback) == ("npz", None)
    assert here.model != away.model


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "named"),
    [
        ("bandwidth", "fedspu", ("prune", "fedspu", "clusters", "keep_ratio")),
        ("bandwidth", "fedavg", ("fedavg", "[optimizer]")),
        ("bandwidth", "fedalt", ("fedalt", "[optimizer]")),
        ("clusters", "local_only", ("keep", "local_only", "[optimizer]")),
        ("keep_ratio", "pruned_personalization", ("keep", "bandwidth")),
        ("bandwidth", "pruned_personalization", ()),
        ("clusters", "hermes", ()),
        ("keep_ratio", "fjord", ()),
    ],
)
def test_a_value_decided_by_an_optimizer_and_unused_is_logged_once(tmp_path, caplog, optimizer, algorithm, named):
    """The plan stays one that can be run: studies share an optimizer among methods."""
    evaluation = "every = 0\ndevices_every = 1"
    path = write_plan(tmp_path, algorithm=f'name = "{algorithm}"', optimizer=f'name = "{optimizer}"',
                      evaluation=evaluation, more='[fallback]\ndata = { source = "digits" }')  # fmt: skip
    assert load(path, tmp_path).optimizer
    warnings = [record.getMessage() for record in caplog.records if record.name == "edge_server.rounds.check_plan"]
    assert len(warnings) == bool(named)
    assert all(names_all(warning, path, *named) for warning in warnings)


@pytest.mark.parametrize(
    ("evaluation", "is_evaluated"),
    [("every = 0", False), ("every = 0\non_device = true", True), ("every = 0\ndevices_every = 2", True), ("", True)],
)
def test_a_plan_in_which_nothing_evaluates_the_model_is_logged(tmp_path, caplog, evaluation, is_evaluated):
    path = write_plan(tmp_path, evaluation=evaluation)
    load(path, tmp_path)
    warnings = [record.getMessage() for record in caplog.records if record.name == "edge_server.rounds.check_plan"]
    assert len(warnings) == (not is_evaluated)
    assert all(names_all(warning, path, "evaluation.on_device", "evaluation.every") for warning in warnings)


def test_a_mistake_in_a_fallback_is_found_even_where_the_data_is_there(tmp_path):
    """Who tries the plan elsewhere should not be the first to see it."""
    path = write_plan(tmp_path, more=FALLBACK.replace("mlp", "nlp"))
    with pytest.raises(ConfigError, match=naming("nlp")):
        load(path, tmp_path)


def test_the_split_plan_can_be_used_with_and_without_its_data(tmp_path):
    """On images where they are, on digits elsewhere; both cut where their network allows it."""
    path = Path(__file__).parents[3] / "deploy" / "plans" / "fedsl.toml"
    assert load(path, tmp_path).data.source == "digits"
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar10_20k.npz").touch()
    assert load(path, tmp_path).model.name == "vgg13"


def test_a_cut_that_the_model_does_not_have_is_refused_before_anything_starts(tmp_path):
    """With those that it has."""
    more = {"algorithm": 'name = "fedsl"\noptions = { cut = 7 }'}
    with pytest.raises(ConfigError, match=naming(tmp_path / "plan.toml", 7, 1)):
        load(write_plan(tmp_path, **more), tmp_path)
