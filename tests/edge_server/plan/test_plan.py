"""A plan is refused before anything starts, in one line: the file, the key, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import devices, share, test_data
from edge_server.rounds.check_plan import load
from shared.data.spec import Client, Dirichlet, Even, Shards
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan

test_data.__test__ = False  # type: ignore[attr-defined] - a function of ours, not a test


def test_the_demo_plan_can_be_used():
    """What a newcomer runs first."""
    plan = load(Path(__file__).parents[3] / "deploy" / "plans" / "demo.toml", Path())
    assert len(devices(plan)) == 4
    assert plan.rounds == 10


@pytest.mark.parametrize(
    ("sections", "key", "remedy"),
    [
        ({"more": "[plan]"}, "plan", "known: name, rounds"),
        ({"round": "deadline = 3.0"}, "round", "unknown field `deadline`; remove it or correct its spelling"),
        ({"round": "deadline_s = 0.0"}, "round", "deadline_s must be > 0"),
        ({"round": "deadline_s = nan"}, "round", "deadline_s must be > 0"),
        ({"round": "quorum = 1.5"}, "round", "quorum in (0, 1]"),
        ({"round": "quorum = 0.0"}, "round", "quorum in (0, 1]"),
        ({"round": "min_updates = 0"}, "round", "min_updates >= 1"),
        ({"round": 'on_missed = "panic"'}, "round.on_missed", "correct the value"),
        ({"rounds": 0}, "rounds", "give at least 1"),
        ({"cohort": "size = -1"}, "cohort", "size must be >= 0"),
        ({"cohort": "min_devices = 0"}, "cohort", "min_devices >= 1"),
        ({"cohort": "wait_s = 0.0"}, "cohort", "wait_s > 0"),
        ({"cohort": "over_selection = 0.3"}, "cohort", "over_selection must be 0 to 10, and needs a size"),
        ({"cohort": "size = 3\nover_selection = -0.1"}, "cohort", "over_selection must be 0 to 10"),
        ({"cohort": "size = 3\nover_selection = nan"}, "cohort", "over_selection must be 0 to 10"),
        ({"cohort": "size = 3\nover_selection = 11.0"}, "cohort", "over_selection must be 0 to 10"),
        ({"evaluation": "every = -1"}, "evaluation", "every must be >= 0"),
        ({"hyper": "batch_size = 0"}, "hyper", "batch_size is 0: give at least 1"),
        (
            {"hyper": "learning_rate = -1.0\nmomentum = 1.5\nweight_decay = -1.0"},
            "hyper",
            "give above 0 and finite; momentum is 1.5: give 0 or more, and below 1; weight_decay is -1.0",
        ),
        ({"hyper": 'learning_rate = "fast"'}, "hyper.learning_rate", "correct the value"),
        ({"algorithm": 'name = "magic"'}, "algorithm", "known: fed"),
        ({"algorithm": 'name = "fedprox"\noptions = { nu = 1 }'}, "algorithm", "no option 'nu'; known: mu"),
        ({"algorithm": 'name = "fedprox"\noptions = { mu = -1 }'}, "algorithm", "correct its options"),
        ({"early_stopping": "share = 1.5"}, "early_stopping", "share must be 0 to 1"),
        ({"early_stopping": "share = nan"}, "early_stopping", "share must be 0 to 1"),
        ({"early_stopping": "min_alive = 0"}, "early_stopping", "min_alive >= 1"),
        ({"early_stopping": ""}, "early_stopping", "choose one of fedmp, fedselect, fedspu, "),
        (
            {"algorithm": 'name = "fedprox"\noptions = { early_stopping = true }'},
            "early_stopping",
            "choose one of fedmp",
        ),
        (
            {"algorithm": 'name = "fedspu"\noptions = { share = 0.5 }', "early_stopping": ""},
            "[early_stopping]",
            "take out the option",
        ),
        ({"model": 'name = "brain"'}, "model", "known: "),
        ({"model": 'name = "mlp"\noptions = { hidden = -1 }'}, "model", "correct its options"),
        ({"more": '[codec]\nname = "zip"'}, "codec", "known: chain, dense, float16, masked, quantize"),
        ({"more": '[codec]\nname = "topk"\noptions = { share = 0.0 }'}, "topk", "share must be above 0"),
        ({"more": '[codec]\nname = "topk"\noptions = { share = "x" }'}, "topk", "share is 'x'; give a number;"),
        (
            {"more": '[codec]\nname = "topk"\noptions = { exact = "1.weight, 9.bias" }'},
            "codec.exact",
            "'9.bias'; known: ",
        ),
        ({"more": '[codec]\nname = "quantize"\noptions = { bits = 2.5 }'}, "bits is 2.5", "give a whole number;"),
        ({"more": '[codec]\nname = "topk"', "algorithm": 'name = "fedselect"'}, "topk", "choose another codec"),
        ({"more": '[cut_codec]\nname = "topk"'}, "cut_codec", "choose another codec"),
        ({"data": 'source = "idx"'}, "data", "path must name"),
        ({"more": '[partition]\nkind = "random"'}, "partition.kind", "correct the value"),
        ({"more": '[[device]]\nname = "a"\n[[device]]\nname = "a"'}, "device", "give each its own"),
        ({"more": '[[device]]\nname = "a b"'}, "device.name", "use 1 to 64 letters"),
        ({"more": '[[device]]\nname = "a"\ncompute_s = -1.0'}, "device", "compute_s and delay_s must be >= 0"),
        ({"more": '[[device]]\nname = "a"\nup_mbit_s = 0.0'}, "device", "leave them out for no limit"),
        ({"more": '[[device]]\nname = "a"\nup_mbit_s = inf'}, "device", "leave them out for no limit"),
        ({"more": '[partition]\nkind = "even"\nalpha = nan'}, "partition", "alpha must be > 0 and finite"),
    ],
)
def test_a_mistake_names_file_key_and_remedy(tmp_path, sections, key, remedy):
    path = write_plan(tmp_path, **sections)
    with pytest.raises(ConfigError) as caught:
        load(path, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert key in message
    assert remedy in message
    assert "\n" not in message


def test_a_relative_data_path_starts_at_the_data_root(tmp_path):
    path = write_plan(tmp_path, data='source = "csv"\npath = "wine.csv"')
    assert load(path, Path("root")).data.path == "root/wine.csv"
    path = write_plan(tmp_path, data='source = "csv"\npath = "/srv/wine.csv"')
    assert load(path, Path("root")).data.path == "/srv/wine.csv"


def test_a_path_that_is_not_there_is_named_with_the_data_root(tmp_path):
    """Only where this machine needs it: a plan whose server evaluates nothing leaves the data to the devices."""
    section = 'source = "csv"\npath = "wine.csv"'
    with pytest.raises(ConfigError) as caught:
        load(write_plan(tmp_path, data=section, evaluation="every = 1"), tmp_path / "sets")
    assert str(caught.value).startswith(f"data.path: {tmp_path}/sets/wine.csv is not there; relative paths start at")
    assert f"data_root, which is {tmp_path}/sets: correct data.path, --data-root" in str(caught.value)
    load(write_plan(tmp_path, data=section, evaluation="every = 0"), tmp_path / "sets")


def test_a_plan_without_data_evaluates_nothing_and_runs_on_devices_alone(tmp_path):
    path = write_plan(tmp_path)
    path.write_text(path.read_text().replace('[data]\nsource = "digits"', "").replace("every = 0", ""))
    plan = load(path, tmp_path)
    assert plan.evaluation.every == 0
    with pytest.raises(ConfigError, match=r"plan 'tiny' has no \[data\], which agents on this machine, replay and"):
        share(plan, devices(plan, 2), 0)
    path.write_text(path.read_text().replace("[evaluation]", "[evaluation]\nevery = 2"))
    with pytest.raises(ConfigError, match=r"stands in a plan without \[data\]"):
        load(path, tmp_path)


def test_all_devices_together_are_bounded(tmp_path):
    """Each count alone is: 200 x 1,000,000 in a plan of 20 kB took all memory."""
    more = "".join(f'[[device]]\nname = "d{number}"\ncount = 1000000\n' for number in range(200))
    with pytest.raises(ConfigError, match=r"200000000 in all; name at most 1000000"):
        load(write_plan(tmp_path, more=more), tmp_path)


def test_devices_are_the_plans_own_then_made_up_ones(tmp_path):
    more = '[[device]]\nname = "pi"\n[[device]]\nname = "nano"'
    plan = load(write_plan(tmp_path, cohort="min_devices = 1", more=more), tmp_path)
    assert [device.name for device in devices(plan)] == ["pi", "nano"]
    assert [device.name for device in devices(plan, 1)] == ["pi"]
    assert [device.name for device in devices(plan, 4)] == ["pi", "nano", "device-2", "device-3"]
    with pytest.raises(ConfigError, match=r"add .* sections or give --local N"):
        devices(load(write_plan(tmp_path), tmp_path))


def test_fewer_devices_than_a_round_waits_for_are_refused_at_once(tmp_path):
    """Every round would wait for those who never come, and be missed."""
    plan = load(write_plan(tmp_path, cohort="min_devices = 4"), tmp_path)
    assert len(devices(plan, 4)) == 4
    with pytest.raises(ConfigError, match=r"2 devices: plan .* waits for cohort.min_devices = 4; lower that"):
        devices(plan, 2)
    with pytest.raises(ConfigError, match="-1 devices"):
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
    own = share(plan, fleet, 1)
    assert own.partition == expected
    assert (own.source, own.split, own.holdout) == ("digits", "train", 0.2)
    whole = test_data(plan)
    assert (whole.split, whole.partition, whole.holdout) == ("test", None, 0.0)


def test_an_option_beside_options_is_an_error(tmp_path):
    """Else a trial would run with the default of what its plan sets."""
    path = tmp_path / "plan.toml"
    rest = '[model]\nname = "mlp"\n[data]\nsource = "digits"\n'
    path.write_text(f'name = "x"\nrounds = 1\n[algorithm]\nname = "fedprox"\nmu = 0.5\n{rest}')
    with pytest.raises(ConfigError, match=r"unknown field `mu`"):
        load(path, tmp_path)


FALLBACK = '[fallback]\ndata = { source = "digits" }\nmodel = { name = "mlp", options = { features = 64 } }'


def test_a_plan_falls_back_only_where_its_data_is_not_there(tmp_path, caplog):
    """What stands in the record is what was trained; what the fallback does not name stays the plan's own."""
    path = write_plan(tmp_path, data='source = "npz"\npath = "far.npz"', more=FALLBACK)
    away = load(path, tmp_path)
    assert (away.data.source, away.model.name, away.algorithm.name) == ("digits", "mlp", "fedavg")
    assert away.fallback is None
    assert "far.npz is not there, training on digits instead" in caplog.text
    (tmp_path / "far.npz").touch()
    here = load(path, tmp_path)
    assert (here.data.source, here.fallback) == ("npz", None)
    assert here.model != away.model


@pytest.mark.parametrize(
    ("optimizer", "algorithm", "says"),
    [
        ("bandwidth", "fedspu", ("decides prune, which algorithm 'fedspu' does not use", "clusters or keep_ratio")),
        ("bandwidth", "fedavg", ("'fedavg' does not use", "take [optimizer] out", "shares of the uplink")),
        ("bandwidth", "fedalt", ("'fedalt' does not use", "take [optimizer] out")),
        ("clusters", "local_only", ("decides keep, which algorithm 'local_only' does not use", "take [optimizer] out")),
        ("keep_ratio", "pruned_personalization", ("decides keep", "choose optimizer bandwidth")),
        ("bandwidth", "pruned_personalization", ()),
        ("clusters", "hermes", ()),
        ("keep_ratio", "fjord", ()),
    ],
)
def test_what_an_optimizer_decides_and_nobody_uses_is_told_once(tmp_path, caplog, optimizer, algorithm, says):
    """The plan stays one that can be run: studies share an optimizer among methods."""
    evaluation = "every = 0\ndevices_every = 1"
    path = write_plan(tmp_path, algorithm=f'name = "{algorithm}"', optimizer=f'name = "{optimizer}"',
                      evaluation=evaluation, more='[fallback]\ndata = { source = "digits" }')  # fmt: skip
    assert load(path, tmp_path).optimizer
    told = [record.getMessage() for record in caplog.records if "optimizer" in record.getMessage()]
    assert len(told) == bool(says)
    assert all(word in told[0] for word in says)
    assert all("shares of the uplink" not in line for line in told if optimizer != "bandwidth")


def test_a_mistake_in_a_fallback_is_found_even_where_the_data_is_there(tmp_path):
    """Who tries the plan elsewhere should not be the first to see it."""
    path = write_plan(tmp_path, more=FALLBACK.replace("mlp", "nlp"))
    with pytest.raises(ConfigError, match="nlp"):
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
    with pytest.raises(ConfigError, match=r"plan\.toml: .*7.*1"):
        load(write_plan(tmp_path, **more), tmp_path)
