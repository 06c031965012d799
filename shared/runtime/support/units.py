"""Query and restart systemd units."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from shared.runtime import backports

RUNNING = Path("/run/systemd/system")
"""Exists where systemd is the init system, see sd_booted(3)."""
PATIENCE_S, LOOK_S = 300.0, 30.0
SYSTEMCTL = "systemctl"

Verb = Literal["restart", "try-restart"]


def is_systemd_running() -> bool:
    """Check whether systemd is the init system."""
    return RUNNING.is_dir()


def can_start_services() -> bool:
    """Check whether this process may start services."""
    return os.geteuid() == 0 and is_systemd_running()


async def query_states(*units: str) -> Mapping[str, str]:
    """Query the state of each unit, such as `active`, `inactive` or `failed`; empty where systemctl fails."""
    try:
        _, output, _ = await _run_systemctl(["is-active", *units], LOOK_S)
    except (OSError, TimeoutError):
        output = b""
    lines = output.decode(errors="replace").split()
    return dict(zip(units, lines if len(lines) == len(units) else [""] * len(units), strict=True))


def restart(*units: str, verb: Verb = "restart") -> str:
    """Restart services and wait until they run; return the error, or an empty string.

    Args:
        verb: `try-restart` to skip services that do not run.
    """
    return backports.run(_restart(verb, units))


async def _restart(verb: Verb, units: Sequence[str]) -> str:
    try:
        code, _, errors = await _run_systemctl([verb, *units], PATIENCE_S)
    except TimeoutError:
        return f"{', '.join(units)}: not running after {PATIENCE_S:.0f} s"
    except OSError as error:
        return f"{SYSTEMCTL}: {error.strerror}"
    if not code:
        return ""
    return " ".join(errors.decode(errors="replace").split()) or f"{SYSTEMCTL} {verb}: code {code}"


async def _run_systemctl(arguments: Sequence[str], timeout_s: float) -> tuple[int | None, bytes, bytes]:
    """Run `systemctl`; return exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        SYSTEMCTL, "--no-ask-password", *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        async with backports.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode, output, errors
