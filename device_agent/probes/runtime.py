"""Runtime probe: kernel, library versions, and smoke tests of torch and ONNX Runtime.

`read` is cheap and runs often. `smoke_test` imports a library in a child process, which takes seconds and hundreds of
megabytes; it runs once per version and board, and `load_verdicts` returns the stored results.
"""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from device_agent.hardware.files import read_text, read_text_or
from device_agent.hardware.library_smoke_test import EXIT_MEMORY, EXIT_MISSING
from device_agent.hardware.tools import LIVE_ROOT, run_command
from device_agent.probes.base import ProbeResult
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.runtime.distributions import installed_version
from shared.runtime.durable import replace_file
from shared.runtime.interpreter import Interpreter, find_interpreter

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}
"""Distributions that provide each library."""

FACT_FILES: Mapping[str, str] = {"kernel": "proc/sys/kernel/osrelease", "model": "proc/device-tree/model"}
L4T_FILE = "etc/nv_tegra_release"
CACHE_NAME = "runtime.json"
LASTING_STATES = ("usable", "sigill", "broken")
"""States worth storing; a lack of memory or time may be gone at the next try."""

LibraryState: TypeAlias = Literal["usable", "missing", "sigill", "out_of_memory", "timeout", "broken"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a library's smoke test.

    Attributes:
        version: Version of the library; empty if unknown.
        board: Profile id of the tested board, since an SD card may move to another one.
        lack: Hardware that the library was built for and cannot use, such as a GPU; else empty.
    """

    library: str
    state: LibraryState
    version: str = ""
    board: str = ""
    finding: str = ""
    lack: str = ""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read the facts `kernel`, `model`, `l4t`, and on a live board the versions of `torch` and `onnxruntime`.

    Nothing is imported; an installed library need not work.
    """
    facts: dict[str, str] = {}
    for name, file in FACT_FILES.items():
        with contextlib.suppress(NoData):
            facts[name] = read_text(root / file)
    with contextlib.suppress(NoData):
        facts["l4t"] = parse_l4t(read_text(root / L4T_FILE))
    if root == LIVE_ROOT:
        facts |= {library: number for library in PACKAGES if (number := find_version(library))}
    if not facts:
        raise NoData(f"{root}: neither {' nor '.join([*FACT_FILES.values(), L4T_FILE])}")
    return ProbeResult(facts=facts)


def parse_l4t(release: str) -> str:
    """Parse `36.4.0` from `# R36 (release), REVISION: 4.0, GCID: ...`; raises NoData."""
    match = re.match(r"# R(\d{1,4}) \(release\), REVISION: ([\d.]{1,20})", release, re.ASCII)
    if match is None:
        raise NoData(f"{release[:60]!r} is not an L4T release", lack="invalid")
    return f"{match[1]}.{match[2]}"


def find_version(library: str) -> str:
    """Return the version of an installed library without importing it; empty if not installed."""
    return installed_version(*PACKAGES[library])


def find_missing_isa(root: Path, library: str, profile: Profile) -> str:
    """Return the instruction set that a library needs (by the profile) and this CPU lacks; empty for none."""
    token = profile.cpu.isa.get(library, "")
    lines = re.findall(r"^(?:Features|flags)\s*:(.*)$", read_text_or(root / "proc/cpuinfo"), re.MULTILINE)
    return token if token and lines and not all(token in line.split() for line in lines) else ""


def smoke_test(
    library: str,
    timeout_s: float = 180.0,
    *,
    board: str = "",
    interpreter: Interpreter | None = None,
    device: str = "cpu",
) -> Verdict:
    """Run a library's smoke test in a child process.

    Args:
        timeout_s: Seconds after which the child is killed.
        interpreter: Python that imports the library; None for the one that `setup` installed into.
    """
    module = "device_agent.hardware.library_smoke_test"
    python = interpreter or find_interpreter()
    with tempfile.TemporaryDirectory() as scratch:  # torch 2.10 creates a folder for its compiler cache
        environment = python.environment({"TORCHINDUCTOR_CACHE_DIR": scratch})
        completed = run_command(python.command(module, library, device), timeout_s, environment)
    state, finding = _classify_exit(completed.exit_code, completed.stderr, timeout_s)
    report = _parse_result(completed.stdout) if state == "usable" else _SmokeTestReport()
    number = report.version or find_version(library)
    return Verdict(
        library=library, state=state, version=number, board=board, finding=report.done or finding, lack=report.lack
    )


class _SmokeTestReport(msgspec.Struct, frozen=True, kw_only=True):
    """JSON line that a smoke test prints."""

    version: str = ""
    done: str = ""
    lack: str = ""


def _parse_result(output: str) -> _SmokeTestReport:
    try:
        return msgspec.json.decode((output.strip().splitlines() or [""])[-1], type=_SmokeTestReport)
    except msgspec.MsgspecError:
        return _SmokeTestReport()


def _classify_exit(code: int | None, stderr: str, timeout_s: float) -> tuple[LibraryState, str]:
    """Derive state and finding from a child's exit code and the last line of its standard error."""
    outcomes: dict[int | None, tuple[LibraryState, str]] = {
        0: ("usable", "imports and computes"),
        None: ("timeout", f"no end after {timeout_s:g} s"),
        EXIT_MISSING: ("missing", "not installed"),
        EXIT_MEMORY: ("out_of_memory", "runs out of memory"),
        -signal.SIGKILL: ("out_of_memory", "runs out of memory, or was killed by hand"),
        -signal.SIGILL: ("sigill", "dies of an instruction that this CPU does not have (SIGILL)"),
    }
    if code in outcomes:
        return outcomes[code]
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")[:200]
    if code is not None and code < 0:
        return "broken", f"dies of signal {-code} ({signal.strsignal(-code)}): {last}"
    return "broken", f"ends with exit code {code}: {last}"


def load_verdicts(state_dir: Path, board: str) -> dict[str, Verdict]:
    """Load the stored verdicts, by library, that apply to the installed versions on this board."""
    return {
        library: verdict
        for library, verdict in read_verdicts(state_dir).items()
        if library in PACKAGES
        and verdict.version
        and verdict.version == find_version(library)
        and verdict.board == board
    }


def store_verdict(state_dir: Path, verdict: Verdict) -> None:
    """Store a lasting verdict; if the disk refuses, the next start tests again."""
    if verdict.state not in LASTING_STATES:
        return
    verdicts = read_verdicts(state_dir) | {verdict.library: verdict}
    with contextlib.suppress(OSError):
        replace_file(state_dir / CACHE_NAME, msgspec.json.encode(verdicts), durable=False)


def read_verdicts(state_dir: Path) -> dict[str, Verdict]:
    """Read all stored verdicts by library, for any version and board."""
    try:
        return msgspec.json.decode((state_dir / CACHE_NAME).read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.MsgspecError):
        return {}


def verdict_facts(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Format verdicts as facts of a report: the version, with the state unless usable, as in `2.10.0 sigill`."""
    return {
        library: verdict.version if verdict.state == "usable" else f"{verdict.version} {verdict.state}".strip()
        for library, verdict in verdicts.items()
    }
