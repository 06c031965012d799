"""`edge-server trace` as it is typed: what it says, and what its exit code is."""

from __future__ import annotations

import sys

import pytest

from edge_server.__main__ import main
from tests.edge_server.replay.trace.test_round_trip import export_field_run, texts


def run(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code and what it wrote."""
    monkeypatch.setattr(sys, "argv", ["edge-server", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


SUMMARY = """field-1: fedavg, 3 devices, finished
rows: tasks 8, steps 1, rounds 2, decisions 5, readings 5, facts 2, availability 7
note: the roof was wet
"""


def test_export_check_and_import_say_what_they_found(tmp_path, monkeypatch, capsys):
    whole = texts(export_field_run(tmp_path))
    runs = ("--data-dir", tmp_path / "runs")
    out = tmp_path / "out"
    code, said, _ = run(monkeypatch, capsys, "trace", "export", "field-1", *runs, "--out", out, "--data-root", tmp_path)
    assert (code, said) == (0, f"{SUMMARY}trace: {out}\n")
    assert texts(out) == whole
    assert run(monkeypatch, capsys, "trace", "check", out) == (0, SUMMARY, "")
    code, said, _ = run(monkeypatch, capsys, "trace", "import", out, "--as", "roof", *runs)
    assert (code, said) == (0, f"record: {tmp_path / 'runs' / 'roof'}\n")
    code, said, _ = run(monkeypatch, capsys, "show", "roof", *runs, "--format", "json")
    assert code == 0
    assert '"accuracy": 0.75' in said


def test_a_plan_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    trace = export_field_run(tmp_path)
    header = trace / "trace.json"
    header.write_text(header.read_text().replace('"fedavg"', '"fedbest"'))
    for words in (("check", trace), ("import", trace, "--data-dir", tmp_path / "to")):
        code, said, error = run(monkeypatch, capsys, "trace", *words)
        assert (code, said) == (2, "")
        assert f"{header}: unknown algorithm 'fedbest'" in error


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    trace = export_field_run(tmp_path)
    (trace / "tasks.csv").write_text("round\n")
    code, said, error = run(monkeypatch, capsys, "trace", "check", trace)
    assert (code, said) == (2, "")
    assert error.startswith(f"edge-server: {trace}/tasks.csv:1: the column 'device' is missing")
    assert error.count("\n") == 1
    code, _, error = run(monkeypatch, capsys, "trace", "export", "nobody", "--data-dir", tmp_path / "runs")
    assert code == 2
    assert "no run 'nobody'" in error
