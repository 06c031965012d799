"""A board behind a slow link: a network namespace with a token bucket at both ends. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE, THERE = "10.203.77.1", "10.203.77.2"


@dataclass(frozen=True)
class SlowLink:
    """A namespace and the link to it, of one name.

    Attributes:
        name: Of both.
        address: Of this end, where a broker may listen.
    """

    name: str
    address: str = HERE

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command that is to run on the board."""
        return ("ip", "netns", "exec", self.name)

    def set(self, state: str) -> None:
        """Take the link `down` or `up`."""
        _run("ip", "link", "set", self.name, state)

    def carried(self) -> tuple[int, int]:
        """Return the bytes so far, with all headers: to the board, and from it."""
        folder = Path("/sys/class/net") / self.name / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


@contextmanager
def slow_link(rate: str) -> Iterator[SlowLink]:
    """Make a namespace whose link passes `rate` (such as `800kbit`) each way; it is gone after the block."""
    link = SlowLink(f"ffr{os.getpid() % 100000}")
    name, inside = link.name, ("ip", "-n", link.name)
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "board", "netns", name)
        _run("ip", "address", "add", f"{HERE}/30", "dev", name)
        link.set("up")
        _run(*inside, "address", "add", f"{THERE}/30", "dev", "board")
        _run(*inside, "link", "set", "board", "up")
        _run(*inside, "link", "set", "lo", "up")
        bucket = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        _run("tc", "qdisc", "add", "dev", name, *bucket)
        _run("tc", "-n", name, "qdisc", "add", "dev", "board", *bucket)
        yield link
    finally:
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
