"""Run child processes without a shell: board tools and our own modules.

Board tools come from a fixed list; below a recorded board, their recorded output is read instead.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_agent.hardware import files
from shared.errors import NoData
from shared.runtime.clock import monotonic
from shared.runtime.interpreter import Interpreter, find_interpreter

LIVE_ROOT = Path("/")
RECORDED_TOOLS = "tools"
ALLOWED_TOOLS = frozenset({"iw", "nvpmodel", "systemctl", "tegrastats", "vcgencmd"})
MAX_LINE_BYTES = 1 << 16
EXIT_CANNOT_START = 126
SEARCH_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin:/opt/vc/bin"


def run_tool(root: Path, command: Sequence[str], timeout_s: float = 5.0) -> str:
    """Return a tool's output; below another root, the recorded one in `tools/<command, joined by blanks>`.

    Raises:
        NoData: The tool is missing, fails, or does not end in time.
        ValueError: The tool is not in the list: a programming error.
    """
    tool = _locate_tool(command[0], anywhere=root != LIVE_ROOT)
    if root != LIVE_ROOT:
        return _read_recorded(root, command)
    try:
        done = subprocess.run(  # noqa: S603 - a closed list, no shell
            [tool, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NoData(f"{' '.join(command)}: still running after {timeout_s:g} s", lack="busy") from error
    except OSError as error:
        raise NoData(f"{tool}: {error.strerror}", lack="denied") from error
    if done.returncode:
        output = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise NoData(f"{' '.join(command)}: exit code {done.returncode}: {output[:200]}", lack="invalid")
    return done.stdout.decode(errors="replace")


def run_tool_first_line(root: Path, command: Sequence[str], timeout_s: float = 5.0) -> str:
    """Return the first line of a tool that prints continuously, and stop it; otherwise as `run_tool`."""
    tool = _locate_tool(command[0], anywhere=root != LIVE_ROOT)
    if root != LIVE_ROOT:
        return _read_recorded(root, command).lstrip().partition("\n")[0]
    return run_until_newline([tool, *command[1:]], timeout_s)


def run_until_newline(command: list[str], timeout_s: float) -> str:
    """Run a command until its first complete line; raises NoData if it ends or times out before."""
    output, until = b"", monotonic() + timeout_s
    try:
        with subprocess.Popen(  # noqa: S603 - a closed list, no shell
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as process:
            assert process.stdout is not None
            try:
                while b"\n" not in output and select.select([process.stdout], [], [], max(0.0, until - monotonic()))[0]:
                    part = os.read(process.stdout.fileno(), MAX_LINE_BYTES)
                    output += part
                    if not part or len(output) > MAX_LINE_BYTES:
                        raise NoData(f"{' '.join(command)}: no line, {output[:80]!r}", lack="invalid")
            finally:
                process.kill()
    except OSError as error:
        raise NoData(f"{command[0]}: {error.strerror}", lack="denied") from error
    if b"\n" not in output:
        raise NoData(f"{' '.join(command)}: no line within {timeout_s:g} s", lack="busy")
    return output.partition(b"\n")[0].decode(errors="replace")


def _locate_tool(name: str, *, anywhere: bool) -> str:
    """Return the path of a listed tool; only its name where recorded output is read."""
    if name not in ALLOWED_TOOLS:
        raise ValueError(f"{name!r} is not in ALLOWED_TOOLS")
    tool = name if anywhere else shutil.which(name, path=SEARCH_PATH)
    if tool is None:
        raise NoData(f"{name} is not installed")
    return tool


@dataclass(frozen=True)
class ChildExit:
    """Result of a child process: output and exit code, minus the signal number if killed, None after a timeout."""

    exit_code: int | None
    stdout: str
    stderr: str


def run_module(module: str, *arguments: str, timeout_s: float, interpreter: Interpreter | None = None) -> ChildExit:
    """Run a module of this distribution in a child process, which may crash without affecting this one.

    Args:
        timeout_s: Seconds after which it is killed.
        interpreter: Python to use; None for the one that loads what `device-agent setup` installed.
    """
    python = interpreter or find_interpreter()
    return run_command(python.command(module, *arguments), timeout_s=timeout_s, environment=python.environment())


def run_command(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> ChildExit:
    """Run a command of this program or of the operator, without a shell.

    Args:
        timeout_s: Seconds after which it is killed.
        environment: Variables of the process; None to inherit them.
    """
    try:
        done = subprocess.run(  # noqa: S603 - no shell, no foreign input
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ChildExit(None, "", "")
    except OSError as error:
        return ChildExit(EXIT_CANNOT_START, "", f"{command[0]}: {error.strerror}")
    return ChildExit(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _read_recorded(root: Path, command: Sequence[str]) -> str:
    name = " ".join(command).replace("/", "_")
    try:
        return files.read_bounded(root / RECORDED_TOOLS / name)
    except NoData as error:
        if error.lack != "not_present":
            raise
        raise NoData(f"no recorded output of {name!r}") from error
