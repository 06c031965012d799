"""Invalid traces: one line that names the place; nothing is imported."""

from __future__ import annotations

import csv
import errno
import os
import re
from pathlib import Path

import pytest

from edge_server.replay.trace import files
from shared.errors import ConfigError
from tests.edge_server.replay.trace.test_round_trip import export_field_run
from tests.naming import names_all


@pytest.fixture
def trace(tmp_path):
    return export_field_run(tmp_path)


def edit(path: Path, before: str, after: str, count: int = 1) -> None:
    text = path.read_text()
    assert before in text, "the edit changes nothing"
    path.write_text(text.replace(before, after, count))


def cell(folder: Path, table: str, line: int, column: str, value: str) -> None:
    """Write a cell; lines count from 1, the heading's."""
    path = folder / f"{table}.csv"
    lines = path.read_text().splitlines(keepends=True)
    place = lines[0].rstrip("\n").split(",").index(column)
    cells = re.findall(r'("(?:[^"]|"")*"|[^,\n]*)[,\n]', lines[line - 1])
    cells[place] = value
    lines[line - 1] = ",".join(cells) + "\n"
    path.write_text("".join(lines))


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as found:
        files.read(folder)
    message = str(found.value)
    assert "\n" not in message
    assert str(folder) in message
    return message.removeprefix(f"{folder}/")


@pytest.mark.parametrize("name", ["trace.json", "tasks.csv", "facts.csv"])
def test_a_missing_file(trace, name):
    (trace / name).unlink()
    assert names_all(refused(trace), name, os.strerror(errno.ENOENT))


def test_a_column_that_is_there_twice(trace):
    edit(trace / "rounds.csv", ",loss,", ",round,")
    edit(trace / "rounds.csv", "refused", "loss")
    assert names_all(refused(trace), "rounds.csv:1", "refused")
    edit(trace / "rounds.csv", ",loss\n", ",refused\n")
    assert names_all(refused(trace), "rounds.csv:1", "loss")


def test_columns_that_this_version_does_not_know_are_left_out(trace):
    known = files.read(trace)
    lines = (trace / "steps.csv").read_text().splitlines()
    (trace / "steps.csv").write_text(
        "".join(f"{line},{'colour' if not n else 'red'}\n" for n, line in enumerate(lines))
    )
    assert files.read(trace) == known


def test_a_figure_that_an_earlier_version_did_not_measure_is_unknown(trace):
    """Its column is in neither the header nor the table; one that the header names must be there."""
    head, *lines = (trace / "tasks.csv").read_text().splitlines()
    names = head.split(",")
    at = names.index("gradient_bytes")
    rows = [row[:at] + row[at + 1 :] for row in (names, *csv.reader(lines))]
    with (trace / "tasks.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    assert names_all(refused(trace), "tasks.csv:1", "gradient_bytes")
    edit(trace / "trace.json", '"gradient_bytes": "B",', "")
    assert {task.gradient_bytes for task in files.read(trace).tasks} == {None}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("tasks", "compute_s", "nan"),
        ("tasks", "compute_s", "inf"),
        ("tasks", "compute_s", "-1.0"),
        ("tasks", "compute_s", "1e12"),
        ("tasks", "compute_s", "soon"),
        ("tasks", "bytes_down", "1.5"),
        ("tasks", "loss", "nan"),
        ("tasks", "metrics", '"{""loss"": 1e999}"'),
        ("tasks", "metrics", "{"),
        ("tasks", "outcome", "lost"),
        ("tasks", "device", "../etc"),
        ("tasks", "payload_digest", "0g"),
        ("tasks", "compute_s_quality", "guessed"),
        ("rounds", "accuracy", "-0.5"),
        ("rounds", "round", "-1"),
        ("readings", "value", "inf"),
        ("readings", "age_s", "-3"),
        ("decisions", "seed", "9" * 30),
        ("decisions", "values", '"{""keep"": ' + "9" * 400 + '}"'),
        ("tasks", "bytes_up", "9" * 30),
    ],
)
def test_a_cell_that_cannot_be_true(trace, table, column, value):
    """Named by its column and its line."""
    cell(trace, table, 2, column, value)
    message = refused(trace)
    assert names_all(message, f"{table}.csv:2", column)


@pytest.mark.parametrize(
    ("table", "line", "column", "value", "named"),
    [
        ("readings", 2, "value", "-1.0", ("readings.csv:2", "cpu.f_hertz", -1.0)),
        ("readings", 2, "device", "stranger", ("readings.csv:2", "stranger")),
        ("tasks", 4, "began_s", "12.5", ("tasks.csv:4",)),
        ("rounds", 3, "round", "9", ("tasks.csv:7", 2, "rounds.csv")),
    ],
)
def test_a_cell_that_contradicts_others(trace, table, line, column, value, named):
    """A clock below zero (a temperature may be), an unknown device, an arrival before the start, an unknown round."""
    cell(trace, table, line, column, value)
    assert names_all(refused(trace), *named)


@pytest.mark.parametrize("key", ["seed", "rounds"])
def test_an_integer_in_the_header_that_nothing_can_hold(trace, key):
    """Its plan was read, and the run that was made of it could be neither shown nor reported."""
    text = (trace / "trace.json").read_text()
    (trace / "trace.json").write_text(re.sub(rf'"{key}": \d+', f'"{key}": {"9" * 400}', text, count=1))
    assert names_all(refused(trace), "trace.json")


@pytest.mark.parametrize(
    ("name", "before", "after", "named"),
    [
        ("trace.json", '"version": 1', '"version": 2', ("trace.json", 2)),
        ("trace.json", '"run_s": 60.0', '"run_s": -60.0', ("trace.json", "processes")),
        ("trace.json", '"compute_s": "s"', '"compute_s": "ms"', ("trace.json", "tasks", "compute_s", "'ms'", "'s'")),
        ("tasks.csv", "compute_s,", "compute,", ("tasks.csv:1", "compute_s")),
        ("readings.csv", ",Hz,", ",MHz,", ("readings.csv:2", "cpu.f_hertz", "'MHz'", "'Hz'")),
    ],
)
def test_a_newer_schema_processes_backwards_another_unit_a_missing_column(trace, name, before, after, named):
    edit(trace / name, before, after)
    assert names_all(refused(trace), *named)


def swap(path: Path, one: int, other: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[one - 1], lines[other - 1] = lines[other - 1], lines[one - 1]
    path.write_text("".join(lines))


@pytest.mark.parametrize(("table", "lines"), [("readings", (2, 6)), ("availability", (2, 4)), ("rounds", (2, 3))])
def test_time_runs_backwards(trace, table, lines):
    swap(trace / f"{table}.csv", *lines)
    assert re.match(rf"{table}\.csv:\d+: ", refused(trace))


@pytest.mark.parametrize("table", ["tasks", "rounds", "decisions", "readings", "availability", "steps", "facts"])
def test_a_row_that_is_there_twice(trace, table):
    lines = (trace / f"{table}.csv").read_text().splitlines(keepends=True)
    (trace / f"{table}.csv").write_text("".join([*lines[:2], *lines[1:]]))
    edit(trace / "trace.json", f'"{table}": {{\n   "rows": {len(lines) - 1}', f'"{table}": {{\n   "rows": {len(lines)}')
    assert names_all(refused(trace), f"{table}.csv:3", 2)


def test_rows_that_are_missing(trace):
    """Cut at the end of a line, so that nothing but the header knows."""
    lines = (trace / "tasks.csv").read_text().splitlines(keepends=True)
    (trace / "tasks.csv").write_text("".join(lines[:-1]))
    assert names_all(refused(trace), "tasks.csv", 7, 8)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_a_file_that_is_cut_short(trace, keep):
    data = (trace / "tasks.csv").read_bytes()
    (trace / "tasks.csv").write_bytes(data[: int(keep * len(data))])
    assert refused(trace).startswith("tasks.csv:")


@pytest.mark.parametrize("name", ["tasks.csv", "trace.json"])
def test_a_huge_file_is_not_read(trace, name):
    """A terabyte of nothing takes no room on disk, nor in memory."""
    with (trace / name).open("r+b") as file:
        file.truncate(1 << 40)
    assert names_all(refused(trace), name)


def test_an_endless_line_is_not_read_to_its_end(trace):
    with (trace / "facts.csv").open("a") as file:
        file.write("x" * (3 << 20))
    assert names_all(refused(trace), "facts.csv:3")


def test_more_rows_than_any_run_has(trace, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROWS", 3)
    assert names_all(refused(trace), 3)


def test_a_pipe_is_not_waited_for(trace):
    (trace / "facts.csv").unlink()
    os.mkfifo(trace / "facts.csv")
    assert names_all(refused(trace), "facts.csv")


def test_bytes_that_are_no_text(trace):
    (trace / "facts.csv").write_bytes(b"at_s,device,name,value\n1.0,orin,mode,\xff\n")
    assert refused(trace).startswith("facts.csv:")
    (trace / "trace.json").write_bytes(b"\xff{}")
    assert names_all(refused(trace), "trace.json", "UTF-8")
