"""One line of a tool that would go on for ever, with real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from device_agent.hardware.tools import run_tool_first_line, run_until_newline
from shared.errors import NoData
from tests.naming import naming


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_the_first_line_is_taken_and_the_process_is_gone(tmp_path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}; while :; do echo VDD_IN 5000/5000; sleep 0.05; done"
    assert run_until_newline(shell(script), 10.0) == "VDD_IN 5000/5000"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_line_in_pieces_is_waited_for() -> None:
    assert run_until_newline(shell("printf 'VDD_'; sleep 0.2; echo 'IN 1/1'; exec sleep 60"), 10.0) == "VDD_IN 1/1"


def test_silence_is_busy_and_ends_in_time() -> None:
    """Even of a tool that does not end when it is asked to."""
    began = time.monotonic()
    with pytest.raises(NoData, match=naming("0.2 s")) as caught:
        run_until_newline(shell("trap '' TERM; exec sleep 600"), 0.2)
    assert caught.value.lack == "busy"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("script", ["exit 1", "printf half"])
def test_a_tool_that_ends_without_a_line_is_invalid(script) -> None:
    with pytest.raises(NoData) as caught:
        run_until_newline(shell(script), 10.0)
    assert caught.value.lack == "invalid"


def test_a_line_without_end_is_cut_off() -> None:
    with pytest.raises(NoData) as caught:
        run_until_newline(shell("exec cat /dev/zero"), 10.0)
    assert caught.value.lack == "invalid"


def test_only_tools_on_the_list_are_started() -> None:
    for root in ("/", "/nowhere"):
        with pytest.raises(ValueError, match=naming("'sh'")):
            run_tool_first_line(Path(root), ["sh", "-c", "true"])
