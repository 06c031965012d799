"""Have systemd start services of ours and say how they are, where it runs; elsewhere that is left to people."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shared.runtime import backports

RUNNING = Path("/run/systemd/system")
"""There where systemd is what began the system, as sd_booted(3) says."""
PATIENCE_S, LOOK_S = 300.0, 30.0
SYSTEMCTL = "systemctl"

Verb = Literal["restart", "try-restart"]


def is_booted() -> bool:
    """Tell whether systemd runs this system."""
    return RUNNING.is_dir()


def may_start() -> bool:
    """Tell whether this process can have systemd start services."""
    return os.geteuid() == 0 and is_booted()


async def states(*units: str) -> Mapping[str, str]:
    """Return what systemd says of each unit, such as `active`, `inactive` or `failed`; empty where it says nothing."""
    try:
        _, said, _ = await _ask(LOOK_S, "is-active", *units)
    except (OSError, TimeoutError):
        said = b""
    lines = said.decode(errors="replace").split()
    return dict(zip(units, lines if len(lines) == len(units) else [""] * len(units), strict=True))


def restart(*units: str, verb: Verb = "restart") -> str:
    """Start services anew, and wait until they run; return why one does not, nothing where all do.

    Args:
        verb: `try-restart` for those alone that run already.
    """
    return backports.run(_restart(verb, *units))


async def _restart(verb: Verb, *units: str) -> str:
    try:
        code, _, told = await _ask(PATIENCE_S, verb, *units)
    except TimeoutError:
        return f"{', '.join(units)}: not there after {PATIENCE_S:.0f} s"
    except OSError as error:
        return f"{SYSTEMCTL}: {error.strerror}"
    if not code:
        return ""
    return " ".join(told.decode(errors="replace").split()) or f"{SYSTEMCTL} {verb}: code {code}"


async def _ask(patience_s: float, *words: str) -> tuple[int | None, bytes, bytes]:
    """Run `systemctl`; return its exit code, and what it said on both outputs."""
    process = await asyncio.create_subprocess_exec(
        SYSTEMCTL, "--no-ask-password", *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        async with backports.timeout(patience_s):
            said, told = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode, said, told
