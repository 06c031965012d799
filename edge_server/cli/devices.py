"""`edge-server devices`: show a site's devices from its broker or its history."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from edge_server.cli.terminal import write_text
from edge_server.fleet.device_rows import Device, device_rows
from edge_server.fleet.forget import forget_retained
from edge_server.fleet.tables import (
    absences_table,
    devices_table,
    model_lines,
    plot_readings,
    readings_table,
    short_text,
)
from edge_server.fleet.view import RetainedView, watch_site
from edge_server.gateway.revocation.denied import read_denied
from edge_server.journal.report_history import FILE, StoredReport, forget_history, latest_reports, reading_history
from edge_server.plan.server_config import load
from shared.errors import ConfigError, CorruptFile, Unreachable
from shared.protocol.measurements import Reading
from shared.protocol.topics import check_name
from shared.runtime.clock import utc_seconds
from shared.spelling import guess

log = logging.getLogger(__name__)

HOUR_S = 3600.0
CLEAR = "\x1b[H\x1b[2J"


class DevicesView(msgspec.Struct, frozen=True, kw_only=True):
    """JSON output of the command.

    Attributes:
        history: Plotted reading: pairs of calendar seconds and value.
    """

    devices: list[Device]
    history: list[tuple[float, float]] | None = None


def show_devices(options: argparse.Namespace) -> int:
    """Show the devices once or repeatedly.

    Raises:
        ConfigError: There is neither a broker nor a history, no such device, or the options do not fit.
        Unreachable: The broker does not answer, and there is no history.
    """
    if options.plot and not options.device:
        raise ConfigError("--plot: add the DEVICE")
    if (options.watch is not None and not options.watch > 0) or not options.hours > 0:
        raise ConfigError("--watch and --hours: use a number above 0")
    asyncio.run(_show(options))
    return 0


def forget_device(options: argparse.Namespace) -> int:
    """Remove a device from the broker and the history.

    Raises:
        ConfigError: It is connected, or unknown to both.
        Unreachable: The broker does not answer, or refuses to remove it.
    """
    name = check_name(options.name, "device")
    config = load(options.config) if options.config else None
    path = Path(config.data_dir if config else options.data_dir) / FILE
    retained = 0
    if config:
        is_revoked = name in _read_revoked(config.gateway)
        retained = asyncio.run(forget_retained(config.broker, config.site, name, is_revoked=is_revoked))
    reports = forget_history(path, name) if path.is_file() else 0
    if not retained and not reports:
        where = "" if config else "; add the server's file by --config to ask the broker too"
        raise ConfigError(f"unknown device {name!r}{where}")
    write_text(sys.stdout, f"{name} removed: {reports} stored reports, {retained} retained messages")
    if config and config.gateway:
        write_text(sys.stdout, f"its certificate is still valid: `edge-server revoke {name}` ends that")
    return 0


async def _show(options: argparse.Namespace) -> None:
    config = load(options.config) if options.config else None
    path = Path(config.data_dir if config else options.data_dir) / FILE
    if config is None:
        return await _repeat(options, path, None)
    try:
        async with watch_site(config.broker, config.site) as look:
            return await _repeat(options, path, look, config.gateway)
    except Unreachable as error:
        if not path.is_file():
            raise
        sys.stderr.write(f"edge-server: {error}; showing the server's history\n")
    return await _repeat(options, path, None)


async def _repeat(options: argparse.Namespace, path: Path, look: RetainedView | None, gateway: str = "") -> None:
    while True:
        now_utc_s = utc_seconds()
        reports = _latest_reports(path, required=look is None)
        devices = device_rows(look.fleet if look else None, reports, look.heard_now if look else {}, now_utc_s)
        if look:
            devices = [msgspec.structs.replace(row, models=look.models.get(row.device, ())) for row in devices]
        devices = _mark_revoked_offline(devices, gateway)
        if options.device:
            devices = _select(devices, options.device)
        if options.format == "json":
            _write_json(options, path, devices, now_utc_s)
        else:
            if options.watch and sys.stdout.isatty():
                sys.stdout.write(CLEAR)
            _print(options, path, devices, now_utc_s)
        if not options.watch:
            return
        await asyncio.sleep(options.watch)


def _mark_revoked_offline(devices: list[Device], gateway: str) -> list[Device]:
    """Mark revoked devices as offline: the broker retains their birth message, which nobody may clear."""
    denied = _read_revoked(gateway)
    return [msgspec.structs.replace(device, online=False) if device.device in denied else device for device in devices]


def _read_revoked(gateway: str) -> Collection[str]:
    """Return the revoked accounts of a site; empty if they cannot be read."""
    try:
        return read_denied(Path(gateway)) if gateway else ()
    except ConfigError as error:
        log.debug("cannot read the revoked accounts: %s", error)
        return ()


def _latest_reports(path: Path, *, required: bool) -> Mapping[str, StoredReport]:
    """Return the reports in the site's history, which is optional when a broker answers."""
    try:
        return latest_reports(path)
    except (ConfigError, CorruptFile) as error:
        if required:
            raise
        log.debug("%s", error)
        return {}


def _select(devices: list[Device], name: str) -> list[Device]:
    chosen = [device for device in devices if device.device == name]
    if not chosen:
        raise ConfigError(
            f"unknown device {name!r}; known: {', '.join(device.device for device in devices) or 'none'}"
            f"{guess(name, [device.device for device in devices])}"
        )
    return chosen


def _history(options: argparse.Namespace, path: Path, device: Device, now_utc_s: float) -> list[tuple[float, Reading]]:
    """Return the history of the plotted reading.

    Raises:
        ConfigError: The device has never measured it.
    """
    readings = reading_history(path, device.device, options.plot, now_utc_s - options.hours * HOUR_S)
    if not readings and options.plot not in device.readings and device.lack(options.plot) is None:
        raise ConfigError(f"--plot {options.plot}: {device.device} has {', '.join(sorted(device.readings)) or 'none'}")
    return readings


def _print(options: argparse.Namespace, path: Path, devices: list[Device], now_utc_s: float) -> None:
    if not devices:
        write_text(sys.stdout, "no devices yet")
        return
    plot_lines: list[str] = []
    if options.plot:
        since = now_utc_s - options.hours * HOUR_S
        plot_lines = plot_readings(options.plot, _history(options, path, devices[0], now_utc_s), since, now_utc_s)
    write_text(sys.stdout, devices_table(devices))
    if not options.device:
        return
    [device] = devices
    facts = (short_text(f"{name}: {fact}") for name, fact in sorted(device.facts.items()))
    write_text(sys.stdout, [readings_table(device), absences_table(device), *facts, *model_lines(device)])
    if plot_lines:
        write_text(sys.stdout, plot_lines)


def _write_json(options: argparse.Namespace, path: Path, devices: list[Device], now_utc_s: float) -> None:
    history = None
    if options.plot:
        history = [(at, reading.value) for at, reading in _history(options, path, devices[0], now_utc_s)]
    data = msgspec.json.encode(DevicesView(devices=devices, history=history))
    sys.stdout.write((data if options.watch else msgspec.json.format(data, indent=1)).decode() + "\n")
    sys.stdout.flush()
