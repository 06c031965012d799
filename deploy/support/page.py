"""Write the page of supported systems out of the table that `setup` and `doctor` read.

python deploy/support/page.py > deploy/SUPPORT.md
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shared.errors import ConfigError
from shared.runtime.support.table import LEAST_MEMORY_MB, Purpose, Row, System, Wheel, choose, read_table, read_wheels

MAIN = ("torch", "onnxruntime", "onnxruntime-gpu", "cvxpy")
BOARDS = Path(__file__).parent / "boards.toml"
Tested = Literal["real", "emulated", "recorded", "not yet"]

TOP = """# Which systems are supported

Written by `python deploy/support/page.py` from [table.toml](../shared/runtime/support/table.toml), which
`device-agent setup`, `edge-server setup` and `device-agent doctor` read; the first row that fits a system counts.
Sizes are what is downloaded. Tested: *real*, on a machine of that kind; *emulated*, its processor in software, which
shows that it works and not how fast; *recorded*, only the choice of files, by the recorded files of such a board.

The packages of the agent run on Python 3.10 to 3.14, those of the server on 3.11 to 3.14: the system's own Python,
whichever it is. In a clone, Python 3.10 needs the versions of `constraints-3.10.txt`. `make pythons` imports everything
and trains on each Python that a machine has: 3.10.13, 3.11.7, 3.12.1 and 3.13.0 were tried on x86-64; 3.14 was tried as
Ubuntu's.

## By board

What `setup` installs on each, by the table below.

| board | system | Python | to train | to serve | a gateway | tested |
|---|---|---|---|---|---|---|
"""
RULES = """
## By system

| system | Python | to train | to serve | a gateway | tested |
|---|---|---|---|---|---|
"""
BELOW = """
The emulated processors are QEMU's Cortex-A53 (Raspberry Pi 3 and Zero 2 W), A72 (Raspberry Pi 4) and A76 (Raspberry
Pi 5). On the first two `import torch` of 2.10.0 dies of an illegal instruction, and the versions of the table train.
`make fresh ARCH=arm64 RELEASE=13 CPU=cortex-a53` repeats a row. The x86-64 rows *served alone* where PyTorch's build
for the CPU could not be downloaded on the machine that tried them; their packages and wheels are otherwise the same.
"""


def rows() -> Iterator[str]:
    """Yield a line of the page for each row of the table."""
    wheels = read_wheels()
    for row in read_table().row:
        if row.refused:
            yield f"| {row.systems} | {row.python or 'any'} | no: {row.refused} | no | no | {row.tested} |"
        else:
            cells = [cell(wheels.take(row.wheels, purpose)) for purpose in ("train", "infer", "server")]
            yield f"| {told(row)} | {row.python} | {' | '.join(cells)} | {row.tested} |"


@dataclass(frozen=True)
class Board:
    """A board with one of its systems.

    Attributes:
        system: What runs on it, for people.
        machine: As `uname -m` prints it.
        tested: How it was tried.
        python: Its version; empty for any.
        l4t: Major version of Jetson's system.
        lacks: As `System`'s.
        memory_mb: Least that its system has; 0 for enough.
        record: Its folder in the reference material.
        how: What of it was tried.
    """

    name: str
    system: str
    machine: str
    tested: Tested
    python: str = ""
    l4t: int = 0
    lacks: str = ""
    memory_mb: int = 0
    record: str = ""
    how: str = ""

    def __post_init__(self) -> None:
        """Refuse a word that says nothing of how it was tried."""
        if self.tested not in get_args(Tested):
            raise ValueError(f"{self.name}: tested is {self.tested!r}; use {', '.join(get_args(Tested))}")

    def row(self) -> str:
        """Return the board's line of the page."""
        cells = [self.cell(purpose) for purpose in ("train", "infer", "server")]
        how = f"{self.tested}: {self.how}" if self.how else self.tested
        return f"| {self.name} | {self.system} | {self.python or 'any'} | {' | '.join(cells)} | {how} |"

    def cell(self, purpose: Purpose) -> str:
        """Return what `setup` brings for a purpose, or `no`."""
        system = System(self.machine, self.python, self.l4t, self.lacks)
        try:
            choice = choose(read_table(), read_wheels(), system, purpose)
        except ConfigError:
            return "no"
        if 0 < self.memory_mb < LEAST_MEMORY_MB[purpose]:
            return f"no: it wants {LEAST_MEMORY_MB[purpose]} MB of memory"
        return cell(choice.wheels)


def boards() -> list[Board]:
    """Return all boards of the file."""
    return [Board(**one) for one in tomllib.loads(BOARDS.read_text())["board"]]


def told(row: Row) -> str:
    """Return what the page says of a system."""
    return f"{row.systems}. {row.note[:1].upper()}{row.note[1:]}" if row.note else row.systems


def cell(wheels: Sequence[Wheel]) -> str:
    """Return the versions and the size of what a purpose takes; `no` of nothing."""
    main = [f"{one.name} {one.version}" for name in MAIN for one in wheels if one.name == name]
    size = sum(one.bytes for one in wheels) / 1e6
    more = " and torch" if any(not one.bytes for one in wheels) else ""
    return f"{', '.join(main)}; {size:.0f} MB{more}" if main else "no"


def page() -> str:
    """Return the page."""
    by_board = "".join(f"{one.row()}\n" for one in boards())
    return TOP + by_board + RULES + "\n".join(rows()) + "\n" + BELOW


if __name__ == "__main__":
    sys.stdout.write(page())
