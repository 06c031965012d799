"""Service checks of `edge-server doctor`, by systemd or by process."""

from __future__ import annotations

import socket
from pathlib import Path

from edge_server.cli.gateway.examine import advice, good
from edge_server.gateway.check import Finding
from edge_server.gateway.enrolment.address import Address, read_address
from edge_server.journal.runs import folders_of_runs
from edge_server.plan.server_config import ServerConfig
from shared.protocol.enrolment import USUAL_PORT
from shared.runtime.folder_lock import is_held
from shared.runtime.support import units

SERVER, ENROLMENT, BROKER = "fieldfleet-server", "fieldfleet-enrolment", "mosquitto"
CONNECT_S = 2.0


async def examine_services(config: ServerConfig | None, site: Path | None) -> list[Finding]:
    """Check whether server, enrolment service and broker run.

    Args:
        config: Server's configuration; None if there is none or it is invalid.
        site: Folder of the site; None if there is none.
    """
    names = (SERVER, *([ENROLMENT] if site else []), BROKER)
    findings = (
        [check_unit(*pair) for pair in (await units.query_states(*names)).items()] if units.is_systemd_running() else []
    )
    if config and not findings:
        findings.append(_server(Path(config.data_dir)))
    return [*findings, *([_enrolment_service(read_address(site))] if site else [])]


def check_unit(name: str, state: str) -> Finding:
    """Check a service by its systemd state.

    Args:
        state: Such as `active`, `inactive` or `failed`; empty if systemd reports none.
    """
    about = f"service {name}"
    if state == "active":
        return good(about, "runs")
    if state == "inactive" and name == SERVER:  # it exits when its plan has ended
        return advice(about, "is not running: its run has ended or not begun", f"start one by `systemctl start {name}`")
    remedy = f"see `journalctl -u {name} -n 50`" if state == "failed" else f"run `systemctl enable --now {name}`"
    return advice(about, f"is {state or 'unknown to systemd'}", remedy)


def _server(data: Path) -> Finding:
    """Check for a run in progress."""
    runs = [folder.name for folder in folders_of_runs(data) if is_held(folder)]
    if runs:
        return good(f"service {SERVER}", f"a server is running {', '.join(runs)}")
    return advice(f"service {SERVER}", f"no server process uses {data}", "start or resume a run by `edge-server run`")


def _enrolment_service(address: Address) -> Finding:
    try:
        socket.create_connection((address.host or "127.0.0.1", address.port), CONNECT_S).close()
    except OSError:
        text = f"no answer at port {address.port}: boards can neither join nor renew their certificates"
        port = "" if address.port == USUAL_PORT else f" --port {address.port}"
        return advice("enrolment service", text, f"start `edge-server enrolment-service{port}`")
    return good("enrolment service", f"answers at port {address.port}")
