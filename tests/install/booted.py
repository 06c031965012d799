"""Fresh systems whose process 1 is systemd: containers of systemd-nspawn that share this process's loopback.

Their kernel is this machine's. Where that gives no memory controller to containers, limits of memory are not looked at.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from tests.install.roots import System, environment

PATIENCE_S = 300.0
LOOK_S = 0.2


def require_nspawn() -> None:
    """End with what is to be installed where there is no systemd-nspawn."""
    if not which("systemd-nspawn"):
        sys.exit("BOOT=1 needs systemd-nspawn: as root, apt-get install systemd-container")


@dataclass
class Booted(System):
    """A system that systemd runs.

    Attributes:
        words: The command that boots it.
        nspawn: What holds it, until it reboots or ends.
    """

    words: tuple[str, ...] = ()
    nspawn: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Boot it, and wait until it is up."""
        with (self.share / "console.log").open("ab") as console:
            self.nspawn = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        self.await_up()

    def leader(self) -> int:
        """Return the process id, out here, of its process 1.

        Raises:
            LookupError: It has none, as between two boots.
        """
        waiting = [self.nspawn.pid] if self.nspawn else []
        while waiting:
            pid = waiting.pop()
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[2:] == ["1"]:
                        return pid
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        raise LookupError("no process 1")

    def command(self, words: Sequence[str], user: str = "") -> list[str]:
        """Return how a command is run in it."""
        within = ("--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wdns=/")
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        entered = ["nsenter", f"--target={self.leader()}", *within]
        return [*entered, *as_user, "/usr/bin/env", "-i", *environment(), *words]

    def property(self, unit: str, name: str) -> str:
        """Return what systemd says of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def await_so(self, unit: str, **wanted: str) -> None:
        """Wait until systemd says this of a unit, told as property=value.

        Raises:
            TimeoutError: It does not.
        """
        found, limit = dict[str, str](), time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            found = {name: self.property(unit, name) for name in wanted}
            if found == wanted:
                return
            time.sleep(LOOK_S)
        said = self.run("journalctl", "--no-pager", "--lines=30", f"--unit={unit}")
        raise TimeoutError(f"{unit}: {found}, not {wanted}\n{said}")

    def await_up(self) -> None:
        """Wait until it has started all that it starts by itself."""
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            with suppress(LookupError, OSError):
                asked = self.command(("systemctl", "is-system-running"))
                done = subprocess.run(asked, capture_output=True, text=True, check=False)
                if done.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(LOOK_S)
        raise TimeoutError("it does not come up")

    def reboot(self) -> None:
        """Restart it, and wait until it is up again; its container ends for that, and is started anew."""
        assert self.nspawn
        self.run("systemctl", "--no-block", "reboot")
        self.nspawn.wait(PATIENCE_S)
        self.start()

    def stop(self) -> None:
        """End it in good order."""
        if self.nspawn:
            self.nspawn.terminate()  # which is passed on to process 1
            self.nspawn.wait(PATIENCE_S)


@contextmanager
def booted(system: System, name: str) -> Iterator[Booted]:
    """Boot a system while the block lasts.

    Args:
        system: Whose files they are, laid without mounts of their own.
    """
    told = ("--quiet", "--boot", "--register=no", "--keep-unit", "--resolv-conf=off", "--link-journal=no")
    places = (f"--directory={system.root}", f"--bind={system.share}:/share", f"--machine=fieldfleet-{name}")
    found = Booted(system.arch, system.root, system.share, words=("systemd-nspawn", *told, *places))
    try:
        found.start()
        yield found
    finally:
        found.stop()
