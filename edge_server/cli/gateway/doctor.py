"""`edge-server doctor`: find present and imminent faults of a gateway."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edge_server.cli.gateway import examine, services
from edge_server.cli.gateway.site import EXIT_BAD, findings_table, utc_now
from edge_server.cli.terminal import write_text
from edge_server.gateway.check import Finding, check_site
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.site_folder import open_folder
from edge_server.gateway.state import FILE, read_state
from edge_server.journal.report_history import FILE as REPORTS
from edge_server.journal.report_history import latest_reports
from edge_server.plan.server_config import ServerConfig, load
from shared.errors import ConfigError, CorruptFile
from shared.runtime import processes
from shared.transport.tls import describe_unsafe_mode

EXIT_CONFIG = 2
PRIVATE = 0o600
CONFIGURATION = "configuration"


def doctor(options: argparse.Namespace) -> int:
    """Check everything, after fixes if requested; return 0, 1 for faults, 2 for an invalid server's file.

    Raises:
        ConfigError: There is neither a site nor a server's file.
    """
    processes.configure("warning", options.verbose)
    config, findings = read_config(options)
    site = find_site(options.folder, config)
    if site is None and options.config is None:
        raise ConfigError(f"{options.folder}: there is no site; give its --folder, or a server's file by --config")
    fixes = apply_fixes(site, config) if options.fix else []
    findings += asyncio.run(run_checks(site, config))
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode([*fixes, *findings]), indent=1).decode() + "\n")
    else:
        write_text(sys.stdout, [findings_table([*fixes, *findings]), summary(findings)])
    wrong = {finding.about for finding in findings if finding.state == "bad"}
    return EXIT_CONFIG if CONFIGURATION in wrong else EXIT_BAD if wrong else 0


def read_config(options: argparse.Namespace) -> tuple[ServerConfig | None, list[Finding]]:
    """Return the configuration from `--config` or the site's folder, and findings about it."""
    path = options.config
    if path is None:  # `site check` reports faults of a site's own file
        with suppress(ConfigError):
            return load(options.folder / "server.toml"), []
        return None, []
    try:
        config = load(path)
    except ConfigError as error:
        return None, [examine.bad(CONFIGURATION, str(error), f"correct {path}")]
    return config, [examine.good(CONFIGURATION, f"{path}: site {config.site}")]


def find_site(folder: Path, config: ServerConfig | None) -> Path | None:
    """Return the folder of the site; None if there is none.

    Args:
        folder: Default folder, or that of `--folder`.
        config: Server's configuration, which may name another.
    """
    site = Path(config.gateway) if config and config.gateway else folder
    return site if (site / FILE).is_file() else None


async def run_checks(site: Path | None, config: ServerConfig | None) -> list[Finding]:
    """Run all checks and return their findings.

    Args:
        site: Folder of the site; None to check broker and machine only.
        config: Server's configuration; None if there is none or it is invalid.
    """
    findings: list[Finding] = []
    if site is None:
        text = "there is none: certificates and access rights are not checked"
        findings.append(examine.advice("site", text, "create one by `edge-server site init`"))
    else:
        folder = open_folder(site)
        findings += await check_site(folder, utc_now())
        findings += examine.examine_own_certificates(folder, utc_now())
        findings += examine.examine_certificates(read_state(site), utc_now())
    if config:
        findings += await examine.examine_broker(config)
        findings += examine.examine_secrets(config) if site is None else []
        findings += examine.examine_open_files(config.broker.port, count_boards(site, config))
        if running := examine.running_configuration(config.broker.port):
            findings += examine.examine_limits(running[1], str(running[0]))
    findings += examine.examine_machine(config)
    return findings + await services.examine_services(config, site)


def count_boards(site: Path | None, config: ServerConfig) -> int:
    """Count the boards that may connect: those of the site that are not revoked, or else those that ever reported."""
    if site:
        return sum(not account.denied for account in read_state(site).accounts.values())
    try:
        return len(latest_reports(Path(config.data_dir) / REPORTS))
    except (ConfigError, CorruptFile):
        return 0


def apply_fixes(site: Path | None, config: ServerConfig | None) -> list[Finding]:
    """Fix what is safe to fix: modes of secret files, and files that `site init` can write again.

    Args:
        site: Folder of the site; None for none.
        config: Server's configuration; None for none.
    """
    secrets = examine.secret_files(config) if config else []
    if site:
        secrets += [*site.glob("ca/*.key"), *site.glob("gateway/*.key"), site / FILE]
    fixes = [fix for path in dict.fromkeys(secrets) if (fix := _make_private(path))]
    if site:
        folder = open_folder(site)
        try:
            initialise(folder, SiteSettings(), utc_now())
        except (ConfigError, OSError) as error:
            fixes.append(examine.advice("--fix", f"the site's files are unchanged: {error}", ""))
        if folder.changed:
            text = f"written again: {', '.join(folder.changed)}"
            fixes.append(examine.advice("--fix", text, "reload a running broker by `edge-server site reload`"))
    return fixes


def _make_private(path: Path) -> Finding | None:
    with suppress(OSError):
        if describe_unsafe_mode(path):
            path.chmod(PRIVATE)
            return examine.good("--fix", f"{path} is readable by its owner only now")
    return None


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each kind, as text."""
    counts = {state: sum(finding.state == state for finding in findings) for state in ("bad", "advice", "good")}
    return f"{counts['bad']} faults, {counts['advice']} notes, {counts['good']} in order"
