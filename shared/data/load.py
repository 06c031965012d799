"""Load the examples of a `Data` spec as tensors, with augmentation.

Devices without torch evaluate on the arrays of `sources.read`; here they become tensors in the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.data.augment import Augment, crop_flip
from shared.data.examples import Examples
from shared.data.sources.arrays import Arrays
from shared.data.sources.read import read_share, read_whole
from shared.data.spec import Data

AUGMENTS: Mapping[str, Augment] = {"crop-flip": crop_flip}
"""Augmentations by their name in `Data.augment`."""


def load(spec: Data) -> Examples:
    """Load this device's share of the examples, see `read_share`; `holdout` is left to `split_holdout`.

    Raises:
        ConfigError: A file is missing, damaged or not as expected, or the partition does not fit it.
    """
    return as_examples(read_share(spec), spec)


def load_whole(spec: Data) -> Examples:
    """Load the examples that the devices share, see `read_whole`."""
    return as_examples(read_whole(spec), spec)


def as_examples(arrays: Arrays, spec: Data) -> Examples:
    """Wrap arrays as tensors in the same memory, augmented as configured."""
    examples = Examples.of(arrays)
    return examples if spec.augment == "none" else examples.with_augment(AUGMENTS[spec.augment])
