"""Test service whose agent is a shell script; an imitation of `systemctl`.

services.py HOME STATE FOLDER start|stop|show|reset-failed …
"""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251 - agents are processes
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from os import rename
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])] * (__name__ == "__main__")
from device_agent.upgrade.agent_service import ServiceStatus  # noqa: E402

PROGRAM = "agent.sh"


@dataclass
class StandInService:
    """A service whose agent is a shell script; what is known of it lies in files, so that anybody may go on with it.

    Attributes:
        home: Folder of the versions.
        folder: Of what is known.
    """

    home: Path
    state_dir: Path
    folder: Path

    def start(self) -> None:
        for name in ("failed", "running"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "restarts").write_text("0")
        self._begin()

    def _begin(self) -> None:
        """Start the agent; no kill of the updater comes in between, as systemd leaves none: nothing here is counted."""
        words = ["/bin/sh", f"{self.home}/current/{PROGRAM}", str(self.home), str(self.state_dir), str(self.folder)]
        process = subprocess.Popen(  # noqa: S603 - a script of ours
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        process.returncode = 0  # nobody here waits for it
        (self.folder / "pid.part").write_text(str(process.pid))
        rename(self.folder / "pid.part", self.folder / "pid")  # noqa: PTH104 - not one of the points of a kill

    def stop(self) -> None:
        self.kill()
        (self.folder / "pid").unlink(missing_ok=True)

    def kill(self) -> None:
        """End the agent as a power cut does, with the commands that its script runs."""
        while self.is_alive():
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)
            _reap()
            time.sleep(0.001)  # noqa: TID251 - no loop runs here

    def is_alive(self) -> bool:
        """Tell whether the agent's process is there and no zombie."""
        _reap()
        try:
            pid = (self.folder / "pid").read_text()
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
        except OSError:
            return False

    def read_status(self) -> ServiceStatus:
        has_failed, restarts = (self.folder / "failed").exists(), self.folder / "restarts"
        if not self.is_alive() and not has_failed and (self.folder / "pid").exists():
            restarts.write_text(str(int(restarts.read_text()) + 1))
            self._begin()
        return ServiceStatus(self.is_alive(), has_failed, int(restarts.read_text()) if restarts.exists() else 0)

    def running(self) -> str:
        """Return the version whose agent runs, once it has said so."""
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            try:
                if said := (self.folder / "running").read_text().strip():
                    return said
            except OSError:
                pass
            time.sleep(0.002)  # noqa: TID251 - no loop runs here
        raise TimeoutError("no agent says that it runs")


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    """Do what `systemctl` is told."""
    home, state_dir, folder, verb = sys.argv[1:5]
    service = StandInService(*map(Path, (home, state_dir, folder)))
    if verb == "show":
        sight = service.read_status()
        state = "active" if sight.runs else "failed" if sight.has_failed else "inactive"
        sys.stdout.write(f"ActiveState={state}\nNRestarts={sight.restarts}\n")
    elif verb in ("start", "stop"):
        getattr(service, verb)()


if __name__ == "__main__":
    main()
