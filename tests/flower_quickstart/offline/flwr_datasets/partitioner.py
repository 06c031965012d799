"""Partitioner of the stand-in."""

from dataclasses import dataclass


@dataclass
class IidPartitioner:
    """Number of partitions."""

    num_partitions: int
