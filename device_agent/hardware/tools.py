"""A board's own command-line tools: a closed list, run without a shell, or read from a recorded folder.

The only place that runs commands.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from device_agent.hardware import recorded
from shared.errors import NoData
from shared.runtime.clock import monotonic

LIVE = Path("/")
RECORDED = "tools"
TOOLS = frozenset({"iw", "nvpmodel", "tegrastats", "vcgencmd"})
MAX_LINE_BYTES = 1 << 16
EXIT_CANNOT_START = 126
PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin:/opt/vc/bin"


def output(root: Path, *command: str, timeout_s: float = 5.0) -> str:
    """Return what a tool prints; below another root, what was recorded in `tools/<command, words joined by blanks>`.

    Raises:
        NoData: There is no such tool here, it fails, or it does not end in time.
        ValueError: The tool is not on the list: a fault of ours.
    """
    tool = _installed(command[0], anywhere=root != LIVE)
    if root != LIVE:
        return _recorded(root, command)
    try:
        done = subprocess.run(  # noqa: S603 - a closed list, no shell
            [tool, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NoData(f"{' '.join(command)}: no end after {timeout_s:g} s", lack="busy") from error
    except OSError as error:
        raise NoData(f"{tool}: {error.strerror}", lack="denied") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise NoData(f"{' '.join(command)}: exit code {done.returncode}: {said[:200]}", lack="invalid")
    return done.stdout.decode(errors="replace")


def first_line(root: Path, *command: str, timeout_s: float = 5.0) -> str:
    """Return the first line of a tool that prints on and on, and end it; else as `output`."""
    tool = _installed(command[0], anywhere=root != LIVE)
    if root != LIVE:
        return _recorded(root, command).lstrip().partition("\n")[0]
    return until_newline([tool, *command[1:]], timeout_s)


def until_newline(command: list[str], timeout_s: float) -> str:
    """Run a command until its first whole line; raises NoData where it ends, or time does, before one came."""
    said, until = b"", monotonic() + timeout_s
    try:
        with subprocess.Popen(  # noqa: S603 - a closed list, no shell
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as process:
            assert process.stdout is not None
            try:
                while b"\n" not in said and select.select([process.stdout], [], [], max(0.0, until - monotonic()))[0]:
                    part = os.read(process.stdout.fileno(), MAX_LINE_BYTES)
                    said += part
                    if not part or len(said) > MAX_LINE_BYTES:
                        raise NoData(f"{' '.join(command)}: no line, {said[:80]!r}", lack="invalid")
            finally:
                process.kill()
    except OSError as error:
        raise NoData(f"{command[0]}: {error.strerror}", lack="denied") from error
    if b"\n" not in said:
        raise NoData(f"{' '.join(command)}: no line within {timeout_s:g} s", lack="busy")
    return said.partition(b"\n")[0].decode(errors="replace")


def _installed(name: str, *, anywhere: bool) -> str:
    """Return the path of a tool on the list; its name alone where it runs nowhere, but was recorded."""
    if name not in TOOLS:
        raise ValueError(f"{name!r} is not one of the tools we run")
    tool = name if anywhere else shutil.which(name, path=PATH)
    if tool is None:
        raise NoData(f"{name} is not installed")
    return tool


@dataclass(frozen=True)
class Ended:
    """How a child process ended: `code` is its exit code, minus the signal that killed it, None out of time."""

    code: int | None
    printed: str
    said: str


def python(module: str, *arguments: str, timeout_s: float) -> Ended:
    """Run a module of ours in an interpreter of its own, which may die without taking this process along."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, no shell
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, "", "")
    except OSError as error:
        return Ended(EXIT_CANNOT_START, "", f"{sys.executable}: {error.strerror}")
    return Ended(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _recorded(root: Path, command: tuple[str, ...]) -> str:
    name = " ".join(command).replace("/", "_")
    path = root / RECORDED / name
    try:
        content = path.read_text(errors="replace")
    except OSError as error:
        raise NoData(f"no recorded output of {name!r}") from error
    return recorded.checked(content, path)
