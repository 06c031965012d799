"""Runtime probe: kernel, versions, and whether torch and ONNX Runtime pass a smoke test in a child process.

`read` only looks; it is asked again and again. `smoke_test` tries, which takes seconds and hundreds of megabytes, and
`load_verdicts` returns what it found: once a version and board is enough.
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

from device_agent.hardware.files import read_text
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
"""Libraries, and the packages that bring them."""

FACT_FILES: Mapping[str, str] = {"kernel": "proc/sys/kernel/osrelease", "model": "proc/device-tree/model"}
L4T_FILE = "etc/nv_tegra_release"
CACHE_NAME = "runtime.json"
LASTING_STATES = ("usable", "sigill", "broken")
"""What the next try would find again; memory and time may be there then."""

LibraryState: TypeAlias = Literal["usable", "missing", "sigill", "out_of_memory", "timeout", "broken"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a library's smoke test.

    Attributes:
        version: Of the library; empty where it is unknown.
        board: Id of the profile of the board that it was tried on: a card may move on to another.
        lack: What it does not reach though it was built for it, such as a GPU; empty for nothing.
    """

    library: str
    state: LibraryState
    version: str = ""
    board: str = ""
    finding: str = ""
    lack: str = ""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read the facts `kernel`, `model`, `l4t`, and on the board itself the versions of `torch` and `onnxruntime`.

    Nothing is imported; that a library is installed does not mean that it runs.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: Nothing is known.
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
    """Parse `36.4.0` out of `# R36 (release), REVISION: 4.0, GCID: ...`; raises NoData."""
    found = re.match(r"# R(\d{1,4}) \(release\), REVISION: ([\d.]{1,20})", release, re.ASCII)
    if found is None:
        raise NoData(f"{release[:60]!r} is no release of L4T", lack="invalid")
    return f"{found[1]}.{found[2]}"


def find_version(library: str) -> str:
    """Return the version of an installed library, without importing it; empty where it is not installed."""
    return installed_version(*PACKAGES[library])


def find_missing_isa(root: Path, library: str, profile: Profile) -> str:
    """Return the instruction set that a library wants and this CPU does not have; empty for none.

    Args:
        root: The board's root folder.
        library: Name of the library, such as `torch`.
        profile: The firmware profile, which names what the library wants.
    """
    token = profile.cpu.isa.get(library, "")
    try:
        lines = re.findall(r"^(?:Features|flags)\s*:(.*)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    except NoData:
        return ""
    return token if token and lines and not all(token in line.split() for line in lines) else ""


def smoke_test(
    library: str,
    timeout_s: float = 180.0,
    *,
    board: str = "",
    interpreter: Interpreter | None = None,
    device: str = "cpu",
) -> Verdict:
    """Run a library's smoke test in a child process, and return how that ended.

    Args:
        library: Name of the library, such as `torch`.
        timeout_s: Seconds after which the child is killed.
        board: Id of the profile of this board.
        interpreter: Python that loads it, None for the one that loads what `setup` installed.
        device: What torch computes with, as `[trainer]` names it.
    """
    module = "device_agent.hardware.library_smoke_test"
    python = interpreter or find_interpreter()
    with tempfile.TemporaryDirectory() as scratch:  # torch 2.10 makes a folder for what it might compile
        environment = python.environment({"TORCHINDUCTOR_CACHE_DIR": scratch})
        ended = run_command(python.command(module, library, device), timeout_s, environment)
    state, finding = _judge(ended.exit_code, ended.stderr, timeout_s)
    result = _parse_result(ended.stdout) if state == "usable" else _Tried()
    number = result.version or find_version(library)
    return Verdict(
        library=library, state=state, version=number, board=board, finding=result.done or finding, lack=result.lack
    )


class _Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Result that a smoke test prints."""

    version: str = ""
    done: str = ""
    lack: str = ""


def _parse_result(printed: str) -> _Tried:
    try:
        return msgspec.json.decode((printed.strip().splitlines() or [""])[-1], type=_Tried)
    except msgspec.MsgspecError:
        return _Tried()


def _judge(code: int | None, stderr: str, timeout_s: float) -> tuple[LibraryState, str]:
    """Return state and finding of a child, by its exit code and the last line of its standard error."""
    known: dict[int | None, tuple[LibraryState, str]] = {
        0: ("usable", "imports and computes"),
        None: ("timeout", f"no end after {timeout_s:g} s"),
        EXIT_MISSING: ("missing", "not installed"),
        EXIT_MEMORY: ("out_of_memory", "runs out of memory"),
        -signal.SIGKILL: ("out_of_memory", "runs out of memory, or was killed by hand"),
        -signal.SIGILL: ("sigill", "dies of an instruction that this CPU does not have (SIGILL)"),
    }
    if code in known:
        return known[code]
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no word")[:200]
    if code is not None and code < 0:
        return "broken", f"dies of signal {-code} ({signal.strsignal(-code)}): {last}"
    return "broken", f"ends with exit code {code}: {last}"


def load_verdicts(state_dir: Path, board: str) -> dict[str, Verdict]:
    """Load the verdicts on the versions that are installed now, on a board of this kind, by library."""
    return {
        library: verdict
        for library, verdict in read_verdicts(state_dir).items()
        if library in PACKAGES
        and verdict.version
        and verdict.version == find_version(library)
        and verdict.board == board
    }


def store_verdict(state_dir: Path, verdict: Verdict) -> None:
    """Store a verdict that will stand; where the disk does not take it, the next start tries again."""
    if verdict.state not in LASTING_STATES:
        return
    verdicts = read_verdicts(state_dir) | {verdict.library: verdict}
    with contextlib.suppress(OSError):
        replace_file(state_dir / CACHE_NAME, msgspec.json.encode(verdicts), durable=False)


def read_verdicts(state_dir: Path) -> dict[str, Verdict]:
    """Return all verdicts that were stored, by library, of whatever version and board; none where nothing was."""
    try:
        return msgspec.json.decode((state_dir / CACHE_NAME).read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.MsgspecError):
        return {}


def verdict_facts(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Return verdicts as facts of a report: the version of what is usable, and else what it is: `2.10.0 sigill`."""
    return {
        library: verdict.version if verdict.state == "usable" else f"{verdict.version} {verdict.state}".strip()
        for library, verdict in verdicts.items()
    }
