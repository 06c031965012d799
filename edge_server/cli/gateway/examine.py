"""What `edge-server doctor` looks at beside a site's own files: broker, limits, ends of certificates, clock, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from cryptography import x509

from edge_server.fleet.admission import longest_packet
from edge_server.fleet.broker import describe_exposure
from edge_server.gateway.check import Finding
from edge_server.gateway.reload import PROGRAM
from edge_server.gateway.site_folder import PAIRS, SiteFolder
from edge_server.gateway.state import SiteState
from edge_server.plan.data_folder import check_data_folder
from edge_server.plan.server_config import ServerConfig
from shared.errors import ConfigError, Unreachable
from shared.protocol.topics import DOCTOR, topic
from shared.runtime.clock import is_synchronised
from shared.transport.base import Broker
from shared.transport.capabilities import find_lacks
from shared.transport.packet_limit import MOST_PACKET_BYTES
from shared.transport.reach import NO_QOS_1, find_refusal
from shared.transport.tls import find_openness

DAY_S, MIB = 86_400.0, 1 << 20
SOON_DAYS = 60.0
"""Before the end of a board's certificate: with the usual year it renews 120 days before that."""
LEFT = 1 / 3
"""Of a certificate's life."""
CA_ENDS = "all end with the site CA: `edge-server site rotate-ca` makes the next"
ROOT_ENDS = "no CA outlives it: `edge-server site rotate-root`, then rotate-ca, make the next"
LEAST_FREE, LITTLE_FREE = 64 * MIB, 1024 * MIB
OTHER_FILES = 32
"""Of a broker: listeners, logs, the server's and the probe's connections."""
FEWER, FIRST_LIMIT = 0.8, 3
"""Share of a limit that boards may take without a word; place of the soft limit in a line of /proc/PID/limits."""
LEAST_QUEUED = 1000
"""Messages that mosquitto keeps for a client that is slow, by its own default."""


def good(about: str, told: str) -> Finding:
    """Return a finding of what is as it should be."""
    return Finding(about=about, state="good", told=told)


def bad(about: str, told: str, mend: str) -> Finding:
    """Return a finding of what keeps the site from its work."""
    return Finding(about=about, state="bad", told=told, mend=mend)


def advice(about: str, told: str, mend: str) -> Finding:
    """Return a finding of what works and may not for long."""
    return Finding(about=about, state="advice", told=told, mend=mend)


def examine_certificates(state: SiteState, now: datetime) -> Iterator[Finding]:
    """Look for certificates of boards and peers that have ended, or end soon.

    Args:
        now: UTC.
    """
    looked = 0
    for name, account in sorted(state.accounts.items()):
        valid = [one for one in account.certificates if not one.revoked and one.role in ("device", "peer")]
        if account.denied or not valid:
            continue
        looked += 1
        left = max(one.not_after_utc_s for one in valid) - now.timestamp()
        about = f"certificate of {name}"
        if left <= 0:
            mend = f"switch it on: it renews by itself for 180 days, then by `edge-server devices approve {name}`"
            yield advice(about, f"ended {-left / DAY_S:.0f} days ago", mend)
        elif left < SOON_DAYS * DAY_S:
            mend = "is the board on, and does it reach the enrolment service? By now it should have renewed"
            yield advice(about, f"ends in {left / DAY_S:.0f} days", mend)
    if looked:
        yield good("certificates", f"{looked} boards and peers have one; ends that are near are told")


def examine_own_certificates(site: SiteFolder, now: datetime) -> Iterator[Finding]:
    """Look how long root, site CA and the gateway's own certificates are good.

    Args:
        now: UTC.
    """
    files = [site.ca("root.crt"), site.ca("site.crt"), *(site.gateway(f"{name}.crt") for name in PAIRS)]
    for path in files:
        about = str(path.relative_to(site.path))
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            continue  # `check_site` says so
        if about != "gateway/revoked.crt":
            yield judge_life(f"life of {about}", found.not_valid_before_utc, found.not_valid_after_utc, now)


def judge_life(about: str, begin: datetime, end: datetime, now: datetime) -> Finding:
    """Judge how much of a certificate's life is left.

    Args:
        begin: From when it is valid.
        now: UTC.
    """
    told = f"{(end - now).total_seconds() / DAY_S:.0f} days are left, until {end:%Y-%m-%d}"
    mend = ROOT_ENDS if about.endswith("root.crt") else CA_ENDS
    if end <= now:
        return bad(about, f"ended on {end:%Y-%m-%d} by this machine's clock", f"set the clock if it is wrong; {mend}")
    return good(about, told) if end - now > (end - begin) * LEFT else advice(about, told, mend)


async def examine_broker(config: ServerConfig) -> list[Finding]:
    """Connect as the server does, and publish where it may and nobody listens."""
    broker = config.broker
    place = f"{broker.host}:{broker.port}"
    name, where = f"{config.site}._doctor-{os.getpid()}", topic(config.site, DOCTOR, "probe")
    refusal = await find_refusal(broker, name, where, dates=is_synchronised())
    if refusal and not refusal.startswith(NO_QOS_1):
        mend = "start the broker, or correct [broker]; its log says more"
        found = [bad("server's connection", f"{place}: {refusal}", mend)]
    else:
        found = [good("server's connection", f"{place} takes the server")]
        found += await examine_capabilities(broker, name, where, longest_packet(config.link.frame_bytes))
    if told := describe_exposure(broker):
        problem, _, mend = told.partition("; ")
        found.append(advice("server's connection", problem, mend))
    return found


async def examine_capabilities(broker: Broker, client_id: str, where: str, size: int) -> list[Finding]:
    """Try what the protocol needs of a broker, by publishing.

    Args:
        broker: That takes this client.
        client_id: Client id that no other client uses.
        where: Topic that this client may publish and subscribe to, and no other client uses.
        size: Bytes of the longest message in use.
    """
    try:
        lacks = await find_lacks(broker, client_id, where, size, dates=is_synchronised())
    except Unreachable as error:
        return [bad("broker's capabilities", f"it hung up: {error}", "its log says more")]
    if not lacks:
        return [good("broker's capabilities", f"QoS 1, messages of {size >> 10} KiB, retained messages and wills pass")]
    return [bad(f"broker's {one.what}", one.found, one.setting) for one in lacks]


def examine_secrets(config: ServerConfig) -> Iterator[Finding]:
    """Look whether others can read what the server's file names as secret."""
    for path in secret_files(config):
        try:
            too_open = find_openness(path)
        except OSError as error:
            yield bad(str(path), error.strerror or str(error), "bring it back, or let the server's user read it")
            continue
        if too_open:
            yield bad(str(path), "can be read or replaced by others", f"chmod 600 {path}")


def secret_files(config: ServerConfig) -> list[Path]:
    """Return keys and passwords' files that a server's file names, of its own broker and of peers'."""
    brokers: list[Broker] = [config.broker, *(peer.broker for peer in config.peer)]
    keys = [one.tls.key for one in brokers if one.tls and one.tls.key]
    return [Path(one) for one in dict.fromkeys([*keys, *(one.password_file for one in brokers if one.password_file)])]


def examine_limits(lines: Iterable[str], source: str) -> Iterator[Finding]:
    """Look whether a broker's settings leave room for what the server has under way.

    Args:
        lines: Of mosquitto's configuration.
    """
    told = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
    least = {"max_queued_messages": LEAST_QUEUED, "max_packet_size": MOST_PACKET_BYTES, "max_queued_bytes": 64 * MIB}
    wrong = {name: most for name, most in least.items() if 0 < _number(told.get(name, "0")) < most}
    for name, most in wrong.items():
        yield bad(f"broker's {name}", f"{told[name]} in {source}: frames are lost", f"set {name} {most} there, or more")
    if not wrong:
        yield good("broker's limits", f"{source} leaves room for frames that wait")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def examine_open_files(port: int, boards: int) -> Iterator[Finding]:
    """Look whether the mosquitto of this machine that listens on a port may hold a connection of every board.

    Args:
        boards: How many there are.
    """
    process = broker_process(port)
    limit = open_file_limit(process.pid) if process else None
    if limit is None:
        return
    told = f"it may open {limit:,} files, and each of {boards:,} boards takes one"
    mend = "add `LimitNOFILE=65536` under [Service] by `systemctl edit mosquitto`, then restart it"
    if boards + OTHER_FILES > limit:
        yield bad("broker's open files", f"{told}: the last ones are refused", mend)
    elif FEWER * limit < boards + OTHER_FILES:
        yield advice("broker's open files", told, mend)
    else:
        yield good("broker's open files", told)


def open_file_limit(pid: int) -> int | None:
    """Return how many files a process may open; None where that cannot be read, or there is no limit."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    words = next((line.split() for line in lines if line.startswith("Max open files")), [])
    return int(words[FIRST_LIMIT]) if len(words) > FIRST_LIMIT and words[FIRST_LIMIT].isdecimal() else None


def broker_process(port: int) -> psutil.Process | None:
    """Return the mosquitto of this machine that listens on a port; None where that cannot be seen."""
    for one in psutil.net_connections("tcp"):
        if one.status != psutil.CONN_LISTEN or one.laddr.port != port or one.pid is None:
            continue
        with suppress(psutil.Error):
            process = psutil.Process(one.pid)
            if process.name() == PROGRAM:
                return process
    return None


def running_configuration(port: int) -> tuple[Path, list[str]] | None:
    """Return file and lines of the mosquitto of this machine that listens on a port; None where that cannot be seen."""
    process = broker_process(port)
    with suppress(psutil.Error, OSError, ValueError):
        words = process.cmdline() if process else []
        if process and "-c" in words[:-1]:
            path = Path(process.cwd(), words[words.index("-c") + 1])
            return path, read_included(path.read_text().splitlines())
    return None


def read_included(lines: list[str]) -> list[str]:
    """Return lines of a configuration with those of the files that it includes, as Debian's does."""
    folders = [Path(words[1]) for line in lines if len(words := line.split()) > 1 and words[0] == "include_dir"]
    files = [path for folder in folders for path in sorted(folder.glob("*.conf"))]
    return [*lines, *(line for path in files for line in path.read_text().splitlines())]


def examine_machine(config: ServerConfig | None) -> Iterator[Finding]:
    """Look at this machine: clock and disk.

    Args:
        config: Of the server; None where it has none that can be read.
    """
    if is_synchronised():
        yield good("clock", "is synchronised")
    else:
        mend = "`timedatectl set-ntp true`; certificates are signed by this clock, and boards without one follow it"
        yield advice("clock", "nothing says that it is right", mend)
    if config:
        yield _disk(Path(config.data_dir))
        yield from _data_folder(Path(config.data_dir))
        if not Path(config.plan).is_file():
            yield advice("plan", f"{config.plan} is not there", "write one before `edge-server run`")


def _disk(folder: Path) -> Finding:
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not os.access(there, os.W_OK):
        return bad("disk", f"{there} may not be written", "run this as the server's user, or give it the folder")
    free = shutil.disk_usage(there).free
    told, mend = f"{free / MIB:.0f} MiB free for {folder}", "make room, or `edge-server runs` to remove some"
    if free < LEAST_FREE:
        return bad("disk", told, mend)
    return advice("disk", told, mend) if free < LITTLE_FREE else good("disk", told)


def _data_folder(folder: Path) -> Iterator[Finding]:
    try:
        check_data_folder(folder)
    except ConfigError as error:
        yield bad("data_dir", str(error), "until then `edge-server run` ends with code 2, and changes nothing there")
