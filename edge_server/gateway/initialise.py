"""Initialise or update a site's folder; correct files stay unchanged."""

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
from edge_server.gateway.state import FILE, SiteState, lock_site, read_state, write_state
from shared.errors import ConfigError

ROOT_YEARS, SITE_YEARS = 30.0, 15.0
DEFAULT_PORT = 8883
DEFAULT_DATA = "/var/lib/fieldfleet-server/runs"


@dataclass(frozen=True)
class SiteSettings:
    """Requested settings of a site.

    Attributes:
        name: Name of the site; empty for the present one.
        addresses: Addresses by which boards reach the gateway; empty for the present ones, or this machine's names.
        port: Port of the broker; 0 for the present one, or the default.
        bind: Only address of the broker's listener; None for the present one, or all.
        own_port: Port of the broker's loopback listener; 0 for the present one, or the port after `port`.
    """

    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    bind: str | None = None
    own_port: int = 0


def initialise(site: SiteFolder, settings: SiteSettings, now: datetime) -> SiteState:
    """Write all files of a site that are missing or wrong; `site.changed` lists them.

    Args:
        now: Current time in UTC.

    Raises:
        ConfigError: The folder belongs to another site, a name or an address is malformed, or a file that cannot be
            recreated is missing.
        Unwritable: The disk is full or read-only.
    """
    if settings.name:
        check_site_name(settings.name)
    for address in settings.addresses:
        check_address(address)
    if not settings.name and not (site.path / FILE).is_file():
        raise ConfigError(f"{site.path}: no site is there yet; name it by --name")
    try:
        make_folders(site)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{site.path}: {error.filename} is not a folder; choose another --folder") from error
    except OSError as error:
        raise ConfigError(f"{site.path}: {error.strerror}; run this as root, or choose another --folder") from error
    with lock_site(site.path):
        before = read_state(site.path) if (site.path / FILE).is_file() else None
        state = _update_state(site, settings)
        make_authorities(site, state.site, now, years=(ROOT_YEARS, SITE_YEARS))
        state = make_pairs(site, state, PAIRS, now)
        make_broker_files(site, state)
        _make_server_file(site, before, state)
    return state


def _make_server_file(site: SiteFolder, before: SiteState | None, state: SiteState) -> None:
    """Write the server's file unless somebody has edited it; `site check` reports problems in an edited one.

    Earlier versions wrote the server's other certificate in it.
    """
    path = site.path / "server.toml"
    usual = server_toml(site.path, before) if before else ""
    former = usual.replace("gateway/own-server", "gateway/edge-server")
    if not path.is_file() or path.read_text("utf-8", "replace") in (usual, former):
        site.put(path, server_toml(site.path, state).encode())


def _update_state(site: SiteFolder, settings: SiteSettings) -> SiteState:
    """Write the site's state with the requested settings, and return it."""
    path = site.path / FILE
    before = read_state(site.path) if path.is_file() else None
    if before and settings.name and before.site != settings.name:
        raise ConfigError(f"{site.path} is site {before.site!r}; choose another --folder for {settings.name!r}")
    state = before or SiteState(site=settings.name, addresses=local_addresses(), port=DEFAULT_PORT)
    state = msgspec.structs.replace(
        state,
        addresses=tuple(dict.fromkeys(settings.addresses)) or state.addresses,
        port=settings.port or state.port,
        bind=state.bind if settings.bind is None else settings.bind,
        broker_user=site.broker_user,
        own_port=settings.own_port or state.own_port,
    )
    if state != before:
        write_state(site.path, state)
        site.changed.append(FILE)
    return state


def local_addresses() -> tuple[str, ...]:
    """Return the names by which this machine is probably reached: its mDNS name and its host name."""
    name = socket.gethostname()
    addresses = []
    for candidate in (f"{name.partition('.')[0]}.local", name):
        try:
            addresses.append(check_address(candidate))
        except ConfigError:
            continue
    return tuple(dict.fromkeys(addresses))


def server_toml(folder: Path, state: SiteState) -> str:
    """Return the initial `server.toml` of a site, to be edited by people."""
    base = folder.resolve()
    data_dir = DEFAULT_DATA if base.is_relative_to("/etc") else str(base / "runs")
    return (
        f"# The server of site {state.site}, made by `edge-server site init`; once edited it is left alone.\n"
        f'site = "{state.site}"\n'
        f'plan = "{base / "plan.toml"}"  # what `edge-server run` does; `edge-server trial run PLAN` names its own\n'
        f'data_dir = "{data_dir}"\n'
        f'gateway = "{base}"  # who is revoked there takes no part\n'
        "\n"
        "[broker]\n"
        'host = "127.0.0.1"  # the listener for this machine alone, where each process has a client id of its own\n'
        f"port = {state.servers_port}\n"
        "\n"
        "[broker.tls]  # this server's own certificate; nobody else may read the key\n"
        f'ca = "{base / "ca/root.crt"}"\n'
        f'cert = "{base / "gateway/own-server.crt"}"\n'
        f'key = "{base / "gateway/own-server.key"}"\n'
    )


def link_services(site: SiteFolder, etc: Path = Path("/etc")) -> None:
    """Link the files of a site in the default folder to where Debian's mosquitto and the server's unit look for them.

    Existing files are not touched.

    Args:
        site: Site's folder; `site.changed` lists the new links.
        etc: Folder of the system's configuration.
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
