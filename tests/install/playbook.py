"""Make a gateway and a board of two fresh systems by the Ansible collection: `make fresh ANSIBLE=1`.

Ansible reaches both by its connection `chroot`; services are run from here, since no systemd runs in there. Shown: dry
runs of bare and of finished systems, that a second run changes nothing, that no token is logged, a board that joins and
connects, upgrade, rotation, revocation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from socket import create_server

from tests.install.check import await_port
from tests.install.parts import NEXT, PLAN, build_packages, chosen_wheels, fetch_wheels, hand, kind_of, write_examples
from tests.install.roots import BUILD, ROOT, System, fresh, in_own_mounts, make_base, require_tools

PLAYBOOKS = ROOT / "deploy" / "ansible"
CONNECTION = "community.general.chroot"
MEMBERSHIP = "var/lib/fieldfleet/identity/current/membership.json"
PATIENCE_S = 120.0


class Steps:
    """What is done, with the seconds that it took."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def done(self, told: str) -> None:
        """Tell of a step that is done."""
        now = time.monotonic()
        sys.stdout.write(f"{now - self.last:7.1f} s  {told}\n")
        sys.stdout.flush()
        self.last = now


def free_port() -> int:
    """Return a port of loopback that nobody uses."""
    with create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def find_obstacle() -> str:
    """Return why this cannot be shown here; nothing where it can."""
    if os.geteuid() != 0:
        return "root's rights are needed to change into another system"
    if not which("ansible-playbook"):
        return "ansible-playbook is not installed: pip install ansible, in an environment of its own"
    asked = ["ansible-doc", "--type", "connection", CONNECTION]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        return f"Ansible has no connection {CONNECTION}: pip install ansible, which brings collections along"
    return ""


@dataclass(frozen=True)
class Fleet:
    """Both systems as Ansible knows them.

    Attributes:
        gateway: With broker, enrolment service and server.
        inventory: File that names both.
        settings: That every run is told.
    """

    gateway: System
    board: System
    inventory: Path
    settings: dict[str, object]

    def play(self, name: str, *words: str, code: int = 0, **more: object) -> str:
        """Run a playbook; return all that it printed.

        Args:
            code: That it must end with.
            **more: Settings besides those of the fleet.
        """
        told = json.dumps(self.settings | more)
        command = ["ansible-playbook", "-vvv", "-i", str(self.inventory), *words, "-e", told, f"playbooks/{name}.yml"]
        own = {"ANSIBLE_HOME": str(BUILD / "ansible"), "ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(command, cwd=PLAYBOOKS, env=os.environ | own, capture_output=True, text=True, check=False)
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"{name}: code {done.returncode}\n{printed[-6000:]}"
        assert "ff1," not in printed, "a token is logged"
        return printed


def changes(printed: str) -> int:
    """Return how many tasks of a run changed something, by its last lines."""
    return sum(map(int, re.findall(r"\bok=\d+ +changed=(\d+)", printed)))


def ready(system: System) -> None:
    """Bring what Ansible needs on a system, as Raspberry Pi OS has it."""
    system.run("apt-get", "-q", "update")
    system.run("apt-get", "-q", "-y", "install", "--no-install-recommends", "python3-apt")


def make_fleet(gateway: System, board: System, packages: Path) -> Fleet:
    """Write the inventory of two systems."""
    both = {"gateway": {"roof-gateway": gateway}, "boards": {"pi-01": board}}
    hosts = {
        group: {"hosts": {name: {"ansible_host": str(one.root)} for name, one in named.items()}}
        for group, named in both.items()
    }
    usual = {"ansible_connection": CONNECTION, "ansible_python_interpreter": "/usr/bin/python3"}
    inventory = gateway.share / "inventory.json"
    inventory.write_text(json.dumps({"all": {"vars": usual, "children": hosts}}))
    settings: dict[str, object] = {
        "package_folder": str(packages),
        "gateway_site": "roof",
        "gateway_addresses": ["localhost"],
        "gateway_port": free_port(),
        "gateway_plan": str(gateway.share / "plan.toml"),
        "board_enrolment_port": free_port(),
        "board_purpose": "infer",
        "board_setup": ["--from", "/share/wheels"],
        "board_settings": {
            "state_dir": "/var/lib/fieldfleet",
            "data": {"source": "npz", "path": "/share/examples.npz"},
            "trainer": {"threads": 1},
        },
    }
    return Fleet(gateway, board, inventory, settings)


def run_gateway(fleet: Fleet, stack: ExitStack) -> None:
    """Run what systemd would on the gateway, as long as the stack is open."""
    share, port = fleet.gateway.share, str(fleet.settings["board_enrolment_port"])
    broker = ("mosquitto", "-c", "/etc/fieldfleet/site/mosquitto.conf")
    stack.enter_context(fleet.gateway.running(*broker, user="mosquitto", log=share / "broker.log"))
    service = ("edge-server", "enrolment-service", "--port", port)
    stack.enter_context(fleet.gateway.running(*service, user="fieldfleet-server", log=share / "enrolment.log"))
    await_port(int(str(fleet.settings["gateway_port"])))
    await_port(int(port))


def await_device(fleet: Fleet) -> None:
    """Wait until the gateway sees the board."""
    asked = ("edge-server", "devices", "--config", "/etc/fieldfleet/site/server.toml", "--format", "json")
    limit = time.monotonic() + PATIENCE_S
    while True:
        devices = json.loads(fleet.gateway.run(*asked, user="fieldfleet-server"))["devices"]
        if [one["device"] for one in devices if one["online"] and one["board"]] == ["pi-01"]:
            return
        if time.monotonic() > limit:
            raise TimeoutError(f"the gateway does not see the board: {[one['device'] for one in devices]}")
        time.sleep(1)


def check() -> None:
    """Do it all."""
    steps, folders = Steps(), {}
    built = {side: build_packages(side, "amd64") for side in ("agent", "server")}
    for version in ("", NEXT):
        folders[version] = BUILD / "deb" / f"ansible-{version or 'this'}"
        shutil.rmtree(folders[version], ignore_errors=True)
        folders[version].mkdir()
        for side in built.values():
            shutil.copy(side[version], folders[version])
    wheels = fetch_wheels(kind_of("amd64", "12"), "infer"), chosen_wheels(kind_of("amd64", "12"), "infer")
    base = make_base("amd64")
    steps.done("packages are built and wheels fetched")
    with ExitStack() as stack:
        gateway, board = (fresh(base, f"ansible-{name}", "amd64") for name in ("gateway", "board"))
        for system in (gateway, board):
            ready(system)
        hand(board, {}, wheels)
        (gateway.share / "plan.toml").write_text(PLAN)
        write_examples(board.share / "examples.npz")
        fleet = make_fleet(gateway, board, folders[""])
        steps.done("two fresh systems")
        make(fleet, stack, steps)
        go_on(fleet, folders[NEXT], steps)


def make(fleet: Fleet, stack: ExitStack, steps: Steps) -> None:
    """Make both, twice, and run the agent."""
    fleet.play("site", "--check")
    assert not (fleet.gateway.root / "usr/bin/edge-server").exists()
    steps.done("a dry run of bare systems says what it would do, and does nothing")
    assert changes(fleet.play("site", "--limit", "gateway"))
    steps.done("the gateway is made")
    run_gateway(fleet, stack)
    assert changes(fleet.play("site", "--limit", "boards"))
    assert json.loads((fleet.board.root / MEMBERSHIP).read_text())["device"] == "pi-01"
    steps.done("the board is made, and has joined")
    assert changes(again := fleet.play("site")) == 0, again[-6000:]
    assert changes(again := fleet.play("site", "--check")) == 0, again[-6000:]
    steps.done("a second run and a dry run change nothing")


def go_on(fleet: Fleet, newer: Path, steps: Steps) -> None:
    """Connect the agent; upgrade, rotate and revoke."""
    membership = (fleet.board.root / MEMBERSHIP).read_bytes()
    agent = ("device-agent", "run", "--config", "/etc/fieldfleet/agent.toml")
    with fleet.board.running(*agent, user="fieldfleet", log=fleet.board.share / "agent.log"):
        await_device(fleet)
        steps.done("the agent is connected")
        fleet.play("rotate")
        assert changes(fleet.play("site", package_folder=str(newer)))
        assert changes(fleet.play("site", package_folder=str(newer))) == 0
        for system, command in ((fleet.gateway, "edge-server"), (fleet.board, "device-agent")):
            assert "99.0" in system.run(command, "--version")
        assert (fleet.board.root / MEMBERSHIP).read_bytes() == membership
        steps.done("the gateway has new keys; both are upgraded, and the board is who it was")
        fleet.play("revoke", board="pi-01")
    again, here = {"package_folder": str(newer)}, fleet.board.root / "var/lib/fieldfleet/identity"
    here.rename(here.with_suffix(".away"))
    assert "pi-01 was revoked" in fleet.play("site", "--limit", "boards", code=2, **again)
    here.with_suffix(".away").rename(here)
    assert changes(fleet.play("site", "--limit", "boards", **again)) == 0
    fleet.play("site", "--limit", "boards", **again, board_readmit=True)
    assert (fleet.board.root / MEMBERSHIP).read_bytes() != membership
    steps.done("revoked, the board joins again only where the inventory says so")


def main() -> None:
    """Show it, or say why not."""
    if obstacle := find_obstacle():
        sys.stdout.write(f"skipped: {obstacle}\n")
        return
    require_tools("amd64")
    in_own_mounts("tests.install.playbook")
    check()


if __name__ == "__main__":
    main()
