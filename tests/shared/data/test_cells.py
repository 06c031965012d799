"""SQLite and Parquet files read as the same rows in CSV, with faults named by row."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

import numpy as np
import pytest

from shared.data.classes import class_names
from shared.data.formats import Window
from shared.data.inputs import read_preparation
from shared.data.load import load
from shared.data.spec import Client, Data
from shared.runtime.extras import install_command
from tests.naming import names_all

ROWS = [(f"2024-01-01 {hour:02}:00:00", hour, hour * hour / 4, f"s{hour % 2}", "ab"[hour % 2]) for hour in range(20)]
NAMES = ("time", "temp", "ozone", "who", "label")
TIMES = np.array([row[0] for row in ROWS], dtype="datetime64[s]")


def write_csv(path, rows=ROWS):
    path.write_text("\n".join(",".join(map(str, row)) for row in (NAMES, *rows)) + "\n")


def write_sqlite(path, rows=ROWS, table="air quality"):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f'CREATE TABLE "{table}" ({", ".join(NAMES)})')
        database.executemany(f'INSERT INTO "{table}" VALUES (?, ?, ?, ?, ?)', rows[::-1])  # noqa: S608 - ours


def write_parquet(path, rows=ROWS):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is absent")
    from pyarrow import parquet  # noqa: PLC0415 - an extra

    columns = [list(column) for column in zip(*rows, strict=True)]
    table = arrow.table([arrow.array(TIMES), *map(arrow.array, columns[1:])], names=list(NAMES))
    parquet.write_table(table, path, row_group_size=7)


WRITERS = {"sqlite": write_sqlite, "parquet": write_parquet}


@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize(
    "keys",
    [
        {"classes": ("a", "b"), "skip_columns": ("time",), "client_column": "who"},
        {"target_columns": ("ozone",), "skip_columns": ("who", "label"), "time_column": "time"},
        {
            "target_columns": ("ozone",),
            "client_column": "who",
            "skip_columns": ("label",),
            "time_column": "time",
            "window": Window(length=3, horizon=2),
            "partition": Client(client="s1"),
        },
    ],
)
def test_the_same_rows_as_in_csv(tmp_path, source, keys):
    table, path = tmp_path / "a.csv", tmp_path / f"a.{source}"
    write_csv(table)
    WRITERS[source](path)
    expected, examples = (
        load(Data(source="csv", path=str(table), **keys)),
        load(Data(source=source, path=str(path), **keys)),
    )
    order = slice(None) if keys.get("time_column") or source == "parquet" else slice(None, None, -1)
    np.testing.assert_array_equal(examples.inputs.numpy()[order], expected.inputs.numpy())
    np.testing.assert_array_equal(examples.labels.numpy()[order], expected.labels.numpy())
    assert len(examples.labels) > 3
    assert examples.clients == (expected.clients and expected.clients[order])


def test_an_idle_agent_reads_classes_and_columns_of_a_database(tmp_path):
    write_sqlite(tmp_path / "a.db")
    spec = Data(source="sqlite", path=str(tmp_path / "a.db"), skip_columns=("time", "who"))
    assert class_names(spec) == ("a", "b")
    assert read_preparation(spec).features == ("temp", "ozone")


def test_tables_are_chosen_by_name(tmp_path, refused):
    path = tmp_path / "a.db"
    write_sqlite(path)
    write_sqlite(path, table="other")
    keys = {"source": "sqlite", "path": str(path), "skip_columns": ("time", "who")}
    assert names_all(refused(**keys), path, "air quality", "other", "data.table")
    assert names_all(refused(**keys, table="third"), "'third'", "air quality", "other")
    assert len(load(Data(**keys, table="air quality"))) == len(ROWS)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert names_all(refused(**keys), path, "locked", "WAL")
    path.write_bytes(path.read_bytes()[:4096] + bytes(4096))
    assert names_all(refused(**keys, table="other"), path, "malformed", "recover")
    path.write_bytes(b"SQLite format 3\0" + bytes(100))
    assert names_all(refused(**keys), path)
    path.write_bytes(b"")
    assert names_all(refused(**keys), path, "no table")
    assert names_all(refused(**{**keys, "path": str(tmp_path / "none.db")}), tmp_path / "none.db")


@pytest.mark.parametrize("source", WRITERS)
def test_faults_are_named_by_row(tmp_path, refused, source):
    rows = [*ROWS[:3], (ROWS[3][0], 3, None, "s1", "b"), *ROWS[4:]]
    path = tmp_path / "a.x"
    WRITERS[source](path, rows)
    keys = {"source": source, "path": str(path), "target_columns": ("ozone",), "time_column": "time"}
    assert names_all(refused(**keys, skip_columns=("who", "label")), path, "row 4", "target column", "'ozone'")
    complete = load(Data(**keys, skip_columns=("who", "label"), drop_missing=("", "7")))
    assert 7 not in complete.inputs[:, 0]
    assert len(complete) == len(ROWS) - 2
    assert names_all(refused(**keys, skip_columns=("who",)), path, "row 1", "'label'", "'a'", "skip_columns")
    text = {**keys, "target_columns": ("label",)}
    assert names_all(refused(**text, skip_columns=("who", "ozone")), "target column", "'label'", "label_column")


def test_names_of_classes_in_parquet_must_be_listed(tmp_path, refused):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    assert class_names(Data(source="parquet", path=str(path))) is None
    message = refused(source="parquet", path=str(path), skip_columns=("time", "who"))
    assert names_all(message, path, "'label'", "data.classes")
    path.write_bytes(b"PAR1" + bytes(50))
    assert names_all(refused(source="parquet", path=str(path)), path)


def test_without_pyarrow(tmp_path, monkeypatch, refused):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert install_command("parquet") in refused(source="parquet", path=str(tmp_path / "a.parquet"))
