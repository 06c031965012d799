"""Run benchmarks: `python tests/benchmarks/run.py [NAME]`. Prints a table and writes build/bench.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import cpu
import cuts
import energy
import exact
import frozen
import gap
import idle
import link
import memory
import optimizers
import packing
import power_reads
import probing
import replay
import rounds
import savings
import shares
import split
import starts
import together
import u_shape
import wire
from measure import Figure
from rich.console import Console
from rich.table import Table

BENCHES: Mapping[str, Callable[[], list[Figure]]] = {
    "wire": wire.run,
    "packing": packing.run,
    "starts": starts.run,
    "idle": idle.run,
    "rounds": rounds.run,
    "memory": memory.run,
    "power-reads": power_reads.run,
    "energy": energy.run,
    "probing": probing.run,
    "cpu": cpu.run,
    "replay": replay.run,
    "together": together.run,
    "link": link.run,
    "exact": exact.run,
    "gap": gap.run,
    "cuts": cuts.run,
    "savings": savings.run,
    "split": split.run,
    "u-shape": u_shape.run,
    "frozen": frozen.run,
    "optimizers": optimizers.run,
    "shares": shares.run,
}


def main() -> int:
    """Run all, or those named; exit code 1 if a target is missed, 2 for an unknown name."""
    names = sys.argv[1:] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        sys.stderr.write(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}\n")
        return 2
    figures: list[Figure] = []
    for name in names:
        sys.stderr.write(f"{name} …\n")
        figures += BENCHES[name]()
    table = Table("figure", "value", "unit", "target", "", box=None)
    for one in figures:
        table.add_row(
            one.name, f"{one.value:.4g}", one.unit, one.target, "" if not one.target else "ok" if one.ok else "MISSED"
        )
    Console(width=110).print(table)
    Path("build").mkdir(exist_ok=True)
    rows = [{"name": f.name, "value": f.value, "unit": f.unit, "target": f.target, "ok": f.ok} for f in figures]
    Path("build/bench.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(one.ok for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
