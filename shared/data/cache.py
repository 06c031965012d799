"""Cache of data sets for a process that does the work of many devices: read once, partitioned once."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from shared.data.classes import as_told
from shared.data.examples import Examples
from shared.data.load import as_examples
from shared.data.partition import Index, Shares, select_share, split
from shared.data.sources.arrays import Arrays
from shared.data.sources.read import read_whole
from shared.data.spec import Data


@dataclass
class DataCache:
    """Whole data sets, and whose each example is; a device's share is copied out of them when it is asked for."""

    _sets: dict[bytes, Arrays] = field(default_factory=dict)
    _shares: dict[bytes, Shares] = field(default_factory=dict)

    def load(self, spec: Data) -> Examples:
        """Return a device's examples, as `shared.data.load.load` does.

        Raises:
            ConfigError: As there.
        """
        share = self._share(spec)
        examples = self._whole(spec)
        own = examples if share is None else examples.subset(share)
        return as_examples(own if spec.is_labelled else own.without_labels(), spec)

    def count(self, spec: Data) -> int:
        """Return how many examples a device has, those it holds back included.

        Raises:
            ConfigError: As `load`.
        """
        share = self._share(spec)
        return len(self._whole(spec) if share is None else share)

    def example(self, spec: Data) -> Tensor:
        """Return the inputs of one example of the data set, of shape (...)."""
        return torch.from_numpy(self._whole(spec).inputs[0])

    def classes(self, spec: Data) -> tuple[str, ...] | None:
        """Return the names of the data set's classes, as a device tells them; None where no label is read."""
        return as_told(self._whole(spec).classes) if spec.is_labelled else None

    def _whole(self, spec: Data) -> Arrays:
        whole = msgspec.structs.replace(spec, partition=None, holdout=0.0, validation=0.0)
        key = msgspec.msgpack.encode((whole, spec.reads_labels))
        if key not in self._sets:
            self._sets[key] = read_whole(spec)
        return self._sets[key]

    def _share(self, spec: Data) -> Index | None:
        """Return the indices of a device's examples; None for all."""
        if spec.partition is None:
            return None
        everybodys = {"client": ""} if hasattr(spec.partition, "client") else {"index": 0}
        partition = msgspec.structs.replace(spec.partition, **everybodys)
        key = msgspec.msgpack.encode(msgspec.structs.replace(spec, partition=partition, holdout=0.0, validation=0.0))
        if key not in self._shares:
            self._shares[key] = split(self._whole(spec), spec.partition)
        return select_share(self._shares[key], spec.partition)
