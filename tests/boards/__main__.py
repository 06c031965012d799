"""Print recorded boards against readings and clocks, expected and got: `python -m tests.boards [UNIT…]`.

Exit code 1 where something differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from device_agent.commands.diagnosis.board_text import format_columns
from tests.boards import units
from tests.boards.clocks import BOUNDS, worst_step
from tests.boards.compare import compare, load
from tests.machine import RECORDED as ROOT

EXPECTED = Path(__file__).with_name("expected.toml")


def main(wanted: list[str]) -> int:
    boards = ROOT / "reference" / "boards"
    if not boards.is_dir():
        sys.stderr.write(f"{boards} is absent; set FIELDFLEET_SHARED\n")
        return 2
    figures, clocks = _figures(boards, wanted), _clocks(boards, wanted)
    head = format_columns(figures, ("BOARD", "READING", "EXPECTED", "GOT", ""))
    counted = format_columns(clocks, ("BOARD", "STEPS", "WORST AT", "OFF BY", "BOUND", ""))
    wrong = sum(bool(row[-1]) for row in (*figures, *clocks))
    summary = (
        f"{len({row[0] for row in figures})} boards, {len(figures)} comparisons, {len(clocks)} clocks, {wrong} differ"
    )
    sys.stdout.write("\n".join([*head, "", *counted, "", summary]) + "\n")
    return 1 if wrong else 0


def _figures(boards: Path, wanted: list[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for unit, expected in load(EXPECTED).items():
        if _is_wanted(unit, wanted):
            with tempfile.TemporaryDirectory() as scratch:
                lines = compare(units.build(boards, unit, Path(scratch)), expected)
            rows += [(unit, line.what, line.expected, line.got[:90], "" if line.same else "DIFFERS") for line in lines]
    return rows


def _clocks(boards: Path, wanted: list[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for unit, bound in BOUNDS.items():
        if _is_wanted(unit, wanted):
            with tempfile.TemporaryDirectory() as scratch:
                steps, worst, off = worst_step(boards, unit, Path(scratch))
            verdict = "" if abs(off) <= bound else "DIFFERS"
            rows.append((unit, str(steps), f"{worst:.0f} MHz", f"{100 * off:+.1f} %", f"{100 * bound:.0f} %", verdict))
    return rows


def _is_wanted(unit: str, wanted: list[str]) -> bool:
    return not wanted or any(unit.startswith(name) for name in wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
