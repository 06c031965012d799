"""One line an event, to standard error, set up once a process."""

from __future__ import annotations

import logging
import os
import re
import time

import pytest

from shared.runtime import logs, processes
from tests.naming import names_all


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


@pytest.fixture
def _in_a_service(capfd, monkeypatch):
    """Standard error as systemd hands it over: the variable names the very file."""
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")


@pytest.mark.usefixtures("_in_a_service")
def test_the_journal_adds_its_own_time_and_is_told_the_level(capfd):
    processes.configure("DEBUG")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logging.getLogger("x").log(level, "seen")
    told = ["<7>DEBUG x seen", "<6>INFO x seen", "<4>WARNING x seen", "<3>ERROR x seen", "<2>CRITICAL x seen"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if " x " in line] == told  # a loop of another test may say its last word here


@pytest.mark.usefixtures("_in_a_service")
def test_the_journal_is_told_the_level_of_each_line_of_a_traceback(capfd):
    processes.configure("info")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("x").exception("broke")
    lines = capfd.readouterr().err.splitlines()
    first = lines.index("<3>ERROR x broke")
    last = lines.index("<3>ZeroDivisionError: division by zero")
    assert last > first + 1
    assert all(line.startswith("<3>") for line in lines[first:last])


@pytest.mark.usefixtures("_in_a_service")
def test_a_file_that_a_service_gives_its_child_is_not_the_journal(capfd, monkeypatch):
    """As of the agents of a trial, each of which has a log of its own."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    processes.configure("info")
    logging.getLogger("x").info("seen")
    assert re.fullmatch(r"20\S+Z INFO x seen\n", capfd.readouterr().err)


@pytest.mark.usefixtures("_in_a_service")
def test_configuring_twice_does_not_say_everything_twice(capfd):
    processes.configure("info")
    processes.configure("info")
    logging.getLogger("x").info("once")
    assert capfd.readouterr().err == "<6>INFO x once\n"


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        processes.configure("loud")


@pytest.mark.usefixtures("_in_a_service")
def test_a_warning_that_is_said_without_end_is_counted(capfd, monkeypatch):
    """As when an agent is sent garbage, or its disk is full: a few lines, and later how many there were."""
    processes.configure("info")
    now = [0.0]
    monkeypatch.setattr(logging.getLogger().handlers[0].filters[0], "clock", lambda: now[0])
    for number in range(1000):
        if number == 999:
            now[0] = 60.0
        logging.getLogger("x").warning("dropped: %d bytes", number)
        logging.getLogger("x").info("round")
    lines = capfd.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("<4>WARNING")]
    assert len(told) == int(logs.BURST) + 1
    assert told[-1].startswith("<4>WARNING x dropped: 999 bytes")
    assert names_all(told[-1], 999 - int(logs.BURST))
    assert lines.count("<6>INFO x round") == 1000
