"""Stand-in for the package of Flower's data sets, which downloads them: random pictures in place of CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

EXAMPLES = 240
PIXELS = 32


class _Rows:
    def __init__(self, indices: np.ndarray, transform: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]) -> None:
        self._indices, self._transform = indices, transform

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = int(self._indices[index])
        label = seed % 10
        picture = np.random.default_rng(seed).normal(20 * label, 20, (PIXELS, PIXELS, 3)).clip(0, 255).astype(np.uint8)
        return {name: values[0] for name, values in self._transform({"img": [picture], "label": [label]}).items()}


class _Partition(dict[str, _Rows]):
    def with_transform(self, transform: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]) -> Mapping[str, _Rows]:
        """Return both parts, read through a function of columns."""
        return {name: _Rows(rows._indices, transform) for name, rows in self.items()}

    def train_test_split(self, test_size: float, seed: int) -> _Partition:
        """Return the partition divided at random."""
        indices = np.random.default_rng(seed).permutation(self["train"]._indices)
        cut = int(len(indices) * (1 - test_size))
        return _Partition(train=_Rows(indices[:cut], dict), test=_Rows(indices[cut:], dict))


class FederatedDataset:
    """Data set of which each partition has every n-th picture."""

    def __init__(self, dataset: str, partitioners: Mapping[str, Any]) -> None:
        if dataset != "uoft-cs/cifar10":
            raise ValueError(dataset)
        self._count = partitioners["train"].num_partitions

    def load_partition(self, partition_id: int) -> _Partition:
        """Return the pictures of one device."""
        return _Partition(train=_Rows(np.arange(partition_id, EXAMPLES, self._count), dict))
