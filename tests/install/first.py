"""Run the pages of deploy/boards word for word: `make first-board BOARD=pi4`.

A bare gateway and a bare board have no network but loopback, and no systemd: `systemctl start` runs what the unit says.
The board's processor is emulated, but for a PC's. What the pages leave to the reader is done here: the packages are
copied, the board has examples, and the line that the gateway printed is pasted.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared.runtime.support.table import Purpose
from tests.install.check import Fleet, await_device, require_rounds
from tests.install.image import index
from tests.install.parts import build_packages, chosen_wheels, fetch_wheels, hand, kind_of
from tests.install.roots import (
    ROOT,
    System,
    fresh,
    in_own_mounts,
    make_base,
    require_tools,
    show_outside,
    without_network,
)

PAGES = ROOT / "deploy" / "boards"
BLOCK = re.compile(r"^```sh (gateway|board)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PASTED, MORE = "# the line of: edge-server enrol", "# followed by: "
SYSTEMCTL = """#!/bin/sh
# In place of systemd: runs what a unit says.
[ "$1" = start ] && [ "$2" = fieldfleet-server ] || exit 0
exec setpriv --reuid=fieldfleet-server --regid=fieldfleet-server --init-groups \\
    edge-server run --config /etc/fieldfleet/server.toml
"""
SUDO = """#!/bin/sh
# The emulator gives every program root's rights already.
exec "$@"
"""


class Kind(NamedTuple):
    """A board of the pages."""

    page: str
    arch: str
    release: str
    cpu: str
    purpose: Purpose = "train"


BOARDS = {
    "pi3": Kind("raspberry-pi", "arm64", "13", "cortex-a53"),
    "pi4": Kind("raspberry-pi", "arm64", "12", "cortex-a72"),
    "pi5": Kind("raspberry-pi", "arm64", "13", "cortex-a76"),
    "zero2w": Kind("raspberry-pi", "arm64", "12", "cortex-a53", "infer"),
    "arm": Kind("arm", "arm64", "13", "cortex-a76"),
    "pc": Kind("pc", "amd64", "12", "cortex-a72"),
}


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield where each block of a page is typed, and its text."""
    for found in BLOCK.finditer((PAGES / f"{page}.md").read_text()):
        yield found[1], found[2].strip()


@dataclass
class Reader:
    """Who types what the pages say.

    Attributes:
        purpose: What the board is for.
        line: That the gateway printed for the board.
        typed: How many commands were typed on the board.
    """

    systems: dict[str, System]
    purpose: Purpose
    line: str = ""
    typed: int = 0

    def types(self, where: str, text: str) -> str:
        """Type a block, and return what it printed."""
        if text.startswith(PASTED):
            more = text.partition(MORE)[2].strip()
            text = f"{self.line} {'--infer' if self.purpose == 'infer' else more}"
        begun = time.monotonic()
        told = self.systems[where].run("bash", "-ec", f"cd /share && {text}")
        if found := [line for line in told.splitlines() if "install.sh" in line and "ff1," in line]:
            self.line = found[0]
        self.typed += len(text.splitlines()) if where == "board" else 0
        shown = re.sub(r"ff1,[^ ]+", "TOKEN", text)
        print(f"{time.monotonic() - begun:7.1f} s  {where}$ {shown}", flush=True)  # noqa: T201 - a command of ours
        return told


def prepare(kind: Kind) -> Fleet:
    """Return a bare gateway and a bare board, with what their owner brings."""
    server, own = kind_of("amd64", "12"), kind_of(kind.arch, kind.release, kind.cpu)
    packages = {"server": build_packages("server", "amd64"), "agent": build_packages("agent", kind.arch)}
    places = fetch_wheels(server, "server"), chosen_wheels(server, "server")
    wheels, names = fetch_wheels(own, kind.purpose), chosen_wheels(own, kind.purpose)
    bases = make_base("amd64"), make_base(kind.arch, kind.release)
    gateway = fresh(bases[0], f"gateway-first-{kind.page}", "amd64")
    board = fresh(bases[1], f"first-{kind.page}", kind.arch, cpu=kind.cpu)
    hand(gateway, {"": packages["server"][""]}, places)
    offered = gateway.share / "packages"
    offered.mkdir()
    shutil.copy(packages["agent"][""], offered)
    for one in names:
        shutil.copy(wheels / one.file, offered)
    lay(gateway, "usr/local/bin/systemctl", SYSTEMCTL)
    if kind.arch == "arm64":  # Raspberry Pi OS has both
        (board.root / "etc/apt/apt.conf.d/90root").write_text('APT::Sandbox::User "root";\n')
        (board.root / "etc/resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
        board.run("apt-get", "-q", "update")
        board.run("apt-get", "-q", "-y", "install", "--no-install-recommends", "curl")
        lay(board, "usr/bin/sudo", SUDO)
    drawn = np.random.default_rng(0)
    inputs = drawn.normal(size=(200, 64)).astype(np.float32)
    np.savez(board.root / "srv/examples.npz", x=inputs, y=inputs[:, :10].argmax(1))
    (board.root / "srv/examples.npz").chmod(0o644)
    show_outside(board, "/srv")
    return Fleet(gateway, board, packages, ExitStack(), kind.purpose)


def lay(system: System, path: str, text: str) -> None:
    """Write a program into a system."""
    place = system.root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)


def read(kind: Kind) -> None:
    """Do what the pages say, from the first line to the first round."""
    fleet, begun = prepare(kind), time.monotonic()
    without_network()
    for system in (fleet.gateway, fleet.board):
        with (system.root / "etc/hosts").open("a") as hosts:  # as mDNS would say
            hosts.write(f"127.0.0.1 {socket.gethostname()}.local\n")
    reader = Reader({"gateway": fleet.gateway, "board": fleet.board}, kind.purpose)
    with index(fleet.gateway.share / "wheels") as address, fleet.services:
        (fleet.gateway.root / "etc/pip.conf").write_text(f"[global]\nindex-url = {address}\n")
        *before, last = blocks("gateway")
        for where, text in before:
            reader.types(where, text)
            if "site init" in text:
                fleet.run_site()
        for where, text in blocks(kind.page):
            reader.types(where, text)
        with fleet.run_agent():
            if kind.purpose == "train":
                reader.types(*last)
                require_rounds(fleet.gateway, "first")
            else:
                await_device(fleet)
    done = "to the first rounds" if kind.purpose == "train" else "until the gateway sees it"
    told = f"{reader.typed} commands on the board, {time.monotonic() - begun:.0f} s {done}"
    print(told)  # noqa: T201 - a command of ours


def main() -> None:
    """Read the page of a board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", choices=BOARDS)
    kind = BOARDS[parser.parse_args().board]
    require_tools(kind.arch)
    in_own_mounts("tests.install.first")
    read(kind)


if __name__ == "__main__":
    main()
