"""The packages of another Debian than the usual, as far as they go without PyTorch: `make fresh RELEASE=13`.

Gateway and board are bare systems of that Debian, and of its Python: install, a site, a token, a board that joins and
is seen by the gateway, upgrade, purge. What trains is not brought: no PyTorch for the CPU of x86 is listed for it.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

from tests.install.check import BOARD, PATIENCE_S, Fleet, Operator, install, purge, upgrade
from tests.install.parts import build_packages, hand
from tests.install.roots import GATEWAY, fresh, make_base, without_network


def check(release: str) -> None:
    """Do it all on one Debian."""
    begun, base = time.monotonic(), make_base("amd64", release)
    packages = {side: build_packages(side, "amd64", release) for side in ("server", "agent")}
    without_network()
    gateway, board = (fresh(base, f"{name}-{release}", "amd64") for name in ("gateway", "board"))
    hand(gateway, packages["server"], None)
    hand(board, packages["agent"], None)
    Operator().tells(f"packages for Debian {release} are built, two bare systems", begun)
    before = [(system.files(), system.accounts()) for system in (gateway, board)]
    fleet, operator = Fleet(gateway, board, packages, ExitStack()), Operator()
    with fleet.services:
        operator.types("gateway", gateway, *install(gateway, f"/share/{packages['server'][''].name}", "mosquitto"))
        operator.types("gateway", gateway, "edge-server", "site", "init", "--name", "roof", "--address", GATEWAY)
        fleet.run_site()
        token = operator.types("gateway", gateway, "edge-server", "enrol", BOARD).strip()
        operator.types("board", board, *install(board, f"/share/{packages['agent'][''].name}"))
        operator.types("board", board, "device-agent", "join", token, "--data", "/srv/examples.npz")
        upgrade(operator, fleet)
        with fleet.run_agent():
            await_device(fleet)
    operator.tells(f"{operator.commands} commands, the last two an upgrade; the gateway sees the board", operator.began)
    begun = time.monotonic()
    purge(gateway, before[0], "fieldfleet-server", "mosquitto")
    purge(board, before[1], "fieldfleet-agent")
    operator.tells("purged both: nothing is left", begun)


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
