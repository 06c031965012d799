"""Packages of the agent that hold next to nothing, made as `dpkg-deb` makes them, without it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

FORMATS = 'FORMATS: Mapping[str, int] = {"journal": 1, "releases": 2}\n'
CONTROL = """Package: {name}
Version: {version}+deb12
Architecture: {arch}
Depends: python3 (>= {python}~), python3 (<< 3.99~), adduser
Description: an agent
 Architecture: of a line that goes on
"""


def packed(members: dict[str, str | bytes], links: dict[str, str] | None = None, kind: str = "xz") -> bytes:
    """Return a tar archive of files and symbolic links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{kind}") as tar:
        for name, text in members.items():
            data = text.encode() if isinstance(text, str) else text
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
        for name, target in (links or {}).items():
            about = tarfile.TarInfo(name)
            about.type, about.linkname = tarfile.SYMTYPE, target
            tar.addfile(about)
    return out.getvalue()


def archive(parts: dict[str, bytes]) -> bytes:
    """Return an ar archive."""
    found = b"!<arch>\n"
    for name, data in parts.items():
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}".encode() + b"`\n" + data
        found += b"\n" * (len(data) % 2)
    return found


def deb(
    version: str = "0.4.0",
    arch: str = "arm64",
    python: str = "3.11",
    *,
    name: str = "fieldfleet-agent",
    filling: bytes = b"",
    formats: str = FORMATS,
) -> bytes:
    """Return a package."""
    home = f"./opt/fieldfleet/{version}"
    files: dict[str, str | bytes] = {f"{home}/lib/filling": filling}
    if formats:
        files[f"{home}/lib/python{python}/site-packages/device_agent/upgrade/state_formats.py"] = formats
    control = CONTROL.format(name=name, version=version, arch=arch, python=python)
    return archive(
        {
            "debian-binary": b"2.0\n",
            "control.tar.xz": packed({"./control": control}),
            "data.tar.xz": packed(files, {"./opt/fieldfleet/current": version}),
        }
    )


def put_deb(folder: Path, version: str = "0.4.0", arch: str = "arm64", python: str = "3.11", **more: object) -> Path:
    """Write a package into a folder, under the name that `make deb` gives it; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fieldfleet-agent_{version}+deb12_{arch}.deb"
    path.write_bytes(deb(version, arch, python, **more))  # type: ignore[arg-type]
    return path
