"""What fresh systems are handed: packages of two versions, wheels, a board's examples, a plan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from shutil import which

import numpy as np

from shared.runtime.support.command import find_usual_index
from shared.runtime.support.fetch import bring
from shared.runtime.support.table import Purpose, Wheel, choose, read_table, read_wheels
from shared.runtime.support.table import System as Kind
from tests.install.roots import BUILD, ROOT, System

KINDS = {
    ("amd64", "12"): Kind("x86_64", "3.11"),
    ("amd64", "13"): Kind("x86_64", "3.13"),
    ("arm64", "12"): Kind("aarch64", "3.11", lacks="atomics"),
}
"""As the fresh systems tell of themselves; the last is a Raspberry Pi 4."""
NEXT = "99.0"
"""The version to upgrade to."""
PLAN = """name = "fresh"
rounds = 1
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = { features = 16, hidden = 8, classes = 2 }
[hyper]
batch_size = 8
learning_rate = 0.1
[cohort]
min_devices = 1
[round]
deadline_s = 1500.0
min_updates = 1
[evaluation]
every = 0
[[device]]
name = "pi-01"
"""


def build_packages(side: str, arch: str, release: str = "12") -> dict[str, Path]:
    """Return a side's packages by version, this one as "", and the next; Debian's judge has nothing against them."""
    built: dict[str, Path] = {}
    for version in ("", NEXT):
        out = BUILD / "deb" / f"{side}-{arch}-{release}" / (version or "this")
        shutil.rmtree(out, ignore_errors=True)
        told = ["--out", str(out), "--arch", arch, "--only", side, "--release", release]
        command = [sys.executable, "deploy/debian/build.py", *told, *(["--version", version] if version else [])]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [built[version]] = out.glob("*.deb")
    if which("lintian"):
        command = ["lintian", "--fail-on", "error,warning", *map(str, built.values())]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return built


def chosen_wheels(kind: Kind, purpose: Purpose) -> list[Wheel]:
    """Return the wheels that a system will ask for."""
    return list(choose(read_table(), read_wheels(), kind, purpose).wheels)


def fetch_wheels(kind: Kind, purpose: Purpose) -> Path:
    """Return a folder that has them."""
    folder = BUILD / f"{kind.machine}.wheels"
    sources = [*os.environ.get("PIP_FIND_LINKS", "").split(), find_usual_index()]
    bring(chosen_wheels(kind, purpose), folder, sources, lambda _line: None)
    return folder


def hand(system: System, packages: dict[str, Path], wheels: tuple[Path, list[Wheel]] | None) -> None:
    """Lay packages, and just the wheels that it will ask for, into a system's /share.

    Args:
        system: Which.
        packages: By version.
        wheels: Folder, and those of it; None for none.
    """
    for path in packages.values():
        shutil.copy(path, system.share)
    if wheels:
        (system.share / "wheels").mkdir()
        for one in wheels[1]:
            shutil.copy(wheels[0] / one.file, system.share / "wheels")


def write_examples(path: Path) -> None:
    """Write some examples of a board."""
    drawn = np.random.default_rng(0)
    inputs = drawn.normal(size=(64, 16)).astype(np.float32)
    np.savez(path, x=inputs, y=(inputs.sum(1) > 0).astype(np.int64))
    path.chmod(0o644)
