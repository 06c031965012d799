"""Write anew which wheels the support table names: shared/runtime/support/wheels.toml, with sizes and hashes.

    python deploy/support/lock.py [SET ...]

Versions are those of constraints.txt, but for torch on ARM, where the last one without CUDA is wanted; sizes and hashes
are what pip's index says. Nothing is installed; of wheels whose index tells no metadata pip may fetch the whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "shared" / "runtime" / "support" / "wheels.toml"
TAGS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux_2_34")
PURPOSES = {
    "infer": ("httptools", "numpy", "onnxruntime", "safetensors"),
    "train": ("httptools", "numpy", "onnxruntime", "safetensors", "pillow", "torch"),
    "server": ("numpy", "safetensors", "torch", "cvxpy", "onnx", "onnxruntime"),
}
OTHER = {
    "aarch64-3.11": {"torch": "2.10.0"},  # from 2.11 on the index's wheel for 64-bit ARM is for CUDA
    "aarch64-3.13": {"torch": "2.10.0"},
    "aarch64-3.11-armv8.0": {"torch": "2.5.1", "onnxruntime": "1.20.1"},  # later ones die there of SIGILL
}
"""Versions of a set that are not those of constraints.txt."""

NOT_NEEDED = ("triton", "cuda", "nvidia")


def pins() -> dict[str, str]:
    """Return the version of each name in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {plain(name): version for name, version in pairs}


def plain(name: str) -> str:
    """Return a distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: tuple[str, ...], python: str) -> list[str]:
    """Return names with all that they need on a CPU, by what is installed here."""
    found: list[str] = []
    waiting = [*names, *(["setuptools"] if "torch" in names and python >= "3.12" else [])]
    while waiting:
        name = plain(waiting.pop())
        if name in found or name.startswith(NOT_NEEDED):
            continue
        found.append(name)
        for line in requires(name) or []:
            need, _, marker = line.partition(";")
            if "extra" not in marker and "win32" not in marker.lower() and "python_version <" not in marker:
                waiting.append(re.split(r"[ <>=!~\[(]", need.strip())[0])
    return sorted(found)


def wheel(name: str, version: str, machine: str, python: str) -> dict[str, object]:
    """Return what pip would take for a platform: file, size, hash, size unpacked."""
    platforms = [f"--platform={tag}_{machine}" for tag in TAGS]
    asked = ["install", "--dry-run", "--quiet", "--report=-", "--no-deps", "--only-binary=:all:", "--target=none"]
    command = [sys.executable, "-m", "pip", *asked, *platforms, f"--python-version={python}", f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [entry] = json.loads(done.stdout)["install"]
    info = entry["download_info"]
    url, digest = info["url"], info["archive_info"]["hashes"]["sha256"]
    size, unpacked = sizes(url)
    file = urllib.request.unquote(url.rpartition("/")[2])
    return {"name": name, "file": file, "bytes": size, "unpacked": unpacked, "sha256": digest}


def sizes(url: str) -> tuple[int, int]:
    """Return how many bytes a wheel has, packed and unpacked; only its end is read, where its list of files is."""
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(url.removeprefix("file://")))
        with zipfile.ZipFile(path) as packed:
            return path.stat().st_size, sum(one.file_size for one in packed.infolist())
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:  # noqa: S310 - pip's own
        size = int(answer.headers["Content-Length"])
    start = max(0, size - (4 << 20))
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"})  # noqa: S310 - as above
    with urllib.request.urlopen(request) as answer, tempfile.TemporaryFile() as file:  # noqa: S310 - as above
        file.seek(start if answer.status == 206 else 0)  # noqa: PLR2004 - a part of it
        file.write(answer.read())
        with zipfile.ZipFile(file) as packed:
            return size, sum(one.file_size for one in packed.infolist())


def lock(name_of_set: str) -> dict[str, list[dict[str, object]]]:
    """Return the wheels of each purpose on one kind of system."""
    machine, python, *_ = name_of_set.split("-")
    versions, known, found = pins() | OTHER.get(name_of_set, {}), {}, {}
    for purpose, names in PURPOSES.items():
        for name in closure(names, python):
            if name not in known:
                known[name] = wheel(name, versions[name], machine, python)
                sys.stderr.write(f"{machine} {python} {known[name]['file']}\n")
        found[purpose] = [known[name] for name in closure(names, python)]
    return found


def main() -> None:
    """Lock the sets that are named, or all, and write the file anew."""
    kept = {name: unfold(one) for name, one in tomllib.loads(OUT.read_text())["sets"].items()} if OUT.exists() else {}
    for name in sys.argv[1:] or [*OTHER, "x86_64-3.11"]:
        kept[name] = lock(name)
        write(kept)


def unfold(told: dict[str, list[dict[str, object]]]) -> dict[str, list[dict[str, object]]]:
    """Return a set as `lock` does, of what the file says of it."""
    wheels = {one["name"]: one for one in told.pop("wheels")}
    return {purpose: [wheels[name] for name in names] for purpose, names in told.items()}  # type: ignore[index]


def write(sets: dict[str, dict[str, list[dict[str, object]]]]) -> None:
    """Write all sets: a wheel a line, and of each purpose the files that it takes."""
    lines = ["# Written by deploy/support/lock.py: wheels by machine and Python, and which of them a purpose takes."]
    for name in sorted(sets):
        wheels = {str(one["file"]): one for purpose in sets[name].values() for one in purpose}
        lines += ["", f'[sets."{name}"]']
        for purpose, chosen in sets[name].items():
            lines.append(f"{purpose} = {json.dumps([one['name'] for one in chosen])}")
        lines.append("wheels = [")
        for one in wheels.values():
            told = ", ".join(f"{key} = {json.dumps(value)}" for key, value in one.items())
            lines.append(f"  {{ {told} }},")
        lines.append("]")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    main()
