"""`edge-server report`: the files it writes, and what it says where it cannot."""

from __future__ import annotations

import csv
import io
import json

import msgspec
import pytest

from edge_server.__main__ import build_parser, main
from edge_server.cli import report as command
from edge_server.journal.checkpoints import SqliteStore
from edge_server.replay.run import replay_plan
from edge_server.report.csv_export import csv_text
from edge_server.report.digest import Digest
from edge_server.report.summarise import digest_run
from shared.errors import ConfigError
from tests.edge_server.report.journals import begin, closed, opened, parsed, small
from tests.edge_server.textbook import make_plan
from tests.naming import names_all, naming


@pytest.fixture
def runs(tmp_path):
    """A folder with a run `run` and a run `other`."""
    for name in ("run", "other"):
        store = SqliteStore(tmp_path / "runs" / name, durable=False)
        store.extend(small(run=name))
        store.close()
    return tmp_path / "runs"


@pytest.fixture
def report(runs, monkeypatch):
    """Gives the command; returns its exit code."""
    monkeypatch.chdir(runs.parent)

    def give(*words) -> int:
        options = build_parser().parse_args(["report", "--data-dir", str(runs), *map(str, words)])
        return command.report(options)

    return give


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_page_is_what_one_gets_unasked(report, runs, capsys):
    """It lies beside the first run; in the current folder, perhaps a clone's, it was one more file not to commit."""
    assert report("run", "other") == 0
    written = runs / "run" / "report.html"
    assert names_all(capsys.readouterr().out, written)
    page = parsed(written.read_text())
    assert names_all(page.all("h1")[0].text, 2)
    assert [path.name for path in runs.parent.iterdir()] == ["runs"]
    assert [path.name for path in written.parent.glob("*report*")] == ["report.html"], "nothing half written is left"


@pytest.mark.parametrize(("name", "begins"), [("x.csv", "run,round,"), ("x.JSON", "{"), ("x.html", "<!doctype html>")])
def test_a_files_name_says_what_goes_into_it(report, tmp_path, name, begins):
    assert report("run", "--out", tmp_path / name) == 0
    assert (tmp_path / name).read_text().startswith(begins)


def test_json_is_the_digest_and_what_each_run_took(report, capsys):
    """Whoever reads it gets the very values that the page was made of."""
    assert report("run", "--format", "json", "--target", "0.5", "--target", "0.9") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == 1
    assert msgspec.convert(said["runs"], list[Digest]) == [digest_run(small())]
    assert [(one["target"], one["round"], one["seconds"]["value"]) for one in said["targets"]] == [
        *((0.5, 2, 8.0), (0.9, None, None)),
    ]


def test_csv_has_a_figure_a_line(report, capsys):
    assert report("run", "--format", "csv", "--target", "0.5") == 0
    found = {(line["round"], line["device"], line["figure"]): line for line in read(capsys.readouterr().out)}
    assert found["1", "", "accuracy"]["value"] == "0.4"
    assert found["2", "b", "joules.compute"] | {"run": ""} == {
        "run": "",
        "round": "2",
        "device": "b",
        "figure": "joules.compute",
        "value": "12.0",
        "unit": "J",
        "whole": "yes",
        "quality": "",
        "clock": "",
    }
    assert found["1", "b", "arrival"]["value"] == "late"
    assert found["1", "b", "bytes_up"] == found["1", "b", "bytes_up"] | {"value": "", "whole": "no", "unit": "B"}
    assert found["", "a", "seconds.waiting"]["clock"] == "virtual"
    assert found["2", "a", "told.keep"]["value"] == "0.25"
    assert found["2", "", "bytes.until"] == found["2", "", "bytes.until"] | {"value": "7000", "whole": "no"}
    assert found["", "", "seconds.to_0.5"]["value"] == "8.0"


def test_no_spreadsheet_computes_what_a_device_wrote():
    records = [begin(1), opened(1, ["a"]), closed(1, [], failed={"a": '=HYPERLINK("http://x.test")'})]
    [line] = [
        line for line in read("".join(csv_text([digest_run(records)]))) if line["figure"] == "cause" and line["device"]
    ]
    assert line["value"].startswith("'=")


def test_negative_figures_stay_figures():
    """A number is no formula, though it begins with a minus."""
    records = [begin(1), closed(1, [], test_loss=-0.5)]
    [line] = [line for line in read("".join(csv_text([digest_run(records)]))) if line["figure"] == "test_loss"]
    assert line["value"] == "-0.5"


def test_runs_of_one_name_are_told_apart(report, runs, capsys):
    """A copy of a run, by its path; the same run given twice is one."""
    copy = runs.parent / "copy"
    copy.mkdir()
    store = SqliteStore(copy / "run", durable=False)
    store.extend(small())
    store.close()
    assert report("run", copy / "run", "run", "--format", "json") == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)["runs"]] == ["run", "run (2)"]


def test_what_cannot_be_done_is_said(report, tmp_path):
    with pytest.raises(ConfigError, match=naming("none")):
        report("none")
    with pytest.raises(ConfigError, match=naming("--out", tmp_path / "no" / "x.html")):
        report("run", "--out", tmp_path / "no" / "x.html")
    with pytest.raises(ConfigError, match=naming("--out", tmp_path)):
        report("run", "--out", tmp_path)


def test_an_older_report_stays_where_a_new_one_cannot_be_written(tmp_path):
    """Half a page in its place would be worse than none."""
    (tmp_path / "x.html").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        command.write(tmp_path / "x.html", "new \ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.html", "old")]


@pytest.mark.parametrize("target", ["nan", "much"])
def test_a_target_is_a_number(report, target, capsys):
    with pytest.raises(SystemExit):
        report("run", "--target", target)
    assert names_all(capsys.readouterr().err, "--target", repr(target))


@pytest.mark.parametrize("target", ["0", "1.5"])
def test_a_target_of_an_accuracy_is_a_share(report, target):
    with pytest.raises(ConfigError) as refused:
        report("run", "--target", target)
    assert names_all(refused.value, "--target", target)


def test_a_replay_has_a_report(tmp_path, monkeypatch, capsys):
    """From a plan to a page, by the real server, the real agents and the real command line."""
    replay_plan(make_plan(tmp_path, rounds=2), tmp_path / "runs" / "one")
    out = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["edge-server", "report", str(tmp_path / "runs" / "one"), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    page = parsed(out.read_text())
    points = [len(one.all("path", "point")) for one in page.all("div", "metric")]
    assert points == [3 * 2] * 3, "three figures over three axes, two rounds each"
    assert "virtual" in page.words()
