"""`edge-server trace` as it is typed: what it says, and what its exit code is."""

from __future__ import annotations

from tests.edge_server.processes import captured
from tests.edge_server.replay.trace.test_round_trip import export_field_run, texts
from tests.naming import names_all

ROWS = {"tasks": 8, "steps": 1, "rounds": 2, "decisions": 5, "readings": 5, "facts": 2, "availability": 7}
SUMMARY = ("field-1", "fedavg", 3, "finished", *(f"{table} {count}" for table, count in ROWS.items()))


def test_export_check_and_import_say_what_they_found(tmp_path):
    whole = texts(export_field_run(tmp_path))
    runs = ("--data-dir", tmp_path / "runs")
    out = tmp_path / "out"
    code, said, _ = captured("trace", "export", "field-1", *runs, "--out", out, "--data-root", tmp_path)
    assert code == 0
    assert names_all(said, *SUMMARY, out)
    assert texts(out) == whole
    code, said, error = captured("trace", "check", out)
    assert (code, error) == (0, "")
    assert names_all(said, *SUMMARY)
    code, said, _ = captured("trace", "import", out, "--as", "roof", *runs)
    assert code == 0
    assert names_all(said, tmp_path / "runs" / "roof")
    code, said, _ = captured("show", "roof", *runs, "--format", "json")
    assert code == 0
    assert '"accuracy": 0.75' in said


def test_a_plan_that_cannot_be_used(tmp_path):
    trace = export_field_run(tmp_path)
    header = trace / "trace.json"
    header.write_text(header.read_text().replace('"fedavg"', '"fedbest"'))
    for words in (("check", trace), ("import", trace, "--data-dir", tmp_path / "to")):
        code, said, error = captured("trace", *words)
        assert (code, said) == (2, "")
        assert names_all(error, header, "fedbest")


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    trace = export_field_run(tmp_path)
    (trace / "tasks.csv").write_text("round\n")
    code, said, error = captured("trace", "check", trace)
    assert (code, said) == (2, "")
    assert names_all(error, f"{trace}/tasks.csv:1", "device")
    assert error.count("\n") == 1
    code, _, error = captured("trace", "export", "nobody", "--data-dir", tmp_path / "runs")
    assert code == 2
    assert names_all(error, "nobody", tmp_path / "runs")
