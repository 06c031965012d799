"""Make a site, or bring it up to what is asked now: whatever is there and right stays as it is."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from edge_server.gateway.authority import check_address, check_site_name
from edge_server.gateway.site_folder import (
    PAIRS,
    SiteFolder,
    make_authorities,
    make_broker_files,
    make_folders,
    make_pairs,
)
from edge_server.gateway.state import FILE, SiteState, locked, read_state, write_state
from shared.errors import ConfigError

ROOT_YEARS, SITE_YEARS = 30.0, 15.0
USUAL_PORT = 8883
USUAL_DATA = "/var/lib/fieldfleet-server/runs"


@dataclass(frozen=True)
class Wanted:
    """What a site is asked to be.

    Attributes:
        name: Its name; empty for the one that it has.
        addresses: Under which boards reach the gateway; none for those that it has, or this machine's names.
        port: Of the broker; 0 for the one that it has, or the usual.
        bind: The only address at which the broker listens; None for what it has, or all.
        own_port: Of the broker's listener on loopback for the server's own processes; 0 for what it has, or the port
            after `port`.
    """

    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    bind: str | None = None
    own_port: int = 0


def initialise(site: SiteFolder, wanted: Wanted, now: datetime) -> SiteState:
    """Write all files of a site that are not there or not as they should be; `site.changed` names them.

    Args:
        site: The folder; made if it is not there.
        wanted: What the site is to be.
        now: UTC.

    Raises:
        ConfigError: The folder is another site's, a name or an address is none, or a file that cannot be made again
            is gone.
        Unwritable: The disk takes nothing more.
    """
    if wanted.name:
        check_site_name(wanted.name)
    for address in wanted.addresses:
        check_address(address)
    if not wanted.name and not (site.path / FILE).is_file():
        raise ConfigError(f"{site.path}: no site is there yet; say --name")
    try:
        make_folders(site)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{site.path}: {error.filename} is no folder; name another --folder") from error
    except OSError as error:
        raise ConfigError(f"{site.path}: {error.strerror}; run this as root, or name another --folder") from error
    with locked(site.path):
        before = read_state(site.path) if (site.path / FILE).is_file() else None
        state = _settled(site, wanted)
        make_authorities(site, state.site, now, years=(ROOT_YEARS, SITE_YEARS))
        state = make_pairs(site, state, PAIRS, now)
        make_broker_files(site, state)
        _make_server_file(site, before, state)
    return state


def _make_server_file(site: SiteFolder, before: SiteState | None, state: SiteState) -> None:
    """Write the server's file where there is none, or where nobody has edited it; `site check` tells of others.

    Earlier versions wrote the server's other certificate in it.
    """
    path = site.path / "server.toml"
    usual = server_toml(site.path, before) if before else ""
    former = usual.replace("gateway/own-server", "gateway/edge-server")
    if not path.is_file() or path.read_text("utf-8", "replace") in (usual, former):
        site.put(path, server_toml(site.path, state).encode())


def _settled(site: SiteFolder, wanted: Wanted) -> SiteState:
    """Return the site's state with what is wanted now, and write it."""
    path = site.path / FILE
    before = read_state(site.path) if path.is_file() else None
    if before and wanted.name and before.site != wanted.name:
        raise ConfigError(f"{site.path} is site {before.site!r}; name another --folder for {wanted.name!r}")
    state = before or SiteState(site=wanted.name, addresses=own_addresses(), port=USUAL_PORT)
    state = msgspec.structs.replace(
        state,
        addresses=tuple(dict.fromkeys(wanted.addresses)) or state.addresses,
        port=wanted.port or state.port,
        bind=state.bind if wanted.bind is None else wanted.bind,
        broker_user=site.broker_user,
        own_port=wanted.own_port or state.own_port,
    )
    if state != before:
        write_state(site.path, state)
        site.changed.append(FILE)
    return state


def own_addresses() -> tuple[str, ...]:
    """Return the names under which this machine is probably reached: its own, and that by multicast DNS."""
    name = socket.gethostname()
    found = []
    for one in (f"{name.partition('.')[0]}.local", name):
        try:
            found.append(check_address(one))
        except ConfigError:
            continue
    return tuple(dict.fromkeys(found))


def server_toml(folder: Path, state: SiteState) -> str:
    """Return a server's file for a site, to be edited by people.

    Args:
        folder: Of the site, in which the file is to lie.
    """
    here = folder.resolve()
    data_dir = USUAL_DATA if here.is_relative_to("/etc") else str(here / "runs")
    return (
        f"# The server of site {state.site}, made by `edge-server site init`; once edited it is left alone.\n"
        f'site = "{state.site}"\n'
        f'plan = "{here / "plan.toml"}"  # what `edge-server run` does; `edge-server trial run PLAN` names its own\n'
        f'data_dir = "{data_dir}"\n'
        f'gateway = "{here}"  # who is revoked there takes no part\n'
        "\n"
        "[broker]\n"
        'host = "127.0.0.1"  # the listener for this machine alone, where each process has a client id of its own\n'
        f"port = {state.servers_port}\n"
        "\n"
        "[broker.tls]  # this server's own certificate; nobody else may read the key\n"
        f'ca = "{here / "ca/root.crt"}"\n'
        f'cert = "{here / "gateway/own-server.crt"}"\n'
        f'key = "{here / "gateway/own-server.key"}"\n'
    )


def link_services(site: SiteFolder, etc: Path = Path("/etc")) -> None:
    """Let Debian's mosquitto and the server's unit find a site that lies in its usual place; others are left alone.

    Args:
        site: The folder; `site.changed` names what was made.
        etc: The folder of the system's configuration.
    """
    if site.path != etc / "fieldfleet" / "site":
        return
    links = {
        etc / "mosquitto" / "conf.d" / "fieldfleet.conf": site.path / "mosquitto.conf",
        etc / "fieldfleet" / "server.toml": site.path / "server.toml",
    }
    for link, target in links.items():
        if link.parent.is_dir() and not link.exists() and not link.is_symlink():
            link.symlink_to(target)
            site.changed.append(str(link))
