"""Data set cache for simulated devices: read and partition once per process."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from shared.data.classes import normalise_class_names
from shared.data.examples import Examples
from shared.data.load import as_examples
from shared.data.partition import Index, Shares, select_share, split
from shared.data.sources.arrays import Arrays, count_sides
from shared.data.sources.read import read_whole
from shared.data.spec import NONE, Data


@dataclass
class DataCache:
    """Full data sets and their partitions; a device's share is copied out on request."""

    _sets: dict[bytes, Arrays] = field(default_factory=dict)
    _shares: dict[bytes, Shares] = field(default_factory=dict)

    def load(self, spec: Data) -> Examples:
        """Return a device's examples, as `shared.data.load.load` does.

        Raises:
            ConfigError: The data cannot be read or partitioned.
        """
        share = self._share(spec)
        examples = self._read_full(spec)
        selected = examples if share is None else examples.subset(share)
        return as_examples(selected if spec.is_labelled else selected.without_labels(), spec)

    def count(self, spec: Data) -> int:
        """Count a device's examples, including those held out; 0 for source `none`.

        Raises:
            ConfigError: The data cannot be read or partitioned.
        """
        if spec.source == NONE:
            return 0
        share = self._share(spec)
        return len(self._read_full(spec) if share is None else share)

    def count_sides(self, spec: Data) -> tuple[int, int]:
        """Count a device's held-out examples, and those to train on; raise as `count`."""
        share, identities = self._share(spec), self._read_full(spec).identities
        return count_sides(
            self.count(spec), identities if share is None or identities is None else identities[share], spec
        )

    def example(self, spec: Data) -> Tensor:
        """Return the inputs of one example of the data set, of shape (...)."""
        return torch.from_numpy(self._read_full(spec).inputs[0])

    def classes(self, spec: Data) -> tuple[str, ...] | None:
        """Return the data set's class names as a device reports them; None where no label is read."""
        return normalise_class_names(self._read_full(spec).classes) if spec.has_classes else None

    def _read_full(self, spec: Data) -> Arrays:
        unsplit = msgspec.structs.replace(spec, partition=None, holdout=0.0, validation=0.0)
        if spec.is_held_out_by_hash:  # which decides what windows are left out
            for name in ("holdout", "validation"):  # the constructor refuses them without labels, see `drop_labels`
                msgspec.structs.force_setattr(unsplit, name, getattr(spec, name))
        key = msgspec.msgpack.encode((unsplit, spec.reads_labels))
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
            self._shares[key] = split(self._read_full(spec), spec.partition)
        return select_share(self._shares[key], spec.partition)
