"""Have systemd start services of ours, where it runs and root asks for it; elsewhere that is left to people."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Literal

RUNNING = Path("/run/systemd/system")
"""There where systemd is what began the system, as sd_booted(3) says."""
PATIENCE_S = 300.0
SYSTEMCTL = "systemctl"

Verb = Literal["restart", "try-restart"]


def may_start() -> bool:
    """Tell whether this process can have systemd start services."""
    return os.geteuid() == 0 and RUNNING.is_dir()


def restart(*units: str, verb: Verb = "restart") -> str:
    """Start services anew, and wait until they run; return why one does not, nothing where all do.

    Args:
        *units: Their names.
        verb: `try-restart` for those alone that run already.
    """
    return asyncio.run(_restart(verb, *units))


async def _restart(verb: Verb, *units: str) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            SYSTEMCTL, "--no-ask-password", verb, *units, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
    except OSError as error:
        return f"{SYSTEMCTL}: {error.strerror}"
    try:
        _, told = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"{', '.join(units)}: not there after {PATIENCE_S:.0f} s"
    if not process.returncode:
        return ""
    return " ".join(told.decode(errors="replace").split()) or f"{SYSTEMCTL} {verb}: code {process.returncode}"
