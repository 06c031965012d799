"""Run benchmarks: `python tests/benchmarks/run.py [--quick] [--json FILE] [NAME ...]`; a table, and rows as JSON.

All that are named are tried, also after one that failed; the exit code is 1 if one could not run or missed a target,
and with `--quick`, whose sizes are too small for targets, only if one could not run. An unknown name is 2.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from measure import Figure, NotRun, Row
from rich.console import Console
from rich.table import Table

BENCHES = [
    "wire",
    "packing",
    "paths",
    "starts",
    "idle",
    "inference",
    "collaborative",
    "rounds",
    "disk",
    "tls",
    "memory",
    "journal",
    "floods",
    "power-reads",
    "energy",
    "probing",
    "cpu",
    "threads",
    "replay",
    "together",
    "link",
    "flower-adapter",
    "exact",
    "gap",
    "gpu",
    "cuts",
    "savings",
    "split",
    "u-shape",
    "frozen",
    "optimizers",
    "shares",
    "sources",
    "views",
    "semisfl",
]
"""Modules of this folder, `-` for `_`, in the order in which they run; each has a `run(quick=...)`."""
ROOT, ROWS = Path(__file__).parents[2], Path("build/bench.json")


def commit() -> str:
    """Return the short hash of the commit that is measured, with `-dirty` where files differ from it."""
    if not (git := shutil.which("git")):
        return "unknown"
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def tried(names: Sequence[str], *, quick: bool) -> tuple[list[Row], dict[str, str]]:
    """Run benchmarks one after the other; return their rows, and the causes of those that failed."""
    rows, failed = list[Row](), dict[str, str]()
    for name in names:
        began = time.monotonic()
        try:
            rows += import_module(name.replace("-", "_")).run(quick=quick)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was, the others are to be measured
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    return rows, failed


def as_json(row: Row) -> dict[str, object]:
    """Return a row for the file."""
    if isinstance(row, NotRun):
        return {"name": row.name, "not_run": row.reason}
    return {"name": row.name, "value": row.value, "unit": row.unit, "target": row.target, "ok": row.ok}


def table(rows: Sequence[Row], *, quick: bool) -> Table:
    """Return the rows as a table; of a quick run no target is judged."""
    made = Table("figure", "value", "unit", "target", "", box=None)
    for row in rows:
        if isinstance(row, NotRun):
            made.add_row(row.name, "-", "", "", f"not run: {row.reason}")
        else:
            verdict = "" if quick or not row.target else "ok" if row.ok else "MISSED"
            made.add_row(row.name, f"{row.value:.4g}", row.unit, row.target, verdict)
    return made


def main() -> int:
    """Run all, or those named; return the exit code."""
    parser = argparse.ArgumentParser(description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)}; all unless named")
    parser.add_argument("--quick", action="store_true", help="the smallest size of each: whether it runs at all")
    parser.add_argument("--json", type=Path, default=ROWS, metavar="FILE", help=f"for the rows; {ROWS} unless named")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    measured = commit()
    rows, failed = tried(options.names or BENCHES, quick=options.quick)
    console = Console(width=140)
    console.print(f"commit {measured}{', quick: the sizes are too small for targets' if options.quick else ''}")
    console.print(table(rows, quick=options.quick))
    for name, cause in failed.items():
        console.print(f"{name} FAILED: {cause}", highlight=False, markup=False)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"commit": measured, "quick": options.quick, "failed": failed, "rows": [as_json(row) for row in rows]}
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    missed = [row for row in rows if isinstance(row, Figure) and not row.ok]
    return 1 if failed or (missed and not options.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
