"""Data sets, networks, losses and metrics of other tasks than classification, as files that a plan names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

CODE = '''
"""A network, losses and metrics of a user."""

import numpy as np
import torch
from torch import nn


def segmenter():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))


def relative(outputs, targets):
    return ((outputs - targets) / (1 + targets.abs())).square().mean(1)


def not_a_number(outputs, targets):
    return (outputs - targets).mean() * float("nan")


def largest(outputs, targets):
    return np.abs(outputs - targets).max(1)


def raising(outputs, targets):
    raise KeyError("of its own")
'''
TASKS = {
    "regression": ('kind = "regression"', 'name = "mlp"\noptions = { features = 5, hidden = 6, classes = 2 }'),
    "forecast": (
        'kind = "forecast"\nloss = "quantile"\nloss_options = { q = 0.7 }\nmetrics = ["quantile_loss", "mae"]',
        'name = "mlp"\noptions = { features = 5, hidden = 6, classes = 3 }',
    ),
    "segmentation": ('kind = "segmentation"\nloss = "dice"', 'name = "fieldtask:segmenter"'),
    "custom": (
        (
            'kind = "regression"\nloss = "fieldtask:relative"\nmetrics = ["fieldtask:largest", "mae"]\n'
            'target = { metric = "fieldtask:largest", direction = "min" }'
        ),
        'name = "mlp"\noptions = { features = 5, hidden = 6, classes = 2 }',
    ),
}
"""Plan sections `[task]` and `[model]` of each task."""
OUTPUTS = {"regression": 2, "forecast": 3, "custom": 2}


def write_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the user's module where this process imports it from."""
    (folder / "fieldtask.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)


def write_data(folder: Path, task: str, count: int = 60) -> str:
    """Write a small data set of a task as npz; return the plan's section of it."""
    random, arrays = np.random.default_rng(7), {}
    for split in ("train", "test"):
        if task == "segmentation":
            pictures = random.normal(size=(count, 1, 6, 6)).astype(np.float32)
            arrays |= {f"x_{split}": pictures, f"y_{split}": np.digitize(pictures[:, 0], (-0.4, 0.4))}
            continue
        inputs = random.normal(size=(count, 5)).astype(np.float32)
        slopes = np.random.default_rng(8).normal(size=(5, OUTPUTS[task]))
        arrays |= {f"x_{split}": inputs, f"y_{split}": (inputs @ slopes + 3).astype(np.float32)}
    np.savez(folder / f"{task}.npz", **arrays)
    targets = "mask" if task == "segmentation" else "values"
    return f'source = "npz"\npath = "{task}.npz"\ntargets = "{targets}"\nholdout = 0.25'
