"""Set up a gateway and a board from bare systems, train, serve, upgrade, purge: `make fresh [ARCH=arm64] [RELEASE=13]`.

The gateway is a Debian 12, the board a Debian or Ubuntu; on arm64 its processor is emulated. Neither has a network but
loopback. Nothing but what an operator types is done in them, counted and timed, but that here is no systemd: what it
would start, this starts as the units say (`BOOT=1` has one). Wheels come from a folder, as on a site without internet.
A board whose PyTorch is on no index that is in reach here serves a model and trains nothing; so does one that is told
`PURPOSE=infer`. With `PURPOSE=apt` it trains by the PyTorch of its Debian or Ubuntu, on an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_connection

from shared.errors import ConfigError
from shared.runtime.support.table import Purpose
from tests.install.booted import Booted, booted, require_nspawn
from tests.install.parts import (
    NEXT,
    PLAN,
    build_packages,
    chosen_wheels,
    fetch_wheels,
    hand,
    kind_of,
    make_release,
    write_examples,
)
from tests.install.roots import (
    CPUS,
    GATEWAY,
    RELEASES,
    System,
    download,
    fresh,
    in_own_mounts,
    make_base,
    require_tools,
    without_network,
)
from tests.install.units import check_units

PATIENCE_S = 1800.0
BROKER, ENROLMENT = 8883, 8443
SITE = "/etc/fieldfleet/site"
ROUNDS = 3
RUNS = "/var/lib/fieldfleet-server/runs"
TORCH_PACKAGE = "python3-torch"
BOARD = "pi-01"


@dataclass
class Operator:
    """Who types commands, each of which is shown, counted and timed.

    Attributes:
        began: Monotonic seconds.
        commands: How many were typed so far.
    """

    began: float = field(default_factory=time.monotonic)
    commands: int = 0

    def types(self, where: str, system: System, *words: str, user: str = "") -> str:
        """Type a command, and return what it printed.

        Args:
            where: What the system is called.
            user: As whom; root if empty.
        """
        begun = time.monotonic()
        told = system.run(*words, user=user)
        self.commands += 1
        shown = re.sub(r"ff1,[^ ]+", "TOKEN", " ".join(words))
        self.tells(f"{self.commands}. {where}# {shown}", begun)
        return told

    def tells(self, told: str, begun: float) -> None:
        """Say what was done since a moment."""
        sys.stdout.write(f"{time.monotonic() - begun:7.1f} s  {told}\n")
        sys.stdout.flush()


@dataclass
class Fleet:
    """A gateway, a board, and what systemd would run in them.

    Attributes:
        packages: By side and version.
        purpose: What the board is set up for.
        by_apt: Whether the PyTorch that trains is a package of the board's system.
    """

    gateway: System
    board: System
    packages: dict[str, dict[str, Path]]
    services: ExitStack
    purpose: Purpose = "train"
    by_apt: bool = False

    @property
    def one_line(self) -> bool:
        """Whether the board is brought up by the gateway's one line, and not by commands of its own."""
        return self.board.arch != "arm64" and not self.by_apt

    def run_site(self) -> None:
        """Run the gateway's services, as `site init` has systemd do where there is one."""
        if isinstance(self.gateway, Booted):
            return
        self.gateway.run("install", "-d", "-o", "mosquitto", "/run/mosquitto")  # RuntimeDirectory=
        broker = ("mosquitto", "-c", "/etc/mosquitto/mosquitto.conf")
        enrolment = ("edge-server", "enrolment-service")
        for words, user in ((broker, "mosquitto"), (enrolment, "fieldfleet-server")):
            log = self.gateway.share / f"{words[0]}.log"
            self.services.enter_context(self.gateway.running(*words, user=user, log=log))
        for port in (BROKER, ENROLMENT):
            await_port(port)

    def run_agent(self) -> ExitStack:
        """Run the board's service, as `join` has systemd do where there is one."""
        words = ("device-agent", "run", "--config", "/etc/fieldfleet/agent.toml")
        stack = ExitStack()
        if not isinstance(self.board, Booted):
            stack.enter_context(self.board.running(*words, user="fieldfleet", log=self.board.share / "agent.log"))
        return stack


def await_port(port: int) -> None:
    """Wait until somebody listens at a port of loopback."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        with suppress(OSError), create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {port}")


def install(system: System, *names: str) -> tuple[str, ...]:
    """Return the command that installs packages; a system without recommended ones in reach leaves them out."""
    return ("apt-get", "-q", "-y", *(["--no-install-recommends"] * (system.arch == "arm64")), "install", *names)


def make_site(operator: Operator, fleet: Fleet) -> str:
    """Install the gateway and make its site; return a token for the board."""
    gateway, deb = fleet.gateway, f"/share/{fleet.packages['server'][''].name}"
    operator.types("gateway", gateway, *install(gateway, deb, "mosquitto"))
    operator.types("gateway", gateway, "edge-server", "setup", "--from", "/share/wheels")
    site = ("--name", "roof", "--address", GATEWAY, "--packages", "/share/wheels")
    operator.types("gateway", gateway, "edge-server", "site", "init", *site[: None if fleet.one_line else 4])
    fleet.run_site()
    words = ("edge-server", "enrol", BOARD, *["--install"] * fleet.one_line)
    return operator.types("gateway", gateway, *words).strip()


def bring_board(operator: Operator, fleet: Fleet, token: str) -> None:
    """Install the board, and have it join: by the gateway's one line, or, emulated without curl, by three commands."""
    board, deb = fleet.board, f"/share/{fleet.packages['agent'][''].name}"
    if fleet.one_line:
        line = next(one for one in token.splitlines() if "install.sh" in one)
        purpose = "--infer" if fleet.purpose == "infer" else "--data /srv/examples.npz"
        operator.types("board", board, "bash", "-c", f"cd && {line} {purpose}")
        board.run("rm", "/root/install.sh")
        return
    operator.types("board", board, *install(board, deb))
    operator.types("board", board, "device-agent", "setup", fleet.purpose, "--from", "/share/wheels")
    operator.types("board", board, "device-agent", "join", token, "--data", "/srv/examples.npz")
    if fleet.by_apt:
        operator.types("board", board, "apt-get", "-q", "-y", "--no-install-recommends", "install", TORCH_PACKAGE)
        told = "printf '[trainer]\\npython = \"/usr/bin/python3\"\\n' >> /etc/fieldfleet/agent.toml"
        operator.types("board", board, "sh", "-c", told)


def learn(operator: Operator, fleet: Fleet, name: str = "fresh") -> None:
    """Start the server, and see that every round was learned from."""
    gateway = fleet.gateway
    (gateway.root / SITE[1:] / "plan.toml").write_text(PLAN.replace("fresh", name))
    if isinstance(gateway, Booted):
        operator.types("gateway", gateway, "systemctl", "start", "fieldfleet-server")
        gateway.await_so("fieldfleet-server", ActiveState="inactive", Result="success")
    else:
        words = ("edge-server", "run", "--config", "/etc/fieldfleet/server.toml")
        operator.types("gateway", gateway, *words, user="fieldfleet-server")
    require_rounds(gateway, name)


def require_rounds(gateway: System, name: str) -> None:
    """Check that the newest run of a plan aggregated the board's update in every round.

    Args:
        gateway: Where the run is recorded.
        name: Name of the plan.
    """
    newest = max((gateway.root / RUNS[1:]).glob(f"{name}-*")).name
    command = ("edge-server", "show", "--format", "json", "--data-dir", RUNS, newest)
    rounds = json.loads(gateway.run(*command, user="fieldfleet-server"))["rounds"]
    arrived = [(record["outcome"], record["arrived"]) for record in rounds]
    assert arrived == [("aggregated", [BOARD])] * ROUNDS, rounds


def serve(operator: Operator, fleet: Fleet) -> None:
    """Have the board serve a model to an application on it."""
    words = ("device-agent", "bench-inference", "--release", "/share/release", "--seconds", "1", "--format", "json")
    told = operator.types("board", fleet.board, *words)
    assert json.loads(told[told.index("{") :])["requests"] > 0, told


def await_device(fleet: Fleet) -> None:
    """Wait until the gateway sees the board."""
    asked = ("edge-server", "devices", "--config", "/etc/fieldfleet/server.toml", "--format", "json")
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        devices = json.loads(fleet.gateway.run(*asked, user="fieldfleet-server"))["devices"]
        if [one["device"] for one in devices if one["online"]] == [BOARD]:
            return
        time.sleep(1)
    raise TimeoutError("the gateway does not see the board")


def work(operator: Operator, fleet: Fleet, name: str) -> None:
    """Have the board do what it was set up for: train, or be seen by the gateway; and serve."""
    with fleet.run_agent():
        if fleet.purpose == "train" or fleet.by_apt:
            learn(operator, fleet, name)
        else:
            await_device(fleet)
    serve(operator, fleet)


def upgrade(operator: Operator, fleet: Fleet) -> None:
    """Upgrade both, and check what is kept and what is gone."""
    for side, system, home in (("agent", fleet.board, "fieldfleet"), ("server", fleet.gateway, "fieldfleet-server")):
        config, state = system.root / "etc/fieldfleet", system.root / "var/lib" / home
        kept = {path: path.read_bytes() for path in config.rglob("*") if path.is_file()}
        names = {path.name for path in state.iterdir()}
        old = (system.root / "opt" / home / "current").readlink()
        operator.types(side, system, *install(system, f"/share/{fleet.packages[side][NEXT].name}"))
        command = "device-agent" if side == "agent" else "edge-server"
        assert NEXT in system.run(command, "--version")
        assert all(path.read_bytes() == data for path, data in kept.items()), "an upgrade changes an operator's files"
        assert names == {path.name for path in state.iterdir()}
        assert not (system.root / "opt" / home / old).exists()


def purge(system: System, before: tuple[set[str], dict[str, list[str]]], *packages: str) -> None:
    """Purge packages with what came along, and see that all is as it was before."""
    system.run("apt-get", "-q", "-y", "purge", "--autoremove", *packages)
    files, accounts = before
    left = sorted(system.files() - files)
    assert not left, f"a purge leaves {left[:20]}"
    taken = files - system.files() - {"/opt"}  # which dpkg takes where nothing is in it any more
    assert not taken, f"a purge takes what was not the package's: {taken}"
    assert system.accounts() == accounts, "a purge leaves users or groups"


def lay(board_is: Wanted) -> Fleet:
    """Return two fresh systems with all that comes by a network in reach of them; booted they are later."""
    begun, arch = time.monotonic(), board_is.arch
    bases = [make_base("amd64"), make_base(arch, board_is.release)]
    packages = {"server": build_packages("server", "amd64"), "agent": build_packages("agent", arch)}
    server, kind = kind_of("amd64", "12"), kind_of(arch, board_is.release, board_is.cpu)
    by_apt = board_is.purpose == "apt"
    if by_apt:
        download(bases[1], TORCH_PACKAGE)
    purpose: Purpose = "infer" if board_is.purpose == "infer" or by_apt else "train"
    places = [(fetch_wheels(server, "server"), chosen_wheels(server, "server"))]
    try:
        places.append((fetch_wheels(kind, purpose), chosen_wheels(kind, purpose)))
    except ConfigError as error:
        Operator().tells(f"the board does not train here: {error}", begun)
        purpose = "infer"
        places.append((fetch_wheels(kind, purpose), chosen_wheels(kind, purpose)))
    release = make_release()
    without_network()
    told = f"{arch}-{board_is.release}-{'booted' if board_is.boots else board_is.purpose}"
    gateway = fresh(bases[0], f"gateway-{told}", "amd64", boots=board_is.boots)
    board = fresh(bases[1], f"board-{told}", arch, boots=board_is.boots, cpu=board_is.cpu)
    hand(gateway, packages["server"], places[0])
    fleet = Fleet(gateway, board, packages, ExitStack(), purpose, by_apt)
    hand(board, packages["agent"], None if fleet.one_line else places[1])
    shutil.copytree(release, board.share / "release")
    if fleet.one_line:  # what the gateway has for its boards
        shutil.copy(packages["agent"][""], gateway.share / "wheels")
        for one in places[1][1]:
            shutil.copy(places[1][0] / one.file, gateway.share / "wheels")
    Operator().tells("packages are built, what comes by the network is here, two bare systems", begun)
    return fleet


@dataclass(frozen=True)
class Wanted:
    """The board to try.

    Attributes:
        arch: Its processor, as Debian names it.
        release: Its Debian or Ubuntu.
        cpu: Which one is emulated, where one is.
        purpose: What it is set up for: train, infer, or apt to train by its system's PyTorch.
        boots: Whether systemd is process 1 of both systems.
    """

    arch: str
    release: str
    cpu: str
    purpose: str
    boots: bool


def check(board_is: Wanted) -> None:
    """Do it all with one kind of board."""
    fleet = lay(board_is)
    with fleet.services:
        if board_is.boots:
            begun = time.monotonic()
            fleet.gateway = fleet.services.enter_context(booted(fleet.gateway, "gateway"))
            fleet.board = fleet.services.enter_context(booted(fleet.board, "board"))
            Operator().tells("both are booted", begun)
        before = [(system.files(), system.accounts()) for system in (fleet.gateway, fleet.board)]
        begin(fleet)
        if isinstance(fleet.gateway, Booted) and isinstance(fleet.board, Booted):
            check_units(fleet.gateway, fleet.board, Operator().tells)
            learn(Operator(), fleet, "reboot")
        go_on(fleet)
        if not board_is.boots:
            fleet.services.close()
        begun = time.monotonic()
        purge(fleet.gateway, before[0], "fieldfleet-server", "mosquitto")
        if fleet.by_apt:  # what came with it is another package's to leave
            fleet.board.run("apt-get", "-q", "-y", "purge", "fieldfleet-agent")
            assert not [path for path in fleet.board.files() - before[1][0] if "fieldfleet" in path]
        else:
            purge(fleet.board, before[1], "fieldfleet-agent")
        Operator().tells("purged both: nothing is left", begun)


def begin(fleet: Fleet) -> None:
    """From bare systems to the first rounds and a served model."""
    operator = Operator()
    token = make_site(operator, fleet)
    write_examples(fleet.board.root / "srv/examples.npz")
    bring_board(operator, fleet, token)
    work(operator, fleet, "fresh")
    operator.tells(f"from bare systems to that: {operator.commands} commands", operator.began)


def go_on(fleet: Fleet) -> None:
    """Upgrade, and work again."""
    operator = Operator()
    upgrade(operator, fleet)
    work(operator, fleet, "later")
    (fleet.board.root / "srv/examples.npz").unlink()
    operator.tells("upgraded both, and the next version does the same", operator.began)


def main() -> None:
    """Check what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("amd64", "arm64"), default="amd64")
    parser.add_argument("--boot", action="store_true", help="with systemd as process 1 of both; on amd64")
    parser.add_argument("--release", choices=RELEASES, default="12", help="the board's Debian or Ubuntu")
    parser.add_argument("--cpu", choices=CPUS, default="cortex-a72", help="of an emulated board")
    parser.add_argument(
        "--purpose", choices=("train", "infer", "apt"), default="train", help="what the board is set up for"
    )
    options = parser.parse_args()
    if options.boot and (options.arch != "amd64" or options.release != "12"):
        parser.error("an amd64 of Debian 12 boots: proot has no process 1")
    require_tools(options.arch)
    if options.boot:
        require_nspawn()
    in_own_mounts("tests.install.check")
    check(Wanted(options.arch, options.release, options.cpu, options.purpose, options.boot))


if __name__ == "__main__":
    main()
