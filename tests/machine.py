"""Machine facilities for tests: failing files, small disk, terminal, mosquitto.

And recorded data beside the checkout, read where it lies; tests that need it are skipped where it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import getpass
import os
import pty
import re
import shutil
import socket
import struct
import subprocess  # noqa: TID251 - mounts
import sys
import tempfile
import termios
import threading
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from device_agent.profile.schema import Profile
from edge_server.fleet import broker
from edge_server.fleet.broker import PrivateBroker
from shared.runtime.processes import terminate
from shared.runtime.text_table import display_width

NOBODY = 65534
ELLIPSES = re.compile("\N{HORIZONTAL ELLIPSIS}|[.]{3}")
PORTS, EACH = (20_000, 32_000), 100
FOLDED = 14
"""What is longer may be folded to two lines; a figure of a table is not."""


RECORDED = Path(os.environ.get("FIELDFLEET_SHARED") or Path(__file__).resolve().parents[2] / "shared")
needs_mosquitto = pytest.mark.skipif(broker.find_mosquitto() is None, reason="mosquitto is not installed")


def shared(*parts: str) -> Path:
    """Return a file or folder of the recorded data; skips the test where there is none."""
    path = RECORDED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no recorded data at {path}: name its folder in FIELDFLEET_SHARED")
    return path


def grow(root: Path, files: Mapping[str, object]) -> Path:
    """Write the files below the root and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if content != "" else "")
    return root


def profile(**tables: object) -> Profile:
    """Return a profile that says no more than a test needs."""
    return Profile(schema=1, id="board", name="Board", **tables)  # type: ignore[arg-type]


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Make a file that answers EAGAIN: a pipe that is held open and into which nobody writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(holder)


@contextmanager
def open_to_all() -> Iterator[Path]:
    """Give a folder that every user may enter; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block as a user without rights; root may read files of mode 0."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@dataclass(frozen=True)
class Disk:
    """Where it is mounted."""

    path: Path

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all its room, but for a few pages."""
        self.make_room()
        room = self.free_bytes - leave_bytes
        with (self.path / "fill").open("wb", buffering=0) as file, suppress(OSError):
            while room > 0:
                room -= file.write(bytes(min(room, 1 << 20)))

    def make_room(self) -> None:
        (self.path / "fill").unlink(missing_ok=True)

    def read_only(self, *, yes: bool) -> None:
        _call("mount", "-o", f"remount,{'ro' if yes else 'rw'}", self.path)


@contextmanager
def mounted(path: Path, size_mb: int = 4) -> Iterator[Disk]:
    """Mount a disk in memory while the block lasts; skip the test where that is not allowed."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    try:
        _call("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", path)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no disk in memory can be mounted here: {error}")
    try:
        yield Disk(path)
    finally:
        _call("umount", "--lazy", path)


def _call(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)  # noqa: S603 - ours


STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(command: Callable[[], object], columns: int, lines: int = 50) -> list[str]:
    """Run something with a terminal as standard output; return the lines that it shows, without colours."""
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminals here ({error}): mount -t devpts devpts /dev/pts")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    seen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, seen))
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            patch.setattr(sys, "stdout", stream)
            command()
    reader.join()
    os.close(ours)
    return shown(b"".join(seen))


def shown(data: bytes) -> list[str]:
    """Return the lines of what a terminal was sent, without colours."""
    return STYLES.sub("", data.decode()).replace("\r\n", "\n").splitlines()


def require_whole(seen: list[str], whole: list[str], columns: int) -> None:
    """Check that lines fit a terminal and have every figure of the lines that have room."""
    paths = [line for line in seen if line.startswith(("record: ", "page: ", "next: "))]  # to be copied as one
    assert [line for line in seen if display_width(line) > columns and line not in paths] == []
    assert not ELLIPSES.search("\n".join(seen))
    words = {word for line in seen for word in line.split()}
    figures = {word for line in whole for word in line.split() if any(map(str.isdigit, word)) and len(word) <= FOLDED}
    assert figures - words == set(), figures - words


def _read(descriptor: int, seen: list[bytes]) -> None:
    """Read until nobody has the terminal open any more."""
    while True:
        try:
            seen.append(os.read(descriptor, 1 << 16))
        except OSError:
            return


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on, nor any other test of this machine is given for long.

    It is below those that the kernel gives to whoever asks for any, so that nobody else has it by the time it is used,
    nor between a broker's death and the start of the next one on it.
    """
    while True:
        port = next(_own_ports())
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@cache
def _own_ports() -> Iterator[int]:
    """Return ports that are this process's until it ends, one after the other, and from the first on again."""
    kept = socket.socket(socket.AF_UNIX)
    for first in SystemRandom().sample(range(*PORTS, EACH), k=(PORTS[1] - PORTS[0]) // EACH):
        with suppress(OSError):
            kept.bind(f"\0fieldfleet-test-ports-{first}")  # a name in the kernel, which others cannot have meanwhile
            return (first + number % EACH for number in count() if kept)
    raise OSError("every port for tests is taken by other processes")


@asynccontextmanager
async def configured(folder: Path, *lines: str, port: int = 0) -> AsyncIterator[PrivateBroker]:
    """Run it on loopback while the block lasts, with these lines of configuration besides the necessary ones."""
    program = broker.find_mosquitto()
    if not program:
        pytest.skip("mosquitto is not installed")
    port = port or free_port()
    settings = folder / "own.conf"
    # Started by root, it would become another user, who may not read this folder.
    own = [f"listener {port} 127.0.0.1", "persistence false", f"user {getpass.getuser()}"]
    settings.write_text("\n".join([*own, *lines, ""]))
    with (folder / "own.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            program, "-c", str(settings), stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        await broker.wait_until_listening(process, port, folder / "own.log")
        yield PrivateBroker(port, "mosquitto", process)
    finally:
        await terminate(process)


def command(module: Any, *arguments: object) -> int:
    """Run a command of the agent in this process; return its exit code."""
    parser = argparse.ArgumentParser()
    module.add(parser)
    code: int = module.run(parser.parse_args(list(map(str, arguments))))
    return code


def find_pythons(version: str) -> list[Path]:
    """List the interpreters of a version, such as 3.12: of pyenv, then of the PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = shutil.which(f"python{version}")
    own = [Path(named)] if named and "shims" not in named else []
    return [path.resolve() for path in (*sorted(pyenv.glob(f"{version}.*/bin/python{version}")), *own)]
