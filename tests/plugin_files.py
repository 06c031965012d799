"""A distribution with plugins of every kind, as files: what an installer leaves behind."""

from __future__ import annotations

from pathlib import Path

METHODS = '''
"""Plugins of every kind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import fedavg
from shared.codecs.base import Codec
from shared.codecs.dense import dense
from shared.models.base import Model

FIGURE = 7


def slow(share: float = 1.0) -> Algorithm:
    """Average like FedAvg, and move by a share of the way only."""
    plain = fedavg()

    def aggregate(state, mean):
        after = plain.aggregate(state, mean)
        tree = {key: torch.lerp(leaf, after.tree[key], share) for key, leaf in state.tree.items()}
        return replace(after, tree=tree)

    return replace(plain, aggregate=aggregate)


def net(features: int = 4, classes: int = 3) -> Model:
    layers = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))
    return Model(layers, {1: 2}, (features,))


def plain() -> Codec:
    return dense()


def pairs(data):
    count = int(Path(data.path).read_text())
    labels = np.arange(count) % 3
    return np.eye(4)[labels] + np.arange(count)[:, None] % 5, labels


def wrong() -> Codec:
    return 3


def raising() -> Codec:
    raise KeyError("of its own")
'''
ENTRY_POINTS = """
[fieldfleet.algorithms]
slow = PACKAGE.methods:slow
[fieldfleet.models]
tiny = PACKAGE.methods:net
[fieldfleet.codecs]
plain = PACKAGE.methods:plain
[fieldfleet.sources]
pairs = PACKAGE.methods:pairs
"""


def write_distribution(
    folder: Path, *, package: str = "fieldplug", name: str = "field-plug", version: str = "1.2"
) -> None:
    """Write a package and its metadata into a folder of the Python path."""
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text("")
    (folder / package / "methods.py").write_text(METHODS)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS.replace("PACKAGE", package))
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{package}/methods.py,,\n")
