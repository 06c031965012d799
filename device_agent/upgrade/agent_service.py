"""The agent's service, as far as an upgrade starts and stops it: by `systemctl`, or what understands the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from device_agent.hardware.tools import run_command

UNIT = "fieldfleet-agent.service"
SYSTEMCTL = ("systemctl",)
PATIENCE_S, LOOK_S = 90.0, 20.0
"""Seconds that systemd may take: to end an agent, which has 30 of its own, and for everything else."""
RUNNING = frozenset({"active", "activating", "reloading"})


@dataclass(frozen=True)
class ServiceStatus:
    """What is seen of a service.

    Attributes:
        runs: Whether it runs, or is about to.
        has_failed: Whether it ended and is not started again.
        restarts: How often it began anew by itself since it was started.
    """

    runs: bool
    has_failed: bool = False
    restarts: int = 0


class AgentService(Protocol):
    """Starts and stops the agent."""

    def stop(self) -> None:
        """Stop it; when this returns, it is gone, or nobody can stop it."""
        ...

    def start(self) -> None:
        """Have it begin, and do not wait; restarts are counted anew."""
        ...

    def read_status(self) -> ServiceStatus:
        """Return how it is."""
        ...


@dataclass(frozen=True)
class SystemdService:
    """A unit of systemd."""

    unit: str = UNIT
    command: Sequence[str] = SYSTEMCTL

    def stop(self) -> None:
        run_command([*self.command, "stop", self.unit], timeout_s=PATIENCE_S)

    def start(self) -> None:
        run_command([*self.command, "reset-failed", self.unit], timeout_s=LOOK_S)
        run_command([*self.command, "start", "--no-block", self.unit], timeout_s=LOOK_S)

    def read_status(self) -> ServiceStatus:
        arguments = ("show", self.unit, "--property=ActiveState,NRestarts")
        output = run_command([*self.command, *arguments], timeout_s=LOOK_S).stdout
        properties = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
        state, restarts = properties.get("ActiveState", ""), properties.get("NRestarts", "")
        return ServiceStatus(state in RUNNING, state == "failed", int(restarts) if restarts.isdecimal() else 0)
