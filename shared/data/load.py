"""Load a `Data` spec's examples as tensors to train on: what `sources.read` reads, and how it is augmented.

Whoever only evaluates on a board without torch reads arrays there; here they become tensors in the same memory.
"""

from __future__ import annotations

from shared.data.augment import AUGMENTS
from shared.data.examples import Examples
from shared.data.sources.arrays import Arrays
from shared.data.sources.read import read_share, read_whole
from shared.data.spec import Data


def load(spec: Data) -> Examples:
    """Return this device's share of the examples, as `read_share`; `holdout` is left to `split_holdout`.

    Raises:
        ConfigError: A file is missing, damaged or not as expected, or the partition does not fit it.
    """
    return as_examples(read_share(spec), spec)


def load_whole(spec: Data) -> Examples:
    """Return what the devices share, as `read_whole`, and raise as it does."""
    return as_examples(read_whole(spec), spec)


def as_examples(arrays: Arrays, spec: Data) -> Examples:
    """Return arrays as tensors in the same memory, augmented as the spec says."""
    examples = Examples.of(arrays)
    return examples if spec.augment == "none" else examples.augmented(AUGMENTS[spec.augment])
