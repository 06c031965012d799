"""Start, stop and inspect the agent's systemd service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from device_agent.hardware.tools import run_command

UNIT = "fieldfleet-agent.service"
SYSTEMCTL = ("systemctl",)
PATIENCE_S, LOOK_S = 90.0, 20.0
"""Timeouts of systemctl: to stop an agent, which may take 30 s itself, and for other commands."""
RUNNING = frozenset({"active", "activating", "reloading"})


@dataclass(frozen=True)
class ServiceStatus:
    """State of a service.

    Attributes:
        runs: True if it is active or starting.
        has_failed: True if it ended and will not be restarted.
        restarts: Automatic restarts since it was started.
    """

    runs: bool
    has_failed: bool = False
    restarts: int = 0


class AgentService(Protocol):
    """Service manager's interface to the agent."""

    def stop(self) -> None:
        """Stop the service, and wait until it has ended or a timeout has passed."""
        ...

    def start(self) -> None:
        """Start the service without waiting, and reset the count of restarts."""
        ...

    def read_status(self) -> ServiceStatus:
        """Query the service's state."""
        ...


@dataclass(frozen=True)
class SystemdService:
    """Agent service as a systemd unit."""

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
