"""Fuzz every reader of foreign bytes: `python -m tests.fuzz.run [NAME …]`. Prints a table and writes build/fuzz.json.

RUNS is how often each reader is run (a million), SECONDS how long instead. A finding is left in build/fuzz/, its
traceback is printed, and the exit code is 1. Needs `pip install -c constraints.txt '.[fuzz]'`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess  # noqa: TID251 - libFuzzer ends the process it runs in
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.fuzz.readers import READERS

FOLDER = Path("build/fuzz")
RESULT = Path("build/fuzz.json")
TIMEOUT_S = 5
"""An input that takes longer is a hang."""
PROCESS_MIB = 768
"""What the whole process may grow to; torch alone takes a third of it."""
SEED = 1


def main() -> int:
    """Fuzz all readers, or those named; exit code 1 if anything was found, 2 for an unknown name."""
    names = sys.argv[1:] or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        sys.stderr.write(f"no reader {unknown[0]!r}; there are {', '.join(READERS)}\n")
        return 2
    seconds = os.environ.get("SECONDS")
    limit = f"-max_total_time={seconds}" if seconds else f"-runs={os.environ.get('RUNS') or 1_000_000}"
    sys.stderr.write(f"{', '.join(names)}: {limit} …\n")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        figures = dict(zip(names, pool.map(partial(fuzz, limit=limit), names), strict=True))
    show(figures)
    RESULT.write_text(
        json.dumps((json.loads(RESULT.read_text()) if RESULT.exists() else {}) | figures, indent=1) + "\n"
    )
    return 1 if any(one["findings"] for one in figures.values()) else 0


def fuzz(name: str, limit: str) -> dict[str, Any]:
    """Fuzz one reader in a process of its own; return its figures."""
    corpus = FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(READERS[name].seeds()):
        (corpus / f"seed-{index}").write_bytes(data)
    stats = FOLDER / f"{name}.json"
    stats.unlink(missing_ok=True)
    flags = [
        *(limit, f"-seed={SEED}", f"-max_len={READERS[name].longest}", f"-timeout={TIMEOUT_S}"),
        *(f"-rss_limit_mb={PROCESS_MIB}", f"-artifact_prefix={corpus}-", "-mutate_depth=1"),
        str(corpus),
    ]
    command = [sys.executable, "-m", "tests.fuzz.target", name, str(stats), *flags]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - ours
    found = json.loads(stats.read_text()) if stats.exists() else {"executions": 0, "outcomes": {}}
    progress = re.findall(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr, re.MULTILINE)
    if progress:
        found["executions"], found["edges"], found["features"], found["corpus"] = map(int, progress[-1])
    found["findings"] = sorted(str(path) for path in FOLDER.glob(f"{name}-*"))
    if done.returncode:
        found["findings"] = found["findings"] or [f"exit code {done.returncode}"]
        sys.stderr.write(done.stderr[-4000:] + done.stdout[-4000:])
    return found


def show(figures: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    heads = ("reader", "executions", "per s", "edges", "features", "an input's peak", "process", "findings", "outcomes")
    table = Table(*heads, box=None)
    for name, one in figures.items():
        peak = f"{one.get('peak_input_bytes', 0) >> 10} KiB, {one.get('peak_share_of_bound', 0):.0%} of bound"
        table.add_row(
            *(name, f"{one['executions']:,}", f"{one.get('per_second', 0):,.0f}", str(one.get("edges"))),
            *(str(one.get("features")), peak, f"{one.get('peak_process_mib', 0):.0f} MiB", str(len(one["findings"]))),
            ", ".join(f"{reason} {count}" for reason, count in list(one["outcomes"].items())[:8]),
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    sys.exit(main())
