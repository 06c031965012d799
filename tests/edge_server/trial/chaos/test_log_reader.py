"""Phase lines are read from logs that are still being written."""

from __future__ import annotations

import logging

import pytest

from edge_server.trial.chaos.log_reader import BEGINNING, LogLine, Logs, parse
from edge_server.trial.local import SERVER
from shared.runtime import processes as log
from shared.runtime.phases import log_phase

STAMP = "2026-01-02T03:04:05.678Z"


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        (
            SERVER,
            "edge_server.rounds.round phase waiting run=a-1 round=2",
            ("server", "waiting", {"run": "a-1", "round": "2"}),
        ),
        ("pi", "device_agent.agent phase fetching", ("agent", "fetching", {})),
        ("pi", "trainer phase importing pid=12", ("trainer", "importing", {"pid": "12"})),
        (
            "pi",
            "device_agent.agent phase delivering run=a round=1",
            ("agent", "delivering", {"run": "a", "round": "1"}),
        ),
        ("pi", "trainer phase committed", ("trainer", "committed", {})),
        (SERVER, "edge_server.rounds.round phase server-training run=a", ("server", "server-training", {"run": "a"})),
    ],
)
def test_a_line_about_a_phase(name, line, expected):
    by, phase, facts = expected
    assert parse(name, f"{STAMP} DEBUG {line}") == LogLine(by, name, phase, facts)


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"{STAMP} INFO device_agent.agent trained run=a round=1 seconds=0.5",
        f"{STAMP} WARNING edge_server.rounds.round phase waiting",
        f"{STAMP} DEBUG edge_server.rounds.round the phase waiting",
        f"{STAMP} DEBUG edge_server.rounds.round phase of the moon",
    ],
)
def test_a_line_about_something_else(line):
    assert parse(SERVER, line) is None


def test_a_line_is_what_our_logs_write(capsys):
    """So that a change of the format is noticed here."""
    root, mqtt = logging.getLogger(), logging.getLogger("mqtt")
    before = root.handlers[:], root.level, mqtt.level
    try:
        log.configure("debug")
        log_phase(logging.getLogger("trainer"), "training", run="a", round=3)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        mqtt.setLevel(before[2])
    written = capsys.readouterr().err.rstrip("\n")
    assert parse("pi", written) == LogLine("trainer", "pi", "training", {"run": "a", "round": "3"})


def test_news_are_whole_lines_told_once(tmp_path):
    """A log that is not there yet, one that ends in the middle of a line, lines of two writers in one file."""
    logs = Logs(tmp_path, ["pi"])
    logs.began("agent", "pi")
    assert logs.news() == []
    assert logs.phases["agent", "pi"] == BEGINNING
    with (tmp_path / "pi.log").open("ab", buffering=0) as file:
        file.write(f"{STAMP} DEBUG device_agent.agent phase fetching\n{STAMP} DEBUG trainer phase impor".encode())
        assert [said.phase for said in logs.news()] == ["fetching"]
        assert logs.news() == []
        file.write(b"ting pid=31\n\xff\xfe no text\n")
        assert [(said.by, said.phase) for said in logs.news()] == [("trainer", "importing")]
    assert logs.phases == {("agent", "pi"): "fetching", ("trainer", "pi"): "importing"}
    assert logs.pids == {"pi": 31}
    assert [said.phase for said in logs.said] == ["fetching", "importing"]
