"""What a booted system does with our services: it starts them, watches them, and brings them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.install.booted import Booted

AGENT, CONFIG = "fieldfleet-agent", "etc/fieldfleet/agent.toml"
GATEWAY_UNITS = ("mosquitto", "fieldfleet-enrolment")
RUNS = {"ActiveState": "active", "SubState": "running"}
SHORT = "[Service]\nWatchdogSec=4\nTimeoutAbortSec=2\n"
"""In place of a minute, so that nobody waits for it."""


def check_units(gateway: Booted, board: Booted, tells: Callable[[str, float], None]) -> None:
    """Check all of it on a gateway and a board that have learned a round.

    Args:
        tells: Is told what was shown, and since when.
    """
    checks: dict[str, Callable[[], str | None]] = {
        "services run, and have said so": lambda: check_running(gateway, board),
        "a killed agent is started again": lambda: check_killed(board),
        "an agent that hangs is ended by the watchdog and started again": lambda: check_hung(board),
        "a fault in the agent's file (code 2) is not started again": lambda: check_fault(board),
        "the broker restarts, confined": lambda: check_broker(gateway),
        "limits of memory": lambda: check_memory(board),
        "both come up by themselves after a reboot": lambda: check_reboot(gateway, board),
    }
    for shown, check in checks.items():
        begun = time.monotonic()
        more = check()
        tells(f"{shown}: {more}" if more else shown, begun)


def check_running(gateway: Booted, board: Booted) -> None:
    """Look whether all services run that should, by their own word."""
    for system, units in ((gateway, GATEWAY_UNITS), (board, (AGENT,))):
        for unit in units:
            system.await_so(unit, **RUNS, Type="notify", UnitFileState="enabled")
            status = system.run("systemctl", "is-failed", unit, code=1)
            assert status.strip() == "active", status
    failed = board.run("systemctl", "list-units", "--failed", "--no-legend", "--plain", "fieldfleet*")
    assert not failed.strip(), failed


def check_killed(board: Booted) -> None:
    """Kill the agent and see it come back as another process."""
    before = board.property(AGENT, "MainPID")
    board.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", AGENT)
    await_other(board, before)


def check_hung(board: Booted) -> None:
    """Stop the agent's process, and see the watchdog bite."""
    with with_drop_in(board, SHORT):
        before = board.property(AGENT, "MainPID")
        board.run("systemctl", "kill", "--signal=STOP", "--kill-who=main", AGENT)
        await_other(board, before)
        said = board.run("journalctl", "--no-pager", f"--unit={AGENT}")
        assert "Watchdog timeout" in said, said[-2000:]


def check_fault(board: Booted) -> None:
    """Spoil the agent's file, see it fail once and no more, mend it, and see it run."""
    path = board.root / CONFIG
    text = path.read_text()
    path.write_text(text + "nonsense = 1\n")
    try:
        board.run("systemctl", "restart", AGENT, code=1)
        board.await_so(AGENT, ActiveState="failed", ExecMainStatus="2", NRestarts="0")
    finally:
        path.write_text(text)
    board.run("systemctl", "restart", AGENT)
    board.await_so(AGENT, **RUNS)


def check_broker(gateway: Booted) -> None:
    """Restart the broker with the drop-in of our package."""
    gateway.run("systemctl", "restart", "mosquitto")
    wanted = {"User": "mosquitto", "NoNewPrivileges": "yes", "ProtectSystem": "strict"}
    gateway.await_so("mosquitto", **RUNS, **wanted)


def check_memory(board: Booted) -> str:
    """Tell whether limits of memory can be shown here at all."""
    limit = board.property(AGENT, "MemoryMax")
    assert limit.isdecimal(), limit
    used = board.property(AGENT, "MemoryCurrent")
    if not used.isdecimal():
        return "SKIPPED: this machine's kernel gives containers no memory controller; the unit's limit is " + limit
    return f"memory is counted ({used} of {limit}); nobody is ended here"


def check_reboot(gateway: Booted, board: Booted) -> None:
    """Restart both systems; all that is wanted runs again without a hand."""
    gateway.reboot()
    board.reboot()
    check_running(gateway, board)


def await_other(board: Booted, before: str) -> None:
    """Wait until the agent runs as another process than before."""
    limit = time.monotonic() + 300.0
    while time.monotonic() < limit:
        if board.property(AGENT, "MainPID") not in (before, "0"):
            board.await_so(AGENT, **RUNS)
            return
        time.sleep(0.2)
    raise TimeoutError(f"{AGENT} is not started again")


@contextmanager
def with_drop_in(board: Booted, text: str) -> Iterator[None]:
    """Run the agent with other settings while the block lasts."""
    place = f"/run/systemd/system/{AGENT}.service.d"
    board.run("mkdir", "-p", place)
    board.run("sh", "-c", f"cat > {place}/check.conf <<'END'\n{text}END")
    board.run("systemctl", "daemon-reload")
    board.run("systemctl", "restart", AGENT)
    try:
        yield
    finally:
        board.run("rm", "-r", place)
        board.run("systemctl", "daemon-reload")
        board.run("systemctl", "restart", AGENT)
