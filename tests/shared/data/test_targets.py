"""Target columns, windows by time, and what examples of any target kind are refused or dealt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_server.plan.check import check_structure
from edge_server.plan.plan import Plan
from shared.config import parse
from shared.data.classes import class_names
from shared.data.examples import Examples, batches, split_holdout
from shared.data.formats import Window
from shared.data.inputs import read_preparation
from shared.data.load import load
from shared.data.sources.read import read_whole
from shared.data.spec import Client, Data, Dirichlet, Even
from shared.data.summary import summarise
from shared.errors import ConfigError
from tests.naming import names_all, naming

HOURS = "time,temp,wind,ozone\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "air.csv"


def hourly(count, start="2024-03-10T00:00"):
    """Return rows of one hour each: temp counts up, wind is its square, ozone its negative."""
    first = np.datetime64(start)
    return "".join(f"{first + np.timedelta64(at, 'h')},{at},{at * at},{-at}\n" for at in range(count))


def table(path, **keys):
    return Data(source="csv", path=str(path), **keys)


def test_target_columns_are_numbers_and_no_features(path):
    path.write_text("a,ozone,b,temp\n1,0.5,2,-3\n3,1e-3,4,7\n")
    spec = table(path, target_columns=("temp", "ozone"))
    examples = load(spec)
    assert examples.inputs.tolist() == [[1, 2], [3, 4]]
    assert examples.labels.dtype == torch.float32
    np.testing.assert_array_equal(examples.labels.numpy(), np.float32([[-3, 0.5], [7, 1e-3]]))
    assert (class_names(spec), examples.classes) == (None, ())
    assert read_preparation(spec).features == ("a", "b")
    assert load(table(path, target_columns=("temp",), feature_columns=("b", "a"))).inputs.tolist() == [[2, 1], [4, 3]]


def test_rows_without_a_number_are_left_out(path):
    path.write_text("a,b,y,note\n1,,2,x\n-200,1,1,x\n3,4,NA,x\n5,6,7,\n")
    for quote in ("", '"'):  # by numpy in blocks, and line by line
        path.write_text(path.read_text().replace("note", f"{quote}note{quote}"))
        path.write_text(path.read_text().replace("7,\n", f"7,{quote * 2}\n"))
        spec = table(path, target_columns=("y",), skip_columns=("note",), drop_missing=("", "NA", "-200"))
        assert load(spec).inputs.tolist() == [[5, 6]]


def test_a_decimal_comma(path):
    path.write_text("a;y;who\n1,5;-2,25;x,y\n")
    spec = table(path, target_columns=("y",), separator=";", decimal=",", client_column="who")
    examples = load(spec)
    assert (examples.inputs.item(), examples.labels.item(), examples.clients) == (1.5, -2.25, ("x,y",))


def test_text_in_a_target_column_is_refused_with_its_line(path, refused):
    path.write_text("a,y\n1,2\n3,high\n")
    message = refused(source="csv", path=str(path), target_columns=("y",))
    assert names_all(message, path, "line 3", "target column", "'y'", "'high'", "label_column")


def test_windows_are_the_textbook_ones(path):
    """Against a loop over the rows, with a horizon of two targets."""
    path.write_text(HOURS + hourly(12))
    window = Window(length=4, horizon=2, stride=3)
    examples = read_whole(table(path, time_column="time", target_columns=("ozone", "temp"), window=window))
    rows = np.array([[at, at * at, -at] for at in range(12)], dtype=np.float32)
    starts = range(0, 12 - 4 - 2 + 1, 3)
    inputs = np.stack([rows[start : start + 4].T for start in starts])
    targets = np.stack([rows[start + 4 : start + 6][:, [2, 0]].reshape(-1) for start in starts])
    np.testing.assert_array_equal(examples.inputs, inputs)
    np.testing.assert_array_equal(examples.labels, targets)
    spec = table(path, time_column="time", target_columns=("ozone",), window=Window(length=4))
    now = read_whole(spec)
    np.testing.assert_array_equal(now.labels[:, 0], rows[3:, 2])  # the last row's, and ozone is no feature
    assert read_preparation(spec).shape == now.inputs.shape[1:] == (2, 4)


@pytest.mark.parametrize(("max_gap_s", "count"), [(None, 2), (3600.0, 2), (4 * 3600.0, 6)])
def test_no_window_spans_a_gap(path, max_gap_s, count):
    path.write_text(HOURS + hourly(4) + hourly(4, "2024-03-10T06:00"))  # three hours in between
    keys = {} if max_gap_s is None else {"max_gap_s": max_gap_s}
    spec = table(path, time_column="time", target_columns=("ozone",), window=Window(length=2, horizon=1, **keys))
    examples = read_whole(spec)
    assert len(examples) == (4 if count == 2 else 6)
    assert (0 in [int(n) for n in np.diff(examples.inputs[:, 0, 0])]) is False
    assert ("gaps" in " ".join(summarise(spec).notes)) == (count == 2)


def test_windows_of_several_producers_do_not_mix(path):
    """Their rows alternate, as a gateway writes them."""
    rows = [(hour, who, hour * 10 + number) for hour in range(5) for number, who in enumerate("ab")]
    path.write_text("time,who,v\n" + "".join(f"{hour * 60},{who},{value}\n" for hour, who, value in rows))
    keys = {"time_column": "time", "target_columns": ("v",), "client_column": "who"}
    examples = read_whole(table(path, window=Window(length=3, horizon=1), **keys))
    assert examples.clients == ("a", "a", "b", "b")
    assert examples.inputs.tolist() == [[[0, 10, 20]], [[10, 20, 30]], [[1, 11, 21]], [[11, 21, 31]]]
    assert examples.labels.tolist() == [[30], [40], [31], [41]]
    mine = load(table(path, window=Window(length=3, horizon=1), partition=Client(client="b"), **keys))
    assert mine.labels.tolist() == [[31], [41]]


def test_unordered_times_and_empty_windows_are_refused(path, refused):
    keys = {"source": "csv", "path": str(path), "time_column": "time", "target_columns": ("ozone",)}
    path.write_text(HOURS + "2024-01-01,1,2,3\n2024-01-03,1,2,3\n2024-01-02,1,2,3\n")
    assert names_all(refused(**keys), path, "line 4", "line 3", "'time'")
    path.write_text(HOURS + hourly(5))
    message = refused(**keys, window=Window(length=4, horizon=2))
    assert names_all(message, path, "4 rows", "2 after it", "5 rows", "window.length")
    path.write_text(HOURS + "yesterday,1,2,3\n")
    assert names_all(refused(**keys), path, "line 2", "'yesterday'", "time_format")
    path.write_text(HOURS + "1700000000000,1,2,3\n1700000001000,1,2,3\n")
    assert names_all(refused(**keys), path, "milliseconds", "'time'")
    path.write_text(HOURS + "2024-01-01T00:00+01:00,1,2,3\n2024-01-01T01:00,1,2,3\n")
    assert names_all(refused(**keys), path, "line 2", "line 3", "zone")


@pytest.mark.parametrize(
    ("text", "time_format"),
    [
        ("2024-03-10 18:00:00", None),
        ("2024-03-10T18:00Z", None),
        ("2024-03-10T19:00+01:00", None),
        ("1710093600", None),
        ("10/03/2024 18.00.00", "%d/%m/%Y %H.%M.%S"),
    ],
)
def test_times_are_read(path, text, time_format):
    """The same instant in each notation, so that a second row a second later is in order and a window."""
    path.write_text(f"time,v\n{text},1\n{text},2\n")
    keys = {} if time_format is None else {"time_format": time_format}
    spec = table(path, time_column="time", target_columns=("v",), window=Window(length=1, horizon=1), **keys)
    assert load(spec).labels.tolist() == [[2]]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"target_columns": ()}, ["target_columns"]),
        ({"target_columns": ("y", "y")}, ["target_columns"]),
        ({"target_columns": ("y",), "feature_columns": ("y",)}, ["feature_columns", "'y'"]),
        ({"window": Window(length=2, horizon=1)}, ["window.horizon", "target_columns"]),
        ({"target_columns": ("y",), "window": Window(length=2, max_gap_s=1)}, ["max_gap_s", "time_column"]),
        ({"target_columns": ("y",), "partition": Dirichlet(alpha=1, parts=2, index=0)}, ["partition", "even"]),
        ({"target_columns": ("y",), "classes": ("a",)}, ["classes"]),
        ({"targets": "values"}, ["targets", "'csv'"]),
        ({"decimal": ","}, ["decimal", "separator"]),
    ],
)
def test_keys_that_contradict_each_other(keys, named):
    with pytest.raises(ValueError, match=naming(*named)):
        table("x.csv", **keys)


@pytest.mark.parametrize(
    ("kind", "data", "partition", "named"),
    [
        ("regression", "target_columns = ['y']", "dirichlet", ["partition.kind", "'dirichlet'", "even"]),
        ("classification", "target_columns = ['y']", "none", ["'values'", "'classification'", "data.label_column"]),
        ("forecast", "", "none", ["'class'", "'forecast'", "data.target_columns"]),
        ("regression", "target_columns = ['y']", "even", None),
        ("classification", "", "shards", None),
        ("anomaly", "labels = 'none'", "none", None),
    ],
)
def test_a_plan_whose_task_and_targets_disagree_is_refused(tmp_path, kind, data, partition, named):
    text = (
        f'name = "air"\nrounds = 1\nlocal = 2\n[task]\nkind = "{kind}"\n[model]\nname = "mlp"\n'
        f'[algorithm]\nname = "fedavg"\n[partition]\nkind = "{partition}"\n'
        f'[data]\nsource = "csv"\npath = "x"\n{data}\n'
    )
    path = tmp_path / "plan.toml"
    plan = parse(text.encode(), Plan, path)
    if named is None:
        check_structure(plan, path)
        return
    with pytest.raises(ConfigError, match=naming(path, *named)):
        check_structure(plan, path)


def test_numbers_and_masks_in_an_npz_file(tmp_path, refused):
    path, generator = tmp_path / "a.npz", np.random.default_rng(0)
    masks = generator.integers(0, 3, (4, 5, 6))
    np.savez(path, x=generator.standard_normal((4, 1, 5, 6)), y=masks)
    assert torch.equal(load(Data(source="npz", path=str(path), targets="mask")).labels, torch.from_numpy(masks))
    assert names_all(refused(source="npz", path=str(path)), path, "y", "targets")
    values = generator.standard_normal((4, 2))
    np.savez(path, x=np.zeros((4, 3)), y=values)
    spec = Data(source="npz", path=str(path), targets="values", partition=Even(parts=2, index=0))
    assert load(spec).labels.shape == (2, 2)
    np.savez(path, x=np.zeros((2, 3)), y=np.array([1.0, np.nan]))
    assert names_all(refused(source="npz", path=str(path), targets="values"), path, "example 1", "targets")


@pytest.mark.parametrize("shape", [(20, 3), (20, 4, 5)])
def test_batches_pass_any_target(shape):
    labels = torch.arange(float(np.prod(shape))).reshape(shape)
    examples = Examples(torch.arange(20.0)[:, None], labels if len(shape) == 2 else labels.long())
    train, held_out = split_holdout(examples, 0.25, seed=0)
    assert (len(train), len(held_out)) == (15, 5)
    for inputs, targets in batches(train, batch_size=4, epochs=2, seed=0):
        assert torch.equal(targets, examples.labels[inputs[:, 0].long()])
    with pytest.raises(ValueError, match="labels"):
        Examples(torch.zeros(3, 1), torch.zeros(3))


def test_the_summary_shows_quantiles_and_constant_targets(path):
    path.write_text("a,y,z\n" + "".join(f"{at},{at * at},5\n" for at in range(5)))
    summary = summarise(table(path, target_columns=("y", "z")))
    assert names_all(summary.finding, 5, "2 targets", "0 1 4 9 16")
    assert names_all(summary.notes, "'z'")
