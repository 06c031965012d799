"""`edge-server support-bundle`: write one diagnostic archive without secrets."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from edge_server.cli.gateway.doctor import find_site, read_config, run_checks
from edge_server.cli.gateway.examine import secret_files
from edge_server.journal.runs import summarise_runs
from edge_server.plan.server_config import ServerConfig
from shared.runtime.clock import utc_stamp
from shared.runtime.diagnosis.bundle import (
    last_lines,
    list_files,
    read_journal,
    read_secret_lines,
    running_versions,
    write_bundle,
)

UNITS = ("fieldfleet-server", "mosquitto")
PUBLIC_FILES = ("mosquitto.conf", "acl")


def support_bundle(options: argparse.Namespace) -> int:
    """Write the bundle; print its path.

    Raises:
        ConfigError: The file exists already, or a log cannot be read.
    """
    path = options.out or Path(f"server-bundle-{utc_stamp()}.tar.gz")
    config, findings = read_config(options)
    site = find_site(options.folder, config)
    logs = {f"log-{number}.txt": last_lines(log) for number, log in enumerate(options.log)}
    findings += asyncio.run(run_checks(site, config))
    files: dict[str, object] = {"versions.json": running_versions(), "doctor.json": findings, **logs}
    files |= _config_files(config) if config else {}
    files |= _site_files(site) if site else {}
    if not logs:
        files |= {f"log-{unit}.txt": asyncio.run(read_journal(unit)) for unit in UNITS}
    secrets = [*(secret_files(config) if config else []), *(site.rglob("*.key") if site else [])]
    write_bundle(path, files, read_secret_lines(secrets))
    sys.stdout.write(f"{path}\n")
    return 0


def _config_files(config: ServerConfig) -> dict[str, object]:
    """Return the server's configuration without comments, and summaries of its runs."""
    runs = Path(config.data_dir)
    summaries = summarise_runs(runs) if runs.is_dir() else []
    return {"config.json": config, "runs.json": summaries}


def _site_files(site: Path) -> dict[str, object]:
    """Return the files of a site without secrets, and a listing of all."""
    texts = {name: site / name for name in PUBLIC_FILES if (site / name).is_file()}
    return {"site.txt": list_files(site), **{f"site-{name}": path.read_text() for name, path in texts.items()}}
