"""What the processes of a site say of themselves: lines with `phase NAME key=value ...` in their logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.trial.chaos.kills import Kind, process_of
from edge_server.trial.local import SERVER

BEGINNING = "starting"
_SETTLED = " INFO device_agent.exchange.upload settled "
_LINE = re.compile(r" DEBUG (\S+) phase (\w+)((?: \w+=\S+)*)$")


@dataclass(frozen=True)
class LogLine:
    """One line.

    Attributes:
        name: The process: the server, or the device whose agent or trainer it is.
        phase: What it does from here on.
        facts: What it says besides.
    """

    by: Kind
    name: str
    phase: str
    facts: dict[str, str]


def parse(name: str, line: str) -> LogLine | None:
    """Return what a line of a process's log says of its phase; None where it is about something else."""
    if _SETTLED in line:
        return LogLine("agent", name, "idle", {})
    found = _LINE.search(line)
    if found is None:
        return None
    by: Kind = "server" if name == SERVER else "trainer" if found[1] == "trainer" else "agent"
    return LogLine(by, name, found[2], dict(fact.split("=", 1) for fact in found[3].split()))


@dataclass
class Logs:
    """Follows the logs of a site while they are written.

    Attributes:
        folder: Where they lie, `<name>.log` each.
        said: Everything said so far; in order for each process.
        phases: What each process said last.
        pids: The trainer of each device, as it named itself last.
    """

    folder: Path
    names: Iterable[str]
    said: list[LogLine] = field(default_factory=list)
    phases: dict[tuple[Kind, str], str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)

    def news(self) -> list[LogLine]:
        """Return what was said since the last call."""
        news = [said for name in self.names for line in self._lines(name) if (said := parse(name, line))]
        for one in news:
            self.phases[one.by, one.name] = one.phase
            if "pid" in one.facts:
                self.pids[one.name] = int(one.facts["pid"])
        self.said += news
        return news

    def phase(self, kind: Kind, name: str) -> str:
        """Return what a process said last."""
        return self.phases.get((process_of(kind), name), BEGINNING)

    def began(self, by: Kind, name: str) -> None:
        """Note that a process was started, which has not said anything yet."""
        self.phases[by, name] = BEGINNING

    def _lines(self, name: str) -> list[str]:
        """Return whole lines; what is half written is read the next time."""
        path, start = self.folder / f"{name}.log", self._read.get(name, 0)
        if not path.exists() or path.stat().st_size == start:
            return []
        with path.open("rb") as file:
            file.seek(start)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[name] = start + len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
