"""Test packages by `dpkg-deb`, signed manifests, board folders, a minimal agent."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from math import inf
from pathlib import Path

import msgspec

from device_agent.upgrade.inputs import UpgradeEnvironment, UpgradeRequest
from device_agent.upgrade.record import FOLDER, WANTED, UpgradeTarget
from device_agent.upgrade.updater import Updater
from edge_server.gateway.authority import Subject, issue, make_key, make_root, make_site, public_key_of
from shared.protocol.packages import AGENT, Build, PackageManifest, encode_signed_manifest, sign
from tests.device_agent.upgrade.services import PROGRAM, StandInService

NOW = datetime(2026, 11, 23, tzinfo=UTC)
ARCH, PYTHON, INTERPRETER = "arm64", "3.11", "/usr/bin/python3.11"
PROVE = """nonce=$(sed -n 's/.*"nonce": *"\\([0-9a-f]*\\)".*/\\1/p' "$1/upgrade.json")
mkdir -p "$2/upgrade"
printf '{"version":"%s","nonce":"%s"}' VERSION "$nonce" > "$2/upgrade/proof.$$"
mv "$2/upgrade/proof.$$" "$2/upgrade/proof.json"
"""
AGENTS = {
    "good": PROVE + "exec sleep 600\n",
    "mute": "exec sleep 600\n",
    "crashing": "exit 1\n",
    "giving-up": "touch $3/failed\nexit 2\n",
}
"""What a version's agent does: HOME, STATE and the service's folder are its words."""


@cache
def authorities(name: str) -> tuple[bytes, bytes, bytes]:
    """Return a site's root, and key and chain of who signs its packages; PEM."""
    root_key, root = make_root(name, NOW, 30)
    site_key, site = make_site(root_key, root, name, NOW, 15)
    key = make_key()
    issued = issue(site_key, site, public_key_of(key), Subject("_packages", "packages", name), inf, NOW)
    return root, key, issued.certificate + site


def tree_of(version: str, behaviour: str = "good") -> dict[str, bytes]:
    """Return the files of a version, a few of them."""
    script = f"#!/bin/sh\necho {version} > $3/running\n{AGENTS[behaviour].replace('VERSION', version)}"
    return {PROGRAM: script.encode(), "lib/module.py": f"VERSION = {version!r}\n".encode(), "lib/data": bytes(70_000)}


def member(name: str, content: bytes = b"", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    """Return an entry of an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), 0o644, 1
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def folder_of(name: str) -> tuple[tarfile.TarInfo, bytes]:
    """Return a folder of an archive."""
    return member(name, type=tarfile.DIRTYPE, mode=0o755)


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return a tar of xz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=0)


def deb(data: bytes, control: bytes | None = None) -> bytes:
    """Return a package whose files are in that archive."""
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": archive(member("./control", b"Package: fieldfleet-agent\n")) if control is None else control,
        "data.tar.xz": data,
    }
    made = b"!<arch>\n"
    for name, content in parts.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        made += b"\n" * (len(content) % 2)
    return made


def package(
    version: str,
    tree: Mapping[str, bytes],
    *more: tuple[tarfile.TarInfo, bytes],
    control: str = "Package: fieldfleet-agent\n",
) -> bytes:
    """Return a package of the agent with these files in its folder, and with others beside it, as ours has.

    Args:
        tree: Files of its folder.
        control: What it says of itself.
    """
    home = f"./opt/fieldfleet/{version}"
    folders = ["./", "./usr/", "./opt/", "./opt/fieldfleet/", f"{home}/", f"{home}/bin/"]
    folders += [
        f"{home}/{name}/" for name in sorted({str(up) for one in tree for up in Path(one).parents} - {".", "bin"})
    ]
    link = {"type": tarfile.SYMTYPE, "linkname": INTERPRETER}
    programs = (PROGRAM, "bin/python3")
    files = [member(f"{home}/{name}", data, mode=0o755 if name in programs else 0o644) for name, data in tree.items()]
    current = member("./opt/fieldfleet/current", type=tarfile.SYMTYPE, linkname=version)
    python = [] if "bin/python3" in tree else [member(f"{home}/bin/python3", **link)]
    beside = member("./usr/unit", b"[Unit]\n")
    said = archive(member("./control", control.encode()))
    return deb(archive(*map(folder_of, folders), *files, *python, current, beside, *more), said)


def manifest_of(version: str, data: bytes, site: str = "roof", **more: object) -> bytes:
    """Return a manifest of one package, signed."""
    build = Build(
        file=f"fieldfleet-agent_{version}_{ARCH}.deb",
        arch=ARCH,
        python=PYTHON,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
    )
    said = {"name": AGENT, "version": version, "serial": int(version.partition(".")[0]), "site": site}
    manifest = PackageManifest(**{**said, "created": "2026-11-23T21:00:00Z", "builds": (build,), **more})
    _, key, chain = authorities(site)
    return encode_signed_manifest(sign(manifest, key, chain))


@dataclass
class UpgradeBoard:
    """A board in a folder, on which version 1 runs as dpkg laid it.

    Attributes:
        folder: Of all of it.
        trees: Files of each version that there is a package of.
    """

    folder: Path
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay the version, and start its agent."""
        self.home, self.state, self.kept = (self.folder / name for name in ("opt", "state", "service"))
        for path in (self.home / "1" / "lib", self.state / FOLDER, self.kept):
            path.mkdir(parents=True)
        self.trees["1"] = tree_of("1")
        for name, data in self.trees["1"].items():
            (self.home / "1" / name).write_bytes(data)
        for link in ("current", "updater"):
            (self.home / link).symlink_to("1")
        (self.folder / "roots.pem").write_bytes(authorities("roof")[0])
        self.boot = 0
        self.reboot()
        self.service = StandInService(self.home, self.state, self.kept)

    def place(self) -> UpgradeEnvironment:
        """Return where everything is."""
        told = {"roots": self.folder / "roots.pem", "boot_id": self.folder / "boot"}
        return UpgradeEnvironment(self.home, self.state, arch=ARCH, python=PYTHON, interpreters=(INTERPRETER,), **told)

    def reboot(self) -> None:
        """Have it be another boot."""
        self.boot += 1
        (self.folder / "boot").write_text(f"boot-{self.boot}\n")

    def updater(self, find_start_error: Callable[[Path], str] = lambda _folder: "") -> Updater:
        """Return who upgrades, as a new process would."""
        return Updater(replace(self.place(), find_start_error=find_start_error, look_s=0.005), self.service)

    def fetch(self, version: str, behaviour: str = "good", data: bytes = b"", **manifest: object) -> bytes:
        """Have the agent fetch a package; returns it."""
        self.trees[version] = tree_of(version, behaviour)
        data = data or package(version, self.trees[version])
        (self.state / FOLDER / f"{version}.deb").write_bytes(data)
        (self.state / FOLDER / f"{version}.json").write_bytes(manifest_of(version, data, **manifest))
        return data

    def want(self, version: str, **more: object) -> UpgradeTarget:
        """Have the agent be told to take it."""
        wanted = UpgradeTarget(**{"version": version, "deployment": "d", "probation_s": 60.0, **more})
        (self.state / FOLDER / WANTED).write_bytes(msgspec.json.encode(wanted))
        return wanted

    def request(self, updater: Updater, **more: object) -> UpgradeRequest:
        """Return what is wanted, as the command asks for it."""
        wanted = updater.agent.read_target()
        name = wanted.version
        signed, data = (
            (lambda: updater.agent.read_manifest(name)),
            (lambda size: updater.agent.read_package(name, size)),
        )
        return UpgradeRequest(wanted, signed, data, **more)

    def current(self) -> str:
        """Return the version that `current` leads to, which is there and whole."""
        version = (self.home / "current").readlink().name
        for name, data in self.trees[version].items():
            assert (self.home / version / name).read_bytes() == data, (version, name)
        return version

    def versions(self) -> set[str]:
        """Return the names of what lies beside each other."""
        return {path.name for path in self.home.iterdir() if path.is_dir() and not path.is_symlink()}
