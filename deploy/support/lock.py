"""Write shared/runtime/support/wheels.toml anew: the wheels of each kind of system, with sizes and SHA-256.

    python deploy/support/lock.py [SET ...]

Versions are those of constraints.txt (constraints-3.10.txt for Python 3.10), except where OTHER names another one.
Everything comes from pip's index, except the wheels of ELSEWHERE. Nothing is installed, and of each wheel only the end
is read, which holds its list of files and its metadata.
"""

from __future__ import annotations

import email
import functools
import json
import re
import sys
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shared.runtime.support.command import find_usual_index

ROOT = Path(__file__).parents[2]
OUT = ROOT / "shared" / "runtime" / "support" / "wheels.toml"
GLIBC = (2, 35)
"""Of the oldest supported system, Ubuntu 22.04."""

TAIL, LONGEST_HEAD = 4 << 20, 4096
"""Bytes at a wheel's end that hold its list of files; bytes of a file's head in a zip."""

PURPOSES = {  # the first one chooses the versions for the others
    "train": ("httptools", "numpy", "onnxruntime", "safetensors", "pillow", "soundfile", "pyarrow", "torch"),
    "infer": ("httptools", "numpy", "onnxruntime", "safetensors"),
    "server": ("numpy", "safetensors", "pillow", "soundfile", "pyarrow", "torch", "cvxpy", "onnx", "onnxruntime"),
}
ARM = {"torch": "2.10.0"}
"""From 2.11 on, the index's wheel for 64-bit ARM needs CUDA."""

OTHER: dict[str, dict[str, str]] = {
    "aarch64-3.10": ARM,
    "aarch64-3.11": ARM,
    "aarch64-3.12": ARM,
    "aarch64-3.13": ARM,
    "aarch64-3.14": ARM,
    # later ones die there of SIGILL
    "aarch64-3.10-armv8.0": {"torch": "2.9.1", "onnxruntime": "1.20.1"},
    "aarch64-3.11-armv8.0": {"torch": "2.5.1", "onnxruntime": "1.20.1"},
    "aarch64-3.12-armv8.0": {"torch": "2.9.1", "onnxruntime": "1.20.1"},
    "aarch64-3.13-armv8.0": {"torch": "2.9.1", "onnxruntime": "1.20.1"},
    # NVIDIA's builds for CUDA 12.6, which load with numpy 1 and may not with 2; the index's for CUDA 13.0
    "aarch64-3.10-jetpack6": {"torch": "2.8.0", "onnxruntime-gpu": "1.24.0", "numpy": "1.26.4"},
    "aarch64-3.12-jetpack7": {"torch": "2.11.0", "onnxruntime-gpu": "1.31.1"},
    "x86_64-3.10": {"torch": "2.10.0+cpu"},
    "x86_64-3.11": {"torch": "2.13.0+cpu"},
    "x86_64-3.12": {"torch": "2.13.0+cpu"},
    "x86_64-3.13": {"torch": "2.13.0+cpu"},
    "x86_64-3.14": {"torch": "2.13.0+cpu"},
}
"""All sets, with the versions that are not those of the constraints."""

TORCH_NEEDS = (
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "setuptools; python_version >= '3.12'",
    "sympy>=1.13.3",
    "typing-extensions>=4.10",
)
ORT_GPU_NEEDS = ("flatbuffers", "numpy>=1.21.6", "packaging", "protobuf", "sympy", "coloredlogs")
ELSEWHERE: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    # file: SHA-256, bytes (0: the index does not say), bytes unpacked (about, but for 3.11), what it needs
    "torch-2.10.0+cpu-cp310-cp310-manylinux_2_28_x86_64.whl": (
        "a280ffaea7b9c828e0c1b9b3bd502d9b6a649dc9416997b69b84544bd469f215", 188_832_554, 700_000_000, TORCH_NEEDS),
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b", 191_794_682, 699_298_109, TORCH_NEEDS),
    "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl": (
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2", 191_817_609, 699_300_000, TORCH_NEEDS),
    "torch-2.13.0+cpu-cp313-cp313-manylinux_2_28_x86_64.whl": (
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6", 191_815_667, 699_300_000, TORCH_NEEDS),
    "torch-2.13.0+cpu-cp314-cp314-manylinux_2_28_x86_64.whl": (
        "d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691", 191_822_516, 699_300_000, TORCH_NEEDS),
    "torch-2.8.0-cp310-cp310-linux_aarch64.whl": (
        "62a1beee9f2f147076a974d2942c90060c12771c94740830327cae705b2595fc", 0, 1_000_000_000, TORCH_NEEDS),
    "onnxruntime_gpu-1.24.0-cp310-cp310-linux_aarch64.whl": (
        "d980b934b9a29c1a9d6f39751edd7662b69fadd75556a10ff363773a58ce0950", 73_617_978, 250_000_000, ORT_GPU_NEEDS),
}  # fmt: skip
"""Wheels that pip's index lacks: PyTorch's builds for the CPU of x86, and NVIDIA's for JetPack 6.

The hashes are those that several public lock files agree on; `setup` verifies what comes.
"""


@dataclass(frozen=True)
class Offer:
    """A wheel that can be had.

    Attributes:
        url: Where it is; empty for one of `ELSEWHERE`.
    """

    file: str
    url: str
    bytes: int
    sha256: str

    @property
    def version(self) -> Version:
        """Its distribution's version."""
        return parse_wheel_filename(self.file)[1]


def pins(python: str) -> dict[str, str]:
    """Return the pinned versions for a Python by name."""
    name = "constraints-3.10.txt" if python == "3.10" else "constraints.txt"
    lines = (ROOT / name).read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in pairs}


@functools.cache
def tags_of(machine: str, python: str) -> Mapping[Tag, int]:
    """Return the tags of wheels that a system can load, the best first."""
    version = tuple(map(int, python.split(".")))
    platforms = [f"manylinux_{GLIBC[0]}_{minor}_{machine}" for minor in range(GLIBC[1], 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    found = [*cpython_tags(version, platforms=platforms), *compatible_tags(version, f"cp{python}", platforms)]
    return {tag: place for place, tag in reversed(list(enumerate(found)))}


@functools.cache
def offers(name: str) -> tuple[Offer, ...]:
    """Return the wheels of a name, of the index and of `ELSEWHERE`."""
    request = urllib.request.Request(  # noqa: S310 - pip's own
        f"{find_usual_index().rstrip('/')}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - as above
        files = json.load(answer)["files"]
    known = [
        Offer(one["filename"], one["url"], one["size"], one["hashes"]["sha256"])
        for one in files
        if one["filename"].endswith(".whl") and not one.get("yanked")
    ]
    known += [
        Offer(file, "", size, sha256)
        for file, (sha256, size, _, _) in ELSEWHERE.items()
        if canonicalize_name(file.split("-")[0]) == name
    ]
    return tuple(known)


def choose(name: str, version: str, allowed: SpecifierSet, tags: Mapping[Tag, int]) -> Offer:
    """Return the wheel of a pinned version, or of the newest one that is allowed."""
    fitting: list[tuple[Version, bool, int, Offer]] = []
    for one in offers(name):
        try:
            _, found, _, theirs = parse_wheel_filename(one.file)
        except ValueError:
            continue  # a name of long ago
        places = [tags[tag] for tag in theirs if tag in tags]
        if places and (str(found) == version if version else found in allowed):
            fitting.append((found, not one.url, -min(places), one))
    if not fitting:
        raise SystemExit(f"lock.py: no wheel of {name} {version or allowed} fits")
    return max(fitting, key=lambda one: one[:3])[3]


@functools.cache
def opened(url: str, size: int) -> tuple[int, tuple[str, ...]]:
    """Return how many bytes a wheel has unpacked, and what it requires."""
    file, start = BytesIO(), max(0, size - TAIL)
    read_part(file, url, start, size)
    with zipfile.ZipFile(file) as packed:
        unpacked = sum(one.file_size for one in packed.infolist())
        [found] = [one for one in packed.infolist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one.filename)]
        if found.header_offset < start:
            read_part(file, url, found.header_offset, found.header_offset + found.compress_size + LONGEST_HEAD)
        told = email.message_from_bytes(packed.read(found))
    return unpacked, tuple(told.get_all("Requires-Dist") or ())


def read_part(file: BytesIO, url: str, start: int, end: int) -> None:
    """Read a part of a file at an address into its place."""
    headers = {"Range": f"bytes={start}-{end - 1}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310 - pip's own
        file.seek(start if answer.status == 206 else 0)  # noqa: PLR2004 - a part of it
        file.write(answer.read())


def needs(offer: Offer) -> tuple[int, tuple[str, ...]]:
    """Return a wheel's size unpacked and its requirements."""
    if offer.url:
        return opened(offer.url, offer.bytes)
    _, _, unpacked, required = ELSEWHERE[offer.file]
    return unpacked, required


def is_wanted(marker: Marker | None, machine: str, python: str, extras: frozenset[str]) -> bool:
    """Return whether a requirement holds on a system."""
    told = {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.9",
    }
    return marker is None or any(marker.evaluate({**told, "extra": one}) for one in (extras or {""}))


def closure(
    names: tuple[str, ...], name_of_set: str, known: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield names and wheels, with everything that they need, on a kind of system; of `known` names those versions."""
    machine, python, *_ = name_of_set.split("-")
    pinned, own, tags = pins(python) | dict(known), OTHER[name_of_set], tags_of(machine, python)
    waiting = [Requirement(f"{one}-gpu" if f"{one}-gpu" in own else one) for one in names]
    done = set[tuple[str, frozenset[str]]]()
    while waiting:
        wanted = waiting.pop()
        name, extras = str(canonicalize_name(wanted.name)), frozenset(wanted.extras)
        if (name, extras) in done:
            continue
        done.add((name, extras))
        version = own.get(name, pinned.get(name, ""))
        if name not in own and version and version not in wanted.specifier:
            version = ""
        offer = choose(name, version, wanted.specifier, tags)
        unpacked, required = needs(offer)
        yield name, {"file": offer.file, "bytes": offer.bytes, "unpacked": unpacked, "sha256": offer.sha256}
        told = [Requirement(one) for one in required]
        waiting += [one for one in told if is_wanted(one.marker, machine, python, extras)]


def lock(name_of_set: str) -> dict[str, dict[str, dict[str, object]]]:
    """Return the wheels of each purpose on one kind of system, by name."""
    _, python, *_ = name_of_set.split("-")
    found: dict[str, dict[str, dict[str, object]]] = {}
    known = dict[str, str]()
    for purpose, names in PURPOSES.items():
        if purpose != "server" or python != "3.10":
            found[purpose] = dict(sorted(closure(names, name_of_set, known)))
            known |= {name: str(one["file"]).split("-")[1] for name, one in found[purpose].items()}
    return found


def main() -> None:
    """Lock the sets that are named, or all, and write the file anew."""
    told = tomllib.loads(OUT.read_text()) if OUT.exists() and sys.argv[1:] else {"sets": {}, "wheels": []}
    wheels = {one["file"]: one for one in told["wheels"]}
    sets = dict(told["sets"])
    for name in sys.argv[1:] or OTHER:
        sys.stderr.write(f"{name}\n")
        locked = lock(name)
        sets[name] = {purpose: [one["file"] for one in found.values()] for purpose, found in locked.items()}
        wheels |= {one["file"]: one for found in locked.values() for one in found.values()}
    used = {file for one in sets.values() for files in one.values() for file in files}
    write(sets, {file: wheels[file] for file in sorted(used)})


def write(sets: Mapping[str, Mapping[str, list[str]]], wheels: Mapping[str, Mapping[str, object]]) -> None:
    """Write the wheels, one a line, and what each purpose takes of them."""
    lines = ["# Written by deploy/support/lock.py: all wheels, and those that each purpose takes on a kind of system."]
    lines += ["", "wheels = ["]
    for one in wheels.values():
        lines.append(f"  {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in one.items())} }},")
    lines.append("]")
    for name in sorted(sets):
        lines += ["", f'[sets."{name}"]']
        for purpose, files in sets[name].items():
            lines += [f"{purpose} = [", *(f"  {json.dumps(file)}," for file in files), "]"]
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
