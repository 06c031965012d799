"""What `edge-server doctor` looks at of services: as systemd has them, or their processes where it does not run."""

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
    """Look whether server, enrolment service and broker run.

    Args:
        config: Of the server; None where it has none that can be read.
        site: Folder of the site that boards join here; None where there is none.
    """
    names = (SERVER, *([ENROLMENT] if site else []), BROKER)
    findings = [check_unit(*unit) for unit in (await units.query_states(*names)).items()] if units.is_systemd_running() else []
    if config and not findings:
        findings.append(_server(Path(config.data_dir)))
    return [*findings, *([_enrolment_service(read_address(site))] if site else [])]


def check_unit(name: str, state: str) -> Finding:
    """Judge a service by what systemd says of it.

    Args:
        state: Such as `active`, `inactive` or `failed`; empty where systemd did not say.
    """
    about = f"service {name}"
    if state == "active":
        return good(about, "runs")
    if state == "inactive" and name == SERVER:  # it ends with its plan
        return advice(about, "does not run: its run ended, or was not begun", f"`systemctl start {name}` begins one")
    mend = f"`journalctl -u {name} -n 50` says why" if state == "failed" else f"`systemctl enable --now {name}`"
    return advice(about, f"is {state or 'unknown to systemd'}", mend)


def _server(data: Path) -> Finding:
    """Look for a run whose process is at work."""
    runs = [folder.name for folder in folders_of_runs(data) if is_held(folder)]
    if runs:
        return good(f"service {SERVER}", f"a server is at work on {', '.join(runs)}")
    return advice(f"service {SERVER}", f"no process is at work below {data}", "`edge-server run` begins, or goes on")


def _enrolment_service(address: Address) -> Finding:
    try:
        socket.create_connection((address.host or "127.0.0.1", address.port), CONNECT_S).close()
    except OSError:
        text = f"nobody answers at port {address.port}: boards can neither join nor renew their certificates"
        port = "" if address.port == USUAL_PORT else f" --port {address.port}"
        return advice("enrolment service", text, f"start `edge-server enrolment-service{port}`")
    return good("enrolment service", f"somebody answers at port {address.port}")
