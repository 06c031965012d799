"""Fresh systems to install packages on: a cached Debian of each processor, and a throw-away layer over it.

Needs root, debootstrap, overlayfs, and for arm64 qemu-user-static and proot. All mounts are in a name space of this
process alone, so that they go with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree, which
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "install"
NEEDED = "python3,adduser,ca-certificates,init-system-helpers,systemd,systemd-sysv,dbus,udev,curl,sudo"
"""What an installer, or Raspberry Pi OS, has put on every system; the rest is as bare as debootstrap makes it."""
REACHED = ("mosquitto", "python3-pip-whl")
"""Packages of Debian that are in apt's cache, so that they can be had without a network, and are not installed."""
RELEASES = {"12": "bookworm", "13": "trixie", "22.04": "jammy", "24.04": "noble", "26.04": "resolute"}
"""Of Debian, and of Ubuntu."""
UBUNTU = "http://archive.ubuntu.com/ubuntu"
UBUNTU_SCRIPT = Path("/usr/share/debootstrap/scripts/gutsy")
"""Debootstrap's for every Ubuntu; it knows by name only those that are older than itself."""
GATEWAY = "gateway.local"
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
UNTOLD = (
    "/var/lib/dpkg/",
    "/var/lib/apt/",
    "/var/cache/",
    "/var/log/",
    "/proc/",
    "/sys/",
    "/dev/",
    "/share/",
    "/run/",
    "/var/tmp/systemd-private-",  # noqa: S108 - not one of ours
    "/tmp/perf-",  # noqa: S108 - of the emulator, for each process that it runs
    "/tmp/torchinductor_",  # noqa: S108 - of a trainer's torch; under systemd the service's /tmp is its own
)
"""Where dpkg and apt keep their own books, and what is not of the system."""

CPUINFO = """processor\t: {number}
BogoMIPS\t: 108.00
Features\t: {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {part}
CPU revision\t: 3
"""
"""Of one emulated CPU. ONNX Runtime crashes with this machine's own, and where there are fewer than in /sys."""


class Cpu(NamedTuple):
    """A processor of a board, as Linux tells of it.

    Attributes:
        part: Number of its design.
        features: What it can do; Raspberry Pi 3 and 4 have no atomic instructions.
    """

    part: str
    features: str


CPUS = {
    "cortex-a53": Cpu("0xd03", "fp asimd evtstrm crc32 cpuid"),
    "cortex-a72": Cpu("0xd08", "fp asimd evtstrm crc32 cpuid"),
    "cortex-a76": Cpu(
        "0xd0b", "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
    ),
}
"""Of Raspberry Pi 3 and Zero 2 W, 4, and 5."""

BOOKS = ("/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-")


def in_own_mounts(program: str) -> None:
    """Start this program, by its module's name, anew in a name space of mounts of its own, unless it is in one."""
    if os.environ.get("FIELDFLEET_MOUNTS") != "own":
        os.environ["FIELDFLEET_MOUNTS"] = "own"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", program, *sys.argv[1:]])


def without_network() -> None:
    """Leave this process, and all that it starts from now on, loopback alone: ports are then nobody else's."""
    clone_newnet, set_flags, up = 0x40000000, 0x8914, 0x1
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newnet):
        raise OSError(ctypes.get_errno(), "no network name space of one's own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, set_flags, struct.pack("16sh14x", b"lo", up))


def make_base(arch: str, release: str = "12") -> Path:
    """Return the cached system of a processor and a Debian, made if it is not there."""
    if arch == "arm64":
        subprocess.run(["sh", "tests/arm/board.sh", "root", release], cwd=ROOT, check=True)
        return ROOT / "build" / "arm" / ("root" if release == "12" else f"root-{release}")
    base = BUILD / f"{arch}-{release}.root"
    made, told = base / ".made", f"{NEEDED} {REACHED}"
    if not made.exists() or made.read_text() != told:
        rmtree(base, ignore_errors=True)
        debs = BUILD / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        usual = ("--variant=minbase", f"--include={NEEDED}", f"--arch={arch}", f"--cache-dir={debs}")
        where = [RELEASES[release], str(base), *([UBUNTU, str(UBUNTU_SCRIPT)] if "." in release else [])]
        usual = (*usual, *(["--components=main,universe", *_trusting()] if "." in release else []))
        subprocess.run(["debootstrap", *usual, *where], check=True, stdout=subprocess.DEVNULL)
        for words in (["update"], ["install", "-y", "--download-only", *REACHED]):
            command = ["chroot", str(base), "/usr/bin/env", "-i", *environment(), "apt-get", "-q", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made.write_text(told)
    return base


def download(base: Path, *packages: str) -> None:
    """Put packages of a cached system's release into its apt's cache, for systems that are laid over it."""
    words = ("install", "-y", "--no-install-recommends", "--download-only", *packages)
    command = ["chroot", str(base), "/usr/bin/env", "-i", *environment(), "apt-get", "-q", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _trusting() -> list[str]:
    """Return how debootstrap checks Ubuntu's signature: not at all where its keyring is not installed."""
    keyring = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
    return [f"--keyring={keyring}"] if keyring.exists() else ["--no-check-gpg"]


def show_outside(system: System, place: str) -> None:
    """Show a folder of an emulated system at the same path outside, in this process's mounts alone.

    The emulator passes `faccessat2` on untranslated, so that `os.access` there looks at the path outside.
    """
    if system.arch == "arm64":
        subprocess.run(["mount", "--bind", str(system.root / place.lstrip("/")), place], check=True)


def cpuinfo(cpu: str) -> str:
    """Return what a board with a kind of processor tells of its CPUs, of which it has as many as this machine."""
    told = CPUS[cpu]._asdict()
    return "\n".join(CPUINFO.format(number=number, **told) for number in range(os.cpu_count() or 1))


def environment() -> list[str]:
    """Return what a command in a fresh system finds in its environment."""
    return [f"{key}={value}" for key, value in ENVIRONMENT.items()]


@dataclass
class System:
    """A fresh system; /share is the same folder inside and outside.

    Attributes:
        arch: Its processor, as Debian names it.
        root: Its files, as they are seen from outside.
        share: What it is handed.
        cpu: Which processor is emulated, where one is.
    """

    arch: str
    root: Path
    share: Path
    cpu: str = "cortex-a72"

    def command(self, words: Sequence[str], user: str = "") -> list[str]:
        """Return how a command is run in it."""
        within = ["/usr/bin/env", "-i", *environment(), *words]
        if self.arch == "arm64":  # the processor in software; there every user is root's disguise
            binds = [word for place in ("/dev", "/proc", "/sys") for word in ("-b", place)]
            binds += ["-b", f"{self.share}:/share", "-b", f"{self.share}/cpuinfo:/proc/cpuinfo"]
            emulated = ["proot", "-q", f"qemu-aarch64-static -cpu {self.cpu}", "-0", "-r", str(self.root)]
            return [*emulated, *binds, "-w", "/", *within]
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        return ["chroot", str(self.root), *as_user, *within]

    def run(self, *words: str, user: str = "", code: int = 0) -> str:
        """Run a command in it and return what it printed.

        Args:
            user: As whom; root if empty.
            code: That it must end with.
        """
        done = subprocess.run(self.command(words, user), capture_output=True, text=True, check=False)
        if done.returncode != code:
            raise RuntimeError(f"{' '.join(words)}: code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout + done.stderr

    @contextmanager
    def running(self, *words: str, user: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in it while the block lasts.

        Args:
            log: File that it writes to.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(self.command(words, user), stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # proot does not pass it on to what it runs
            process.wait(120)

    def files(self) -> set[str]:
        """Return all paths but those of dpkg's and apt's books."""
        found = set()
        for folder, folders, names in os.walk(self.root):
            place = "/" + os.path.relpath(folder, self.root).removeprefix(".")
            found |= {f"{place.rstrip('/')}/{name}" for name in (*folders, *names)}
        own = re.compile(
            r"/usr/lib/python3(\.\d+)?/(.*/)?__pycache__/"
        )  # Python compiles its own modules when root runs it
        return {one for one in found if not f"{one}/".startswith(UNTOLD) and one not in BOOKS and not own.match(one)}

    def accounts(self) -> dict[str, list[str]]:
        """Return users and groups, but for those that Debian's own packages leave when they are purged."""
        found = {}
        for name in ("passwd", "group"):
            lines = (self.root / "etc" / name).read_text().splitlines()
            found[name] = sorted(line for line in lines if line.partition(":")[0] not in REACHED)
        return found


def require_tools(*arches: str) -> None:
    """End with what is to be installed where fresh systems cannot be made here."""
    tools = ["debootstrap", *(["proot", "qemu-aarch64-static"] if "arm64" in arches else [])]
    missing = [tool for tool in tools if not which(tool)]
    if os.geteuid() != 0 or missing:
        sys.exit(f"fresh systems need root and {', '.join(missing) or 'its rights'}: as root, apt-get install them")


def fresh(base: Path, name: str, arch: str, *, boots: bool = False, cpu: str = "cortex-a72") -> System:
    """Lay a throw-away system over a cached one; it goes when the next one of that name is laid.

    Args:
        name: Of its folder, and its own.
        boots: Whether systemd will run it, which mounts what it wants and starts what is installed.
        cpu: Which one is emulated, where one is.
    """
    layer = BUILD / f"{name}.layer"
    rmtree(layer, ignore_errors=True)
    upper, work, merged, share = (layer / name for name in ("upper", "work", "root", "share"))
    for folder in (upper, work, merged, share):
        folder.mkdir(parents=True)
    options = f"lowerdir={base},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    system = System(arch, merged, share, cpu)
    (share / "cpuinfo").write_text(cpuinfo(cpu))
    for place in ("proc", "sys", "dev", "share"):
        (merged / place).mkdir(exist_ok=True)
    if arch != "arm64" and not boots:
        for place, source in (("proc", "/proc"), ("sys", "/sys"), ("dev", "/dev"), ("share", str(share))):
            subprocess.run(["mount", "--rbind", source, str(merged / place)], check=True)
    (merged / "etc/hosts").write_text(f"127.0.0.1 localhost {GATEWAY}\n")  # as a router's DNS would say
    (merged / "etc/hostname").write_text(f"{name}\n")
    if not boots:
        policy = merged / "usr/sbin/policy-rc.d"  # nothing that is installed starts by itself
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    return system
