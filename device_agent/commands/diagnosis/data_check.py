"""Check that the examples are readable, in a child process.

The child reads a bounded sample with the trainer's reader and memory limit; its crash is a finding.
"""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251 - our child, whose crash must not end the doctor
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from device_agent.commands.diagnosis.checks import Check
from shared.data.check_result import DataCheck
from shared.data.spec import NONE, Data
from shared.errors import split_remedy
from shared.runtime.interpreter import Interpreter

PATIENCE_S = 300.0
AGENT_PYTHON = Interpreter()
COMPLETE = "complete"
"""Argument of the child for a complete check."""
READER = "device_agent.commands.diagnosis.data_reader"


class ReadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the child: a finding with notes or a complete check, or why the examples cannot be read."""

    finding: str = ""
    check: DataCheck | None = None
    notes: tuple[str, ...] = ()
    refusal: str = ""


def check_examples(
    data: Data,
    memory_mb: int,
    patience_s: float = PATIENCE_S,
    *,
    interpreter: Interpreter = AGENT_PYTHON,
) -> Iterator[Check]:
    """Yield whether a task can use the examples, and what a user should look at.

    Args:
        memory_mb: Memory limit of the trainer in MiB; 0 for the default.
        patience_s: Time limit of reading, in seconds.
    """
    if data.source == NONE:
        yield Check(name="data", state="ok", finding="no examples here: a program of the plan reads its own")
        return
    if data.path and not Path(data.path).exists():
        remedy = "correct `path` of [data] or put the examples there"
        yield Check(name="data", state="bad", finding=f"{data.path} does not exist", remedy=remedy)
        return
    if data.path and not os.access(data.path, os.R_OK):
        remedy = "let the agent's user read it"
        yield Check(name="data", state="bad", finding=f"{data.path} is not readable", remedy=remedy)
        return
    place = data.path or data.source
    try:
        done = run_reader([READER, str(memory_mb << 20)], data, interpreter, patience_s)
    except subprocess.TimeoutExpired:
        finding = f"{place}: could not be read within {patience_s:.0f} s"
        yield Check(name="data", state="warn", finding=finding, remedy="check for a slow disk or network share")
        return
    yield from _parse_outcome(place, done.returncode, done.stdout, done.stderr)


def run_reader(
    arguments: Sequence[str], data: Data, interpreter: Interpreter, patience_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a module of ours that reads the examples.

    Args:
        arguments: Module and its arguments.

    Raises:
        subprocess.TimeoutExpired: It takes longer than `patience_s`.
    """
    return subprocess.run(  # noqa: S603 - our own module
        interpreter.command(*arguments),
        input=msgspec.json.encode(data),
        capture_output=True,
        timeout=patience_s,
        check=False,
        env=interpreter.environment(),
    )


def _parse_outcome(place: str, code: int, printed: bytes, errors: bytes) -> Iterator[Check]:
    try:
        answer = msgspec.json.decode(printed, type=ReadOutcome)
    except msgspec.MsgspecError:
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
        finding = f"{place}: the process that read it ended with {cause} {last[0]}".strip()
        yield Check(name="data", state="bad", finding=finding, remedy="a task would fail the same way; check the files")
        return
    if answer.refusal:
        problem, remedy = split_remedy(answer.refusal)
        yield Check(name="data", state="bad", finding=problem, remedy=remedy)
        return
    yield Check(name="data", state="ok", finding=f"{place}: {answer.finding}")
    for note in answer.notes:
        problem, remedy = split_remedy(note)
        yield Check(name="data", state="warn", finding=problem, remedy=remedy)
