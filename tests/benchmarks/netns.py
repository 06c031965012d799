"""A board behind a slow link: a network namespace with a token bucket at both ends. Needs root.

A token bucket filter keeps its rate best, but takes seconds to act when it is given another one. A class of a
hierarchical token bucket takes it at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.203"
PAYLOAD_SHARE = 1448 / 1514
"""TCP's payload in a full packet: 14 bytes of it are Ethernet's, 20 IP's, 32 TCP's with its time stamps."""
BURST, QUEUE = "16kb", "96kb"
MOST = 4
GONE_S = 5.0


@dataclass(frozen=True)
class SlowLink:
    """A namespace and the link to it, of one name.

    Attributes:
        address: Of this end, where a broker may listen.
    """

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command that is to run on the board."""
        return ("ip", "netns", "exec", self.name)

    @property
    def ends(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """The way to either end's queues: what to call, and the device."""
        return (("tc",), self.name), (("tc", "-n", self.name), "board")

    def set(self, state: str) -> None:
        """Take the link `down` or `up`."""
        _run("ip", "link", "set", self.name, state)

    def change(self, rate: str) -> None:
        """Pass another rate from now on; only for a link that was made to change."""
        for tc, device in self.ends:
            _run(*tc, "class", "change", "dev", device, *_class(rate))

    def carried(self) -> tuple[int, int]:
        """Return the bytes so far, with all headers: to the board, and from it."""
        folder = Path("/sys/class/net") / self.name / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def lack() -> str:
    """Return why no slow link can be made here; empty where one can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} of iproute2 not installed"
    try:
        with slow_link("1mbit"):
            return ""
    except OSError as error:
        return f"no network namespace can be made here: {error}"


@contextmanager
def slow_link(rate: str, number: int = 0, *, changes: bool = False, burst: str = BURST) -> Iterator[SlowLink]:
    """Make a namespace whose link passes `rate` (such as `800kbit`) each way; it is gone after the block.

    Args:
        rate: As `tc` takes it.
        number: Which of the up to `MOST` links of this process it is.
        changes: Whether the rate can be changed.
        burst: What goes at once after a silence.

    Raises:
        OSError: This machine makes no such link.
    """
    block = (os.getpid() * MOST + number) % (1 << 14) * 4  # a network of four addresses for each link
    here, there = (f"{NETWORK}.{place >> 8}.{place & 255}" for place in (block + 1, block + 2))
    link = SlowLink(f"ffr{os.getpid() % 100000}.{number}", here)
    name, inside = link.name, ("ip", "-n", link.name)
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "board", "netns", name)
        _run("ip", "address", "add", f"{here}/30", "dev", name)
        link.set("up")
        _run(*inside, "address", "add", f"{there}/30", "dev", "board")
        _run(*inside, "link", "set", "board", "up")
        _run(*inside, "link", "set", "lo", "up")
        for tc, device in link.ends:
            _shape(tc, device, rate, burst, changes=changes)
        yield link
    finally:
        _run("ip", "netns", "delete", name)
        _until_gone(Path("/sys/class/net") / name)


def _until_gone(device: Path) -> None:
    """The kernel takes a namespace's devices away a little later; the name may be wanted again."""
    until = time.monotonic() + GONE_S
    while device.exists() and time.monotonic() < until:
        time.sleep(0.01)


def _shape(tc: tuple[str, ...], device: str, rate: str, burst: str, *, changes: bool) -> None:
    add = (*tc, "qdisc", "add", "dev", device)
    if not changes:
        _run(*add, "root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
        return
    _run(*add, "root", "handle", "1:", "htb", "default", "1")
    _run(*tc, "class", "add", "dev", device, *_class(rate))
    _run(*add, "parent", "1:1", "bfifo", "limit", QUEUE)


def _class(rate: str) -> tuple[str, ...]:
    return ("parent", "1:", "classid", "1:1", "htb", "rate", rate, "burst", BURST, "cburst", BURST, "quantum", "3028")


def _run(*command: str) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise OSError(f"{' '.join(command)}: exit code {code}")
