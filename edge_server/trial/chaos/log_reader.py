"""Reader of phase lines in the logs of a site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.trial.chaos.mark import Kind, process_of
from edge_server.trial.local import SERVER
from shared.runtime.phases import parse_phase

BEGINNING = "starting"


@dataclass(frozen=True)
class LogLine:
    """A phase line.

    Attributes:
        name: Process name: the server, or the device of an agent or trainer.
        phase: Phase that it enters.
        facts: Key-value pairs of the line.
    """

    by: Kind
    name: str
    phase: str
    facts: dict[str, str]


def parse(name: str, line: str) -> LogLine | None:
    """Return the phase in a log line; None if it has none."""
    parsed = parse_phase(line)
    if parsed is None:
        return None
    by: Kind = "server" if name == SERVER else "trainer" if parsed.logger == "trainer" else "agent"
    return LogLine(by, name, parsed.phase, parsed.facts)


@dataclass
class Logs:
    """Follows the logs of a site while they are written.

    Attributes:
        folder: Folder of the logs, `<name>.log` each.
        said: All phases so far, in order for each process.
        phases: Last phase of each process.
        pids: Last announced process id of each device's trainer.
    """

    folder: Path
    names: Iterable[str]
    said: list[LogLine] = field(default_factory=list)
    phases: dict[tuple[Kind, str], str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)

    def news(self) -> list[LogLine]:
        """Return the phases logged since the last call."""
        news = [parsed for name in self.names for line in self._lines(name) if (parsed := parse(name, line))]
        for line in news:
            self.phases[line.by, line.name] = line.phase
            if "pid" in line.facts:
                self.pids[line.name] = int(line.facts["pid"])
        self.said += news
        return news

    def phase(self, kind: Kind, name: str) -> str:
        """Return the last phase of a process."""
        return self.phases.get((process_of(kind), name), BEGINNING)

    def began(self, by: Kind, name: str) -> None:
        """Reset the phase of a process that was started."""
        self.phases[by, name] = BEGINNING

    def _lines(self, name: str) -> list[str]:
        """Return new complete lines; an incomplete one is read next time."""
        path, start = self.folder / f"{name}.log", self._read.get(name, 0)
        if not path.exists() or path.stat().st_size == start:
            return []
        with path.open("rb") as file:
            file.seek(start)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._read[name] = start + len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()
