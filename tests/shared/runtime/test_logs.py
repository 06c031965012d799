"""One line an event, to standard error, set up once a process."""

from __future__ import annotations

import logging
import re
import time

import pytest

from shared.runtime import logs, processes


@pytest.fixture(autouse=True)
def _as_before():
    """Give pytest its own handlers back."""
    root, mqtt = logging.getLogger(), logging.getLogger("mqtt")
    handlers, level, mqtt_level = root.handlers[:], root.level, mqtt.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    mqtt.setLevel(mqtt_level)


def test_level_logger_and_time_in_utc(capsys, monkeypatch):
    """The stamp is calendar time in UTC with milliseconds, whatever the machine's zone is; nothing goes to stdout."""
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    processes.configure("info")
    logging.getLogger("device_agent.agent").info("trained round=%d", 3)
    logging.getLogger("device_agent.agent").debug("not this")
    out, error = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO device_agent\.agent trained round=3\n", error)


@pytest.fixture
def _in_tokyo(monkeypatch):
    """Run where it is nine hours later."""
    with monkeypatch.context() as there:
        there.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_in_tokyo")
def test_the_stamp_is_utc(capsys, monkeypatch):
    """A moment that is known: 1 000 000 000 s after 1970 is 01:46:40 in Greenwich, wherever the board is."""
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    processes.configure("warning")
    record = logging.LogRecord("x", logging.WARNING, "", 0, "m", None, None)
    record.created, record.msecs = 1_000_000_000.25, 250
    logging.getLogger().handle(record)
    assert time.localtime(0).tm_hour == 9  # noqa: TID251 - tells the zone
    assert capsys.readouterr().err == "2001-09-09T01:46:40.250Z WARNING x m\n"


def test_the_journal_adds_its_own_time(capsys, monkeypatch):
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    processes.configure("DEBUG")
    logging.getLogger("x").debug("seen")
    assert capsys.readouterr().err == "DEBUG x seen\n"


def test_configuring_twice_does_not_say_everything_twice(capsys, monkeypatch):
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    processes.configure("info")
    processes.configure("info")
    logging.getLogger("x").info("once")
    assert capsys.readouterr().err == "INFO x once\n"


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        processes.configure("loud")


def test_a_warning_that_is_said_without_end_is_counted(capsys, monkeypatch):
    """As when an agent is sent garbage, or its disk is full: a few lines, and later how many there were."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    processes.configure("info")
    now = [0.0]
    monkeypatch.setattr(logging.getLogger().handlers[0].filters[0], "_clock", lambda: now[0])
    for number in range(1000):
        if number == 999:
            now[0] = 60.0
        logging.getLogger("x").warning("dropped: %d bytes", number)
        logging.getLogger("x").info("round")
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("WARNING")]
    assert len(told) == int(logs.BURST) + 1
    assert told[-1] == f"WARNING x dropped: 999 bytes (and {999 - int(logs.BURST)} more like it, not told)"
    assert lines.count("INFO x round") == 1000
