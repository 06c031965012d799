"""Print the rows of two commits side by side: `python tests/benchmarks/compare.py A.json B.json`, files of `run.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FILES = 2


def side_by_side(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Return a row for every figure of either file, with the later one over the earlier one."""
    one, other = ({row["name"]: row for row in content["rows"]} for content in (before, after))
    made = Table("figure", before["commit"], after["commit"], "unit", "ratio", "target", "", box=None)
    for name in dict.fromkeys([*one, *other]):
        rows = one.get(name, {}), other.get(name, {})
        values = [row.get("value") for row in rows]
        newest = rows[1] or rows[0]
        verdicts = [_verdict(row) for row in rows]
        changed = "" if verdicts[0] == verdicts[1] else f"{verdicts[0] or '-'} -> {verdicts[1] or '-'}"
        ratio = f"{values[1] / values[0]:.3f}" if values[0] and values[1] is not None else ""
        shown = [f"{value:.4g}" if value is not None else "-" for value in values]
        made.add_row(name, *shown, newest.get("unit", ""), ratio, newest.get("target", ""), changed)
    return made


def _verdict(row: dict[str, Any]) -> str:
    """Return what was said of a row; empty for one that has no target."""
    if not row:
        return "absent"
    if "not_run" in row:
        return "not run"
    return "" if not row["target"] else "ok" if row["ok"] else "MISSED"


def main() -> int:
    """Compare the files that the command line names."""
    if len(sys.argv) != 1 + FILES:
        sys.stderr.write("usage: compare.py BEFORE.json AFTER.json, as run.py --json writes them\n")
        return 2
    before, after = (json.loads(Path(path).read_text()) for path in sys.argv[1:])
    console = Console(width=150)
    if before["quick"] or after["quick"]:
        console.print("of a quick run: the sizes are too small to compare by")
    console.print(side_by_side(before, after))
    for content in (before, after):
        for name, cause in content["failed"].items():
            console.print(f"{content['commit']}: {name} FAILED: {cause}", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
