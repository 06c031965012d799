"""What this board can run: kernel, versions, and whether a library survives its first steps, tried in a child process.

`read` only looks; it is asked again and again. `check` tries, which takes seconds and hundreds of megabytes, and
`remembered` tells what it found: once a version and board is enough.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from device_agent.hardware.files import text
from device_agent.hardware.library_smoke_test import EXIT_MEMORY, EXIT_MISSING
from device_agent.hardware.tools import LIVE, python
from device_agent.probes.base import Found
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.runtime.durable import replace_file

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}
"""Libraries, and the packages that bring them."""

FILES: Mapping[str, str] = {"kernel": "proc/sys/kernel/osrelease", "model": "proc/device-tree/model"}
L4T = "etc/nv_tegra_release"
CACHE = "runtime.json"
LASTING = ("usable", "sigill", "broken")
"""What the next try would find again; memory and time may be there then."""

State: TypeAlias = Literal["usable", "missing", "sigill", "out_of_memory", "timeout", "broken"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a library's first steps ended.

    Attributes:
        version: Of the library; empty where nobody knows.
        board: Id of the profile of the board that it was tried on: a card may move on to another.
        finding: For people.
    """

    library: str
    state: State
    version: str = ""
    board: str = ""
    finding: str = ""


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return the facts `kernel`, `model`, `l4t`, and on the board itself the versions of `torch` and `onnxruntime`.

    Nothing is imported; that a library is installed does not say that it runs.

    Raises:
        NoData: Nothing is known.
    """
    facts: dict[str, str] = {}
    for name, file in FILES.items():
        with contextlib.suppress(NoData):
            facts[name] = text(root / file)
    with contextlib.suppress(NoData):
        facts["l4t"] = l4t(text(root / L4T))
    if root == LIVE:
        facts |= {library: number for library in PACKAGES if (number := installed(library))}
    if not facts:
        raise NoData(f"{root}: neither {' nor '.join([*FILES.values(), L4T])}")
    return Found(facts=facts)


def l4t(release: str) -> str:
    """Return `36.4.0` out of `# R36 (release), REVISION: 4.0, GCID: ...`; raises NoData."""
    found = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", release, re.ASCII)
    if found is None:
        raise NoData(f"{release[:60]!r} is no release of L4T", lack="invalid")
    return f"{found[1]}.{found[2]}"


def installed(library: str) -> str:
    """Return the version of a library that is installed, without importing it; empty where it is not."""
    for package in PACKAGES[library]:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return ""


def lacking(root: Path, library: str, profile: Profile) -> str:
    """Return the instruction set that the library wants by the profile and this CPU does not have; empty for none."""
    token = profile.cpu.isa.get(library, "")
    try:
        lines = re.findall(r"^(?:Features|flags)\s*:(.*)$", text(root / "proc/cpuinfo"), re.MULTILINE)
    except NoData:
        return ""
    return token if token and lines and not all(token in line.split() for line in lines) else ""


def check(library: str, timeout_s: float = 180.0, *, board: str = "") -> Verdict:
    """Let a library take its first steps in a child process, and return how that ended."""
    ended = python("device_agent.hardware.library_smoke_test", library, timeout_s=timeout_s)
    state, finding = _judged(ended.code, ended.said, timeout_s)
    number = installed(library) or (ended.printed.split() or [""])[-1]
    return Verdict(library=library, state=state, version=number, board=board, finding=finding)


def _judged(code: int | None, said: str, timeout_s: float) -> tuple[State, str]:
    """Return state and finding of a child that ended with this code and these last words."""
    known: dict[int | None, tuple[State, str]] = {
        0: ("usable", "imports and computes"),
        None: ("timeout", f"no end after {timeout_s:g} s"),
        EXIT_MISSING: ("missing", "not installed"),
        EXIT_MEMORY: ("out_of_memory", "runs out of memory"),
        -signal.SIGKILL: ("out_of_memory", "runs out of memory, or was killed by hand"),
        -signal.SIGILL: ("sigill", "dies of an instruction that this CPU does not have (SIGILL)"),
    }
    if code in known:
        return known[code]
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no word")[:200]
    if code is not None and code < 0:
        return "broken", f"dies of signal {-code} ({signal.strsignal(-code)}): {last}"
    return "broken", f"ends with exit code {code}: {last}"


def usable(library: str, state_dir: Path, board: str, timeout_s: float = 180.0) -> Verdict:
    """Return what is remembered of the installed version on this board, else try it and remember."""
    known = remembered(state_dir, board).get(library)
    if known is None:
        known = check(library, timeout_s, board=board)
        remember(state_dir, known)
    return known


def remembered(state_dir: Path, board: str) -> dict[str, Verdict]:
    """Return what was found of the versions that are installed now, on a board of this kind, by library."""
    return {
        library: verdict
        for library, verdict in _stored(state_dir).items()
        if library in PACKAGES and verdict.version and verdict.version == installed(library) and verdict.board == board
    }


def remember(state_dir: Path, verdict: Verdict) -> None:
    """Keep a verdict that will stand; where the disk does not take it, the next start tries again."""
    if verdict.state not in LASTING:
        return
    verdicts = _stored(state_dir) | {verdict.library: verdict}
    with contextlib.suppress(OSError):
        replace_file(state_dir / CACHE, msgspec.json.encode(verdicts), durable=False)


def _stored(state_dir: Path) -> dict[str, Verdict]:
    try:
        return msgspec.json.decode((state_dir / CACHE).read_bytes(), type=dict[str, Verdict])
    except (OSError, msgspec.MsgspecError):
        return {}


def facts(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Return verdicts as facts of a report: the version of what is usable, and else what it is: `2.10.0 sigill`."""
    return {
        library: verdict.version if verdict.state == "usable" else f"{verdict.version} {verdict.state}".strip()
        for library, verdict in verdicts.items()
    }
