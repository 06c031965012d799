"""Study grid: all combinations, each a valid plan, or one error with its line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_server.replay.study.grid import build_cells, describe_setting
from edge_server.replay.study.spec import load as load_study
from edge_server.replay.study.toml_lines import line_of
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from shared.protocol.topics import is_name
from tests.edge_server.fleets import HEAD, TWO_SEEDS, VARIANTS, grid_of, write_study
from tests.naming import naming

RATES = f'{TWO_SEEDS}"hyper.learning_rate" = [0.1, 0.2]\n'


def test_every_combination_is_a_cell(tmp_path):
    """Variants outside, the grid's last key inside; what a cell does not set is as the plan's own file has it."""
    _, found = grid_of(tmp_path, HEAD + RATES + VARIANTS)
    assert [(c.variant, c.seeds["seed"], c.settings["hyper.learning_rate"]) for c in found] == [
        (variant, seed, rate) for variant in ("base", "prox") for seed in (1, 2) for rate in (0.1, 0.2)
    ]
    for cell in found:
        assert (cell.plan.seed, cell.plan.hyper.learning_rate) == (
            cell.seeds["seed"],
            cell.settings["hyper.learning_rate"],
        )
        assert cell.plan.algorithm.name == {"base": "fedavg", "prox": "fedprox"}[cell.variant]
    usual = load(tmp_path / "plan.toml", tmp_path)
    hyper = msgspec.structs.replace(usual.hyper, learning_rate=0.1)
    assert found[0].plan == msgspec.structs.replace(usual, seed=1, hyper=hyper)


def test_the_example_is_a_study():
    """The one that is shown to people."""
    path = Path(__file__).parents[4] / "deploy" / "studies" / "demo.toml"
    study, base = load_study(path)
    found = build_cells(study, base, path, path.read_text(), Path())
    assert [(cell.variant, cell.plan.seed) for cell in found] == [
        (variant, seed) for variant in ("fedavg", "fedprox") for seed in (1, 2, 3)
    ]


def test_names_are_stable_and_unique(tmp_path):
    """A cell's name stays as the grid grows, so that what was run is found; it may name a run and a folder."""
    _, few = grid_of(tmp_path, HEAD + RATES + VARIANTS)
    _, more = grid_of(tmp_path, HEAD + RATES.replace("[1, 2]", "[7, 2, 1]") + VARIANTS)
    names = {cell.name for cell in few}
    assert len(names) == len(few) == 8
    assert names < {cell.name for cell in more}
    assert all(is_name(name) for name in names)
    same_start = f'{HEAD}[[variant]]\nname = "{"v" * 64}"\n{TWO_SEEDS}'
    assert len({cell.name for cell in grid_of(tmp_path, same_start)[1]}) == 2, "cut alike, they differ by their hash"


def test_a_key_may_be_written_either_way(tmp_path):
    """Dotted in quotes, or as TOML nests it; a table that names a thing replaces, another is merged."""
    quoted = '[grid]\n"hyper.learning_rate" = [0.1]\nalgorithm = [{ name = "fedprox", options = { mu = 0.5 } }]'
    nested = '[grid.hyper]\nlearning_rate = [0.1]\n[grid]\nalgorithm = [{ name = "fedprox", options = { mu = 0.5 } }]'
    _, [one] = grid_of(tmp_path, f"{HEAD}{quoted}")
    _, [other] = grid_of(tmp_path, f"{HEAD}{nested}")
    assert one == other
    assert one.plan.hyper.local_epochs == 1
    assert one.plan.algorithm.options == {"mu": 0.5}


def test_a_plan_may_stand_in_the_study(tmp_path):
    """It need not be whole: every cell has to be, and it may be the grid that makes it so."""
    plan = {
        "model": '{ name = "mlp", options = { features = 8, hidden = 4, classes = 3 } }',
        "data": '{ source = "npz", path = "examples.npz" }',
        "device": '[{ name = "a" }]',
    }
    inside = "\n".join(f"{key} = {value}" for key, value in plan.items())
    grid = '[grid]\nrounds = [3]\nalgorithm = [{ name = "fedavg" }]'
    _, found = grid_of(tmp_path, f'name = "whole"\n{grid}\n[plan]\n{inside}')
    [plan] = [cell.plan for cell in found]
    assert (plan.name, plan.rounds, plan.algorithm.name) == ("whole", 3, "fedavg")
    assert plan.data.path == str(tmp_path / "examples.npz"), "relative paths are taken from the data root"


def test_only_the_named_keys_are_seeds(tmp_path):
    """Cells that differ in nothing else are of one setting."""
    grid = '[grid]\nseed = [1, 2]\n"partition.seed" = [3, 4]\n'
    settings = {describe_setting(cell) for cell in grid_of(tmp_path, HEAD + grid)[1]}
    assert settings == {"partition.seed=3", "partition.seed=4"}
    both = 'seeds = ["seed", "partition.seed"]\n'
    assert {describe_setting(cell) for cell in grid_of(tmp_path, HEAD + both + grid)[1]} == {"plan"}


WRONG = {
    "a key": ('"hyper.learning_rate"', '"hyper.lerning_rate"', 5, ("lerning_rate",)),
    "a value of many": ("[0.1, 0.2]", "[0.1, -1]", 5, ("learning_rate", -1)),
    "a type": ("[0.1, 0.2]", '["fast"]', 5, ("learning_rate",)),
    "no number": ("[0.1, 0.2]", "[nan]", 5, ("learning_rate",)),
    "a variant's name": ('"fedprox"', '"fedprx"', 11, ("fedprx",)),
    "a variant's option": ("mu =", "nu =", 11, ("fedprox", "nu")),
    "a type of a name": ('"hyper.learning_rate"', "algorithm.name", 5, ("algorithm.name",)),
    "no list": ("[0.1, 0.2]", "0.1", 5, ("learning_rate",)),
    "an empty list": ("[0.1, 0.2]", "[]", 5, ("learning_rate",)),
    "a value twice": ("[1, 2]", "[1, 1]", None, ("base_seed-1_learning-rate-0.1",)),
    "a seed": ('plan = "plan.toml"', 'plan = "plan.toml"\nseeds = ["sed"]', 3, ("seeds", "sed")),
    "through a list": ('"hyper.learning_rate"', '"device.a.compute_s"', 5, ("device",)),
    "too many": ("[1, 2]", str(list(range(2600))), None, (10400,)),
    "no such plan": ('"plan.toml"', '"none.toml"', None, ("none.toml",)),
    "an unknown section": ("[grid]", "[gird]", None, ("gird",)),
    "a name twice": ('"prox"', '"base"', None, ("base",)),
    "no name": ('"prox"', '"p r"', None, ("variant.name", "p r")),
    "the plan itself": ('"plan.toml"', '"wrong.toml"', 2, ("plan", "round_s")),
}


@pytest.mark.parametrize(("good", "bad", "line", "named"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line(tmp_path, good, bad, line, named):
    """With the study's file, and the line where there is one to blame."""
    text = HEAD + RATES + VARIANTS
    assert good in text
    write_study(tmp_path, "")
    (tmp_path / "wrong.toml").write_text("round_s = 3\n" + (tmp_path / "plan.toml").read_text())
    place = () if line is None else (f"study.toml:{line}",)
    with pytest.raises(ConfigError, match=naming(*place, *named)) as caught:
        grid_of(tmp_path, text.replace(good, bad, 1))
    assert "\n" not in str(caught.value)


def test_a_value_that_another_replaces_is_refused(tmp_path):
    """Else the summary would speak of a variant that nobody ran."""
    with pytest.raises(ConfigError, match=naming("study.toml:4", "algorithm", 10)):
        grid_of(tmp_path, f'{HEAD}[grid]\nalgorithm = [{{ name = "fedavg" }}]\n{VARIANTS}')


def test_lines_are_found_however_the_key_is_written():
    """In a table, dotted, quoted, in an inline table, and in the second of several tables of one name."""
    text = '[grid]\na.b = [1]\n"c.d" = [2]\n[[v]]\nname = "x"\n[v.set]\na.b = 1\n[[v]]\nset = { "a.b" = 2 }\n'
    text += "[v.set.e]\nf = 1"
    assert [line_of(text, ("grid", *key)) for key in (("a", "b"), ("c", "d"))] == [2, 3]
    assert [line_of(text, ("v", "set", "a", "b"), place) for place in (0, 1)] == [7, 9]
    assert line_of(text, ("v", "set", "e", "f"), 1) == 11
    assert line_of(text, ("nowhere",)) == 1
