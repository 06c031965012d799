"""Overhead of the Flower adapter over a client's own `fit`, on one thread."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from measure import Figure, NotRun, Row

from tests import flower_environment

HERE = Path(__file__).parent
REPETITIONS, EPOCHS, QUICK = 21, 10, (7, 4)
"""Ten epochs of the quickstart's 479 examples take a third of a second; the adapter adds about 4 ms to any task."""


def run(*, quick: bool = False) -> Sequence[Row]:
    """Perform tasks of the quickstart, and its `fit` alone."""
    repetitions, epochs = QUICK if quick else (REPETITIONS, EPOCHS)
    name = f"Flower adapter: a task over `fit` alone, {epochs} epochs of 479 digits"
    try:
        python = flower_environment.install()
    except (OSError, subprocess.CalledProcessError) as error:
        return [NotRun(name, f"Flower cannot be installed: {error}")]
    command = [str(python), str(HERE / "flower_adapter_once.py"), str(repetitions), str(epochs)]
    environment = flower_environment.environment(flower_environment.APP)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds = json.loads(done.stdout)
    pairs = list(zip(seconds["task"], seconds["fit"], strict=True))
    ratio = statistics.median(task / fit for task, fit in pairs)
    return [
        Figure(name, ratio, "x", "<= 1.1"),
        Figure("the same: `fit` alone", 1e3 * statistics.median(seconds["fit"]), "ms"),
        Figure("the same: task", 1e3 * statistics.median(seconds["task"]), "ms"),
        Figure("the same: added", 1e3 * statistics.median(task - fit for task, fit in pairs), "ms"),
    ]
