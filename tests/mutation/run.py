"""Mutation tests of transfer and waiting code: list surviving mutants.

    python -m tests.mutation.run [SEED] [--list]

Each mutant runs in a process of its own, in a copy of the checkout, with the tests of its file only, up to the first
that fails. What survives changes nothing that anybody may rely on, or wants a test.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.mutation.mutants import Mutant, chosen, mutants

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120.0
ENGINE = (
    "tests/shared/transfer",
    "tests/test_damaged_inputs.py",
    "tests/device_agent/exchange",
    "tests/edge_server/rounds/split",
    "tests/edge_server/rounds/test_broadcast.py",
    "tests/edge_server/rounds/test_collect_updates.py",
)
GATHER = (
    *(f"tests/edge_server/rounds/test_{name}.py" for name in ("collect_updates", "stragglers", "resume_run", "run")),
    "tests/edge_server/journal/test_disk.py",
)
BARRIER = tuple(
    f"tests/edge_server/rounds/split/test_{name}.py"
    for name in ("device_session", "barrier", "session", "session_races")
)
OUTBOX = (
    *(f"tests/device_agent/exchange/test_{name}.py" for name in ("outbox", "outbox_disk", "upload")),
    "tests/test_damaged_inputs.py",
)
TARGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "shared/transfer/frames.py": (8, ENGINE),
    "shared/transfer/pace.py": (8, ENGINE),
    "shared/transfer/receiver.py": (16, ENGINE),
    "shared/transfer/sender.py": (8, ENGINE),
    "shared/transfer/in_memory.py": (6, ENGINE),
    "shared/transfer/to_file.py": (8, ENGINE),
    "edge_server/rounds/collect_updates.py": (10, GATHER),
    "edge_server/rounds/split/barrier.py": (8, BARRIER),
    "edge_server/rounds/split/device_session.py": (8, BARRIER),
    "device_agent/exchange/outbox.py": (8, OUTBOX),
}
"""How many mutants of which file, and the tests that should notice them."""


def copied(folder: Path) -> None:
    """Copy the project's files, as they are now, into a folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def tested(folder: Path, tests: tuple[str, ...]) -> str:
    """Run tests, a folder or file after the other, until one fails; return what came of it."""
    for one in tests:
        if (folder / one).exists() and (found := _in_child(folder, one)) != "survived":
            return found
    return "survived"


def _in_child(folder: Path, test: str) -> str:
    """Run tests in a child of this process, which has loaded what takes long."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(_pytest(folder, test))
    ends = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < ends:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return {0: "survived", 1: "killed"}.get(os.waitstatus_to_exitcode(status), "killed: no test could run")
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "killed: time is up"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _pytest(folder: Path, test: str) -> int:
    import pytest  # noqa: PLC0415 - in the child, beside what the parent has loaded

    sys.path[:] = [str(folder), *(one for one in sys.path if one not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    try:
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]))
    except BaseException:  # noqa: BLE001 - a child must not go on as its parent
        return 9


def _run(folder: Path, name: str, one: Mutant, tests: tuple[str, ...]) -> str:
    path = folder / name
    whole = path.read_text()
    path.write_text(one.source)
    try:
        return tested(folder, tests)
    finally:
        path.write_text(whole)


def main() -> int:
    """Run all mutants; return 1 where the tests fail without any."""
    seed = int(next((one for one in sys.argv[1:] if one.isdigit()), "1"))
    importlib.import_module("torch")  # once for all children

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copied(folder)
        targets = {name: entry for name, entry in TARGETS.items() if (folder / name).exists()}
        for tests in {entry[1] for entry in targets.values()}:
            if (found := tested(folder, tests)) != "survived":
                sys.stderr.write(f"without any mutant: {found}: {' '.join(tests)}\n")
                return 1
        results: list[tuple[str, str, str]] = []
        for name, (count, tests) in targets.items():
            for one in chosen(mutants((folder / name).read_text()), count, seed):
                results.append((_run(folder, name, one, tests), name, one.name))
                sys.stdout.write("  ".join(results[-1]) + "\n")
                sys.stdout.flush()
    survived = [one for one in results if one[0] == "survived"]
    sys.stdout.write(f"{len(results)} mutants, {len(survived)} survived\n")
    sys.stdout.writelines(f"survived: {name}: {what}\n" for _, name, what in survived)
    return 0


if __name__ == "__main__":
    sys.exit(main())
