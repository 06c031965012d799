"""What starting costs: imports of each package and of each command, in fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import Figure

TURNS = 5
MODULES = (
    "shared",
    "device_agent.__main__",
    "edge_server.__main__",
    "edge_server.rounds.run",
    "device_agent.trainer.perform",
)
PROBE = """
import sys, time
started = time.perf_counter()
import {module}
print(time.perf_counter() - started, "torch" in sys.modules, "numpy" in sys.modules, "cvxpy" in sys.modules)
"""
LIGHT = ("shared", "device_agent.__main__", "edge_server.__main__")


def run(*, quick: bool = False) -> list[Figure]:
    """Measure imports; commands must not load what they may not need."""
    figures: list[Figure] = []
    for module in MODULES:
        seconds, heavy = [], False
        for _ in range(1 if quick else TURNS):
            output = subprocess.run(
                [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=True
            ).stdout.split()
            seconds.append(float(output[0]))
            heavy = heavy or "True" in output[1:]
        figures.append(Figure(f"import {module}", statistics.median(seconds), "s"))
        if module in LIGHT:
            figures.append(Figure(f"heavy libraries after import {module}", float(heavy), "", "<= 0"))
    return figures
