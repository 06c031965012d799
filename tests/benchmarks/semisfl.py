"""What SemiSFL's bookkeeping costs beyond its arithmetic: the server's step and memory, and a device's memory.

Eight devices with batches of 32 send features of CIFAR-sized pictures after the third convolution of an
AlexNet of half the width. The measure of the server is the same computation in one plain PyTorch loop, that of a device
the training of its student alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import Figure

HERE = Path(__file__).parent
TURNS, STEPS, SESSION, MIB = 5, 6, 20, 1 << 20
QUICK = {"BATCH": "4"}


def run(*, quick: bool = False) -> list[Figure]:
    """Measure each in a process of its own, with one thread."""
    size = QUICK if quick else {}
    seconds = _once(size, "serve", 1 if quick else TURNS)
    peaks = {who: _once(size, "hold", who, 2 if quick else STEPS) for who in ("server", "loop", "device", "student")}
    keeping = _once(size, "hold", "keeping", 2 if quick else SESSION)
    return [
        Figure("a server's step, 8 devices", 1e3 * seconds["server"], "CPU ms"),
        Figure("beside a plain loop", seconds["server"] / seconds["loop"], "x", "<= 1.15"),
        Figure("a server's peak memory", peaks["server"] / MIB, "MiB"),
        Figure("that beside a plain loop's", peaks["server"] / peaks["loop"], "x", "<= 1.3"),
        Figure(f"likewise, with all gradients of {SESSION} steps kept", keeping / peaks["loop"], "x", "<= 1.3"),
        Figure("a device's peak memory, both bottoms", peaks["device"] / MIB, "MiB"),
        Figure("that beside the student's training alone", peaks["device"] / peaks["student"], "x", "<= 1.6"),
    ]


def _once(size: Mapping[str, str], *arguments: object) -> Any:
    command = [sys.executable, str(HERE / "semisfl_once.py"), *map(str, arguments)]
    there = os.environ | {"PYTHONPATH": str(HERE.parents[1]), **size}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=there).stdout)
