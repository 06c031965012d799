"""Build Debian packages of agent and server: all Python of theirs below /opt, for this or another processor.

    build.py --out DIR [--arch amd64|arm64] [--only agent|server] [--version X]

Each is a virtual environment for the system's own Python, whichever of `pythons` that is, filled by pip for the named
platform; nothing is compiled. All Pythons share one folder of libraries, where extension modules lie side by side:
their names say for which Python they are. The same commit gives the same bytes, wherever pip brings the same wheels.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Of Ubuntu 22.04 (and JetPack 6), Debian 12, Ubuntu 24.04 (JetPack 7), Debian 13, Ubuntu 26.04."""

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
TAGS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
"""Wheels that the oldest C library, Ubuntu 22.04's 2.35, can load."""

EACH = ("cffi", "msgspec", "xxhash")
"""Wheels with a build for each Python."""

LIGHT = (*EACH, "cryptography", "paho-mqtt", "psutil", "pycparser")
"""What `dependencies` of pyproject.toml comes to; tests/deploy compares. Versions are those of the constraints."""

BACKPORTS = ("exceptiongroup", "taskgroup", "tomli", "typing-extensions")
"""The same for Python 3.10 alone, which keeps them to itself: msgspec would load the last one on any other, too."""

MAINTAINER = f"{os.environ.get('DEBFULLNAME', 'who built it')} <{os.environ.get('DEBEMAIL', 'fieldfleet@localhost')}>"
"""As Debian's own tools are told it."""

TABLES = ("jinja2", "markdown-it-py", "markupsafe", "mdurl", "pygments", "rich", "segno")
"""What the server shows people things by."""


@dataclass(frozen=True)
class Package:
    """One of the packages.

    Attributes:
        name: As Debian knows it.
        others: Packages of our distribution that it does not need.
        wheels: What it brings along.
        user: As which its services run.
        pythons: Those that it runs on.
        services: Their units, in the order in which they are started.
        config: What the operator wrote, which goes with a purge alone.
        groups: Those that read sensors, which the user joins.
        joined: Those that it joins only where they are there.
    """

    name: str
    command: str
    others: tuple[str, ...]
    wheels: tuple[str, ...]
    home: str
    user: str
    pythons: tuple[str, ...]
    services: tuple[str, ...]
    config: str
    groups: str = ""
    joined: str = ""

    @property
    def folder(self) -> Path:
        """Where its control files are."""
        return HERE / self.name.removeprefix("fieldfleet-")


AGENT = Package(
    name="fieldfleet-agent",
    command="device-agent",
    others=("edge_server",),
    wheels=LIGHT,
    home="/opt/fieldfleet",
    user="fieldfleet",
    pythons=PYTHONS,
    services=("fieldfleet-upgrade.service", "fieldfleet-upgrade.path", "fieldfleet-agent.service"),
    config="/etc/fieldfleet/agent.toml /etc/fieldfleet/upgrades.pem",
    groups="video powercap",
    joined="render",
)
SERVER = Package(
    name="fieldfleet-server",
    command="edge-server",
    others=(),
    wheels=LIGHT + TABLES,
    home="/opt/fieldfleet-server",
    user="fieldfleet-server",
    pythons=PYTHONS[1:],
    services=("fieldfleet-server.service", "fieldfleet-enrolment.service", "fieldfleet-check.timer"),
    config="/etc/fieldfleet/server.toml /etc/fieldfleet/plan.toml /etc/fieldfleet/site",
)


@dataclass(frozen=True)
class Target:
    """What a package is built for.

    Attributes:
        arch: As Debian names the processor.
        epoch: Seconds since 1970 that every file in it carries.
    """

    arch: str
    version: str
    epoch: int

    @property
    def full_version(self) -> str:
        """Of the package: sorts behind those for one Debian, `+deb12` and `+deb13`, that came before."""
        return f"{self.version}+py3"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command; return what it printed, or end with what it said."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    if done.returncode:
        sys.exit(f"build.py: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def make_wheel(folder: Path, version: str) -> Path:
    """Return a wheel of this checkout, told another version where one is wanted."""
    source = folder / "source"
    kept = ("shared", "device_agent", "edge_server", "firmware_profiles")
    for name in kept:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    project = (ROOT / "pyproject.toml").read_text()
    (source / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"', f'version = "{version}"', project, count=1))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "wheel", source)
    [wheel] = (folder / "wheel").glob("fieldfleet-*.whl")
    return wheel


def fetch(library: Path, arch: str, python: str, *wheels: str | Path) -> None:
    """Unpack wheels for a platform and a Python into a folder."""
    platforms = [f"--platform={tag}_{MACHINES[arch]}" for tag in TAGS]
    usual = ("--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", f"--target={library}")
    pins = ROOT / ("constraints-3.10.txt" if python == "3.10" else "constraints.txt")
    version = f"--python-version={python}"
    run(sys.executable, "-m", "pip", "install", *usual, *platforms, version, "-c", pins, *wheels)


def fill(library: Path, package: Package, target: Target, wheel: Path) -> None:
    """Fill a package's library folder for all its Pythons, and leave out what no board runs."""
    oldest, *others = package.pythons
    fetch(library, target.arch, oldest, wheel, *package.wheels)
    for python in others:
        with tempfile.TemporaryDirectory() as scratch:
            fetch(Path(scratch), target.arch, python, *EACH)
            for path in Path(scratch).rglob("*.so"):
                shutil.copy(path, library / path.relative_to(scratch))
    if oldest == "3.10":
        fetch(library.parent / "python3.10/site-packages", target.arch, oldest, *BACKPORTS)
    for name in ("bin", "psutil/tests", *package.others):
        shutil.rmtree(library / name, ignore_errors=True)
    for path in library.parent.rglob("*"):
        if path.name in ("direct_url.json", "REQUESTED") or path.suffix in (".pyi", ".c", ".h"):
            path.unlink()
    drop_missing(library.parent)
    for path in library.parent.rglob("*.so"):
        path.chmod(0o644)


def drop_missing(folder: Path) -> None:
    """Drop the lines of missing files from each RECORD; `direct_url.json`, for one, has another hash in each build."""
    for record in folder.rglob("RECORD"):
        site = record.parents[1]
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if (site / next(csv.reader([line]))[0]).exists()))


def make_environment(home: Path, package: Package) -> Path:
    """Make what `python3 -m venv --without-pip` would, for any of the package's Pythons; return its library folder."""
    library = home / "lib" / "common"
    library.mkdir(parents=True)
    for python in package.pythons:
        own = home / "lib" / f"python{python}" / "site-packages"
        own.mkdir(parents=True)
        (own / "_common.pth").write_text("../../common\n")
        (own / "_setup.pth").write_text(f"{package.home}/extras/current\n")  # what `setup` brings; need not be there
    (home / "bin").mkdir()
    (home / "bin" / "python3").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    return library


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def write_gzip(path: Path, text: str) -> None:
    """Write a file as Debian wants pages and changelogs: packed, without the time of packing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def filled_in(text: str, words: Mapping[str, str]) -> str:
    """Return a text with each `@WORD@` replaced."""
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def lay_files(root: Path, package: Package, target: Target) -> None:
    """Lay all but Python: launcher, units, rules, pages, completion, examples."""
    share, doc = root / "usr/share", root / "usr/share/doc" / package.name
    module = package.command.replace("-", "_")
    words = {"HOME": package.home, "MODULE": module, "COMMAND": package.command, "PACKAGE": package.name}
    words |= {"FIRST": package.pythons[0], "LAST": package.pythons[-1], "STATE": f"/var/lib/{package.user}"}
    launcher = filled_in((HERE / "launcher.sh").read_text(), words)
    write(root / "usr/bin" / package.command, launcher, 0o755)
    for source, place in laid_of(package).items():
        write(root / place, (ROOT / "deploy" / source).read_text())
    day = datetime.fromtimestamp(target.epoch, UTC)
    pages = [sys.executable, HERE / "pages.py"]
    page = run(*pages, "man", package.command, target.version, f"{day:%Y%m%d}")
    write_gzip(share / "man/man1" / f"{package.command}.1.gz", page)
    write(share / "bash-completion/completions" / package.command, run(*pages, "completion", package.command))
    write(share / "lintian/overrides" / package.name, (package.folder / "lintian-overrides").read_text())
    write(doc / "copyright", (HERE / "copyright").read_text())
    heading = f"{package.name} ({target.full_version}) stable; urgency=medium"
    closing = f" -- {MAINTAINER}  {day:%a, %d %b %Y %H:%M:%S} +0000"
    changes = f"{heading}\n\n  * See CHANGELOG.md of this version, which lies beside this file.\n\n{closing}\n"
    write_gzip(doc / "changelog.gz", changes)
    write_gzip(doc / "CHANGELOG.md.gz", (ROOT / "CHANGELOG.md").read_text())


def laid_of(package: Package) -> dict[str, str]:
    """Return which file of `deploy` a package lays where."""
    units, doc = "lib/systemd/system", f"usr/share/doc/{package.name}/examples"
    if package is AGENT:
        return {
            "systemd/fieldfleet-agent.service": f"{units}/fieldfleet-agent.service",
            "systemd/fieldfleet-upgrade.service": f"{units}/fieldfleet-upgrade.service",
            "systemd/fieldfleet-upgrade.path": f"{units}/fieldfleet-upgrade.path",
            "udev/60-fieldfleet.rules": "lib/udev/rules.d/60-fieldfleet.rules",
            "udev/fieldfleet.conf": "usr/lib/tmpfiles.d/fieldfleet-agent.conf",
            "gateway/agent.toml": f"{doc}/agent.toml",
        }
    return {
        "systemd/fieldfleet-server.service": f"{units}/fieldfleet-server.service",
        "systemd/fieldfleet-enrolment.service": f"{units}/fieldfleet-enrolment.service",
        "systemd/fieldfleet-check.service": f"{units}/fieldfleet-check.service",
        "systemd/fieldfleet-check.timer": f"{units}/fieldfleet-check.timer",
        "systemd/mosquitto.conf": f"{units}/mosquitto.service.d/fieldfleet.conf",
        "gateway/server.toml": f"{doc}/server.toml",
        "gateway/trial.toml": f"{doc}/trial.toml",
        "gateway/mosquitto.conf": f"{doc}/mosquitto.conf",
    }


def write_control(root: Path, package: Package, target: Target) -> None:
    """Write what dpkg is told of the package."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    size = sum(-(-path.stat().st_size // 1024) for path in files) + sum(1 for path in root.rglob("*") if path.is_dir())
    major, minor = map(int, package.pythons[-1].split("."))
    words = {
        "VERSION": target.full_version,
        "MAINTAINER": MAINTAINER,
        "ARCH": target.arch,
        "SIZE": str(size),
        "HOME": f"{package.home}/{target.version}",
        "VERSIONS": package.home,
        "PACKAGE": package.name,
        "SERVICES": " ".join(package.services),
        "USER": package.user,
        "STATE": f"/var/lib/{package.user}",
        "CONFIG": package.config,
        "GROUPS": package.groups,
        "JOINED": package.joined,
        "PYTHON": package.pythons[0],
        "NEXT": f"{major}.{minor + 1}",
    }
    sums = "".join(f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files)  # noqa: S324
    for name in ("control", "postinst", "prerm", "postrm"):
        text = (package.folder / name if name == "control" else HERE / name).read_text()
        write(root / "DEBIAN" / name, filled_in(text, words), 0o644 if name == "control" else 0o755)
    write(root / "DEBIAN" / "md5sums", sums)


def build(package: Package, target: Target, wheel: Path, out: Path) -> Path:
    """Build one package; return its file.

    Args:
        out: Folder of the file.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        home = root / package.home.lstrip("/") / target.version
        fill(make_environment(home, package), package, target, wheel)
        for link in ("current", "updater") if package is AGENT else ("current",):
            (home.parent / link).symlink_to(target.version)
        lay_files(root, package, target)
        (root / "etc/fieldfleet").mkdir(parents=True)
        write_control(root, package, target)
        for path in root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
            os.utime(path, (target.epoch, target.epoch), follow_symlinks=False)
        root.chmod(0o755)
        out.mkdir(parents=True, exist_ok=True)
        file = out / f"{package.name}_{target.full_version}_{target.arch}.deb"
        os.environ["SOURCE_DATE_EPOCH"] = str(target.epoch)
        run("dpkg-deb", "--root-owner-group", "-Zxz", "-z9", "--build", root, file)
    return file


def main() -> None:
    """Build what is asked for, and say what it takes."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "deb")
    parser.add_argument("--arch", choices=MACHINES, action="append")
    parser.add_argument("--only", choices=("agent", "server"))
    parser.add_argument("--version", default=version, help="to show upgrades; default: %(default)s")
    options = parser.parse_args()
    epoch = int(run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip())
    with tempfile.TemporaryDirectory() as scratch:
        wheel = make_wheel(Path(scratch), options.version)
        for arch in options.arch or MACHINES:
            for package in (AGENT, SERVER):
                if options.only in (None, package.folder.name):
                    target = Target(arch, options.version, epoch)
                    file = build(package, target, wheel, options.out)
                    sys.stdout.write(f"{file}: {file.stat().st_size / 1e6:.2f} MB\n")


if __name__ == "__main__":
    main()
