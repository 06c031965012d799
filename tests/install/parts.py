"""What fresh systems are handed: packages of two versions, wheels, a board's examples, a plan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

import numpy as np

from shared.runtime.support.command import find_usual_index
from shared.runtime.support.fetch import download_wheels
from shared.runtime.support.table import Purpose, Wheel, choose, read_table, read_wheels
from shared.runtime.support.table import System as Kind
from tests.install.roots import BUILD, CPUS, ROOT, System

PYTHONS = {"12": "3.11", "13": "3.13", "22.04": "3.10", "24.04": "3.12", "26.04": "3.14"}
"""Of the releases of Debian and Ubuntu."""
NEXT = "99.0"
"""The version to upgrade to."""
PLAN = """name = "fresh"
rounds = 3
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


def kind_of(arch: str, release: str, cpu: str = "cortex-a72") -> Kind:
    """Return what a fresh system tells of itself.

    Args:
        arch: Its processor, as Debian names it.
        release: Its Debian or Ubuntu.
        cpu: Which one is emulated; no matter for amd64.
    """
    if arch == "amd64":
        return Kind("x86_64", PYTHONS[release])
    return Kind("aarch64", PYTHONS[release], lacks="" if "atomics" in CPUS[cpu].features.split() else "atomics")


def build_packages(side: str, arch: str) -> dict[str, Path]:
    """Return a side's packages by version, this one as "", and the next; Debian's judge has nothing against them."""
    built: dict[str, Path] = {}
    for version in ("", NEXT):
        out = BUILD / "deb" / f"{side}-{arch}" / (version or "this")
        shutil.rmtree(out, ignore_errors=True)
        told = ["--out", str(out), "--arch", arch, "--only", side]
        command = [sys.executable, "deploy/debian/build.py", *told, *(["--version", version] if version else [])]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [built[version]] = out.glob("*.deb")
    if which("lintian"):
        command = ["lintian", "--fail-on", "error,warning", *map(str, built.values())]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return built


def make_release() -> Path:
    """Return the folder of a small model, trained here, as a gateway exports it for its boards."""
    folder = BUILD / "release"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        runs, server = f"{scratch}/runs", (sys.executable, "-m", "edge_server")
        trial = ("trial", "run", "deploy/plans/demo.toml", "--local", "4", "--data-dir", runs)
        create = ("release", "create", "last", "--name", "fresh", "--data-dir", runs)
        export = ("release", "export", "fresh", str(folder), "--data-dir", runs)
        for words in (trial, create, export):
            subprocess.run([*server, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def chosen_wheels(kind: Kind, purpose: Purpose) -> list[Wheel]:
    """Return the wheels that a system will ask for."""
    return list(choose(read_table(), read_wheels(), kind, purpose).wheels)


def fetch_wheels(kind: Kind, purpose: Purpose) -> Path:
    """Return a folder that has them."""
    folder = BUILD / f"{kind.machine}.wheels"
    sources = [*os.environ.get("PIP_FIND_LINKS", "").split(), find_usual_index()]
    download_wheels(chosen_wheels(kind, purpose), folder, sources, lambda _line: None)
    return folder


def hand(system: System, packages: dict[str, Path], wheels: tuple[Path, list[Wheel]] | None) -> None:
    """Lay packages, and just the wheels that it will ask for, into a system's /share.

    Args:
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
