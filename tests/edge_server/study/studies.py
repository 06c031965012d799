"""Small studies for tests: a plan of three devices on a data set that is read in no time."""

from __future__ import annotations

from pathlib import Path

from edge_server.study.grid import Cell, cells
from edge_server.study.spec import Study, load
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES

HEAD = 'name = "study"\nplan = "plan.toml"\n'
TWO_SEEDS = "[grid]\nseed = [1, 2]\n"
VARIANTS = """
[[variant]]
name = "base"
[[variant]]
name = "prox"
set = { algorithm = { name = "fedprox", options = { mu = 0.1 } } }
"""


def write_study(folder: Path, text: str, *, epochs: int = 1, rounds: int = 2) -> Path:
    """Write a study and its plan."""
    write_plan(
        folder,
        rounds=rounds,
        more=DEVICES,
        model='name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }',
        hyper=f"local_epochs = {epochs}\nbatch_size = 8\nlearning_rate = 0.2",
        cohort="min_devices = 3",
        evaluation="every = 1",
        data=write_examples(folder),
        partition='kind = "even"',
    )
    path = folder / "study.toml"
    path.write_text(text)
    return path


def grid_of(folder: Path, text: str, **plan: int) -> tuple[Study, list[Cell]]:
    """Return a study and its cells."""
    path = write_study(folder, text, **plan)
    study, base = load(path)
    return study, cells(study, base, path, path.read_text(), folder)
