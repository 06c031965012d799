"""Private MQTT broker on loopback: mosquitto if installed, else pure Python."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from shared.errors import Unreachable
from shared.runtime import malloc
from shared.runtime.processes import terminate
from shared.transport.base import Broker
from shared.transport.packet_limit import MOST_PACKET_BYTES

log = logging.getLogger(__name__)

START_S = 20.0
SBIN = "/usr/sbin:/usr/local/sbin"


@dataclass(frozen=True)
class PrivateBroker:
    """A running broker."""

    port: int
    kind: str
    process: Process


def find_mosquitto() -> str | None:
    """Return the path of mosquitto, searching the administrator's folders as well."""
    return shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":" + SBIN)


def describe_exposure(broker: Broker) -> str:
    """Return the weakness of a broker connection, with a remedy; empty if it is secure."""
    try:
        is_near = ip_address(broker.host).is_loopback
    except ValueError:
        is_near = broker.host == "localhost"
    if is_near or (broker.tls and broker.has_account):
        return ""
    place, remedy = (
        f"{broker.host}:{broker.port}",
        "`edge-server site init` creates a site whose broker authenticates everyone",
    )
    if broker.tls:
        return f"the broker at {place} requires neither certificate nor account: it accepts anyone; {remedy}"
    if broker.user:
        return f"the password for the broker at {place} goes over the network unencrypted; {remedy}"
    return f"the broker at {place} accepts anyone and encrypts nothing; {remedy}"


def free_port() -> int:
    """Return an unused TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def run_private_broker(folder: Path, *, port: int = 0, embedded: bool = False) -> AsyncIterator[PrivateBroker]:
    """Run a broker during the block.

    Args:
        folder: Receives its configuration and log.
        port: Port to listen on; 0 for any free port.
        embedded: Use the pure Python broker even if mosquitto is installed.

    Raises:
        Unreachable: It does not start.
    """
    program = None if embedded else find_mosquitto()
    port = port or free_port()
    if program:
        command = [program, "-c", str(_configure(folder, port))]
    else:
        log.warning("mosquitto is not installed: using the slower embedded broker, over MQTT 3.1.1")
        command = [sys.executable, "-m", "edge_server.fleet.embedded_broker", str(port)]
    with (folder / "broker.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **malloc.ENVIRONMENT},
            start_new_session=True,
        )
    try:
        await wait_until_listening(process, port, folder / "broker.log")
        yield PrivateBroker(port, "mosquitto" if program else "embedded", process)
    finally:
        await terminate(process)


async def wait_until_listening(process: Process, port: int, output: Path) -> None:
    """Wait until a broker process accepts connections.

    Raises:
        Unreachable: It exited, or took too long.
    """
    try:
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return
    except TimeoutError:
        pass
    raise Unreachable(f"the private broker did not start; see {output}")


def _configure(folder: Path, port: int) -> Path:
    path = folder / "mosquitto.conf"
    path.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\npersistence false\n"
        f"log_type error\nlog_type warning\nmax_packet_size {MOST_PACKET_BYTES}\n"
    )
    return path
