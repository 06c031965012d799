"""Handwritten digits for demos without a download: the 1,797 pictures shipped in scikit-learn.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998, https://doi.org/10.24432/C50P49, its
test half. Only the file is read; scikit-learn itself would take too much memory on a device.
"""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path

import numpy as np

from shared.data.sources.arrays import Arrays, ReadPart, shuffled_order
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.extras import install_command

SIDE = 8
MAX_INK = 16
"""A pixel counts the inked ones of 16."""
SPLIT_SEED = 0
TRAIN_SHARE = 0.8


def read(spec: Data) -> Arrays:
    """Read inputs of shape (N, 1, 8, 8) in [0, 1] and labels 0 to 9: 1,438 to train, 359 to test.

    Raises:
        ConfigError: scikit-learn is absent or its file damaged.
    """
    path = find()
    try:
        columns = None if spec.reads_labels else range(SIDE * SIDE)
        table = np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2, usecols=columns)
        pictures = (table[:, : SIDE * SIDE] / np.float32(MAX_INK)).reshape(-1, 1, SIDE, SIDE)
        labels = table[:, -1].astype(np.int64) if spec.reads_labels else None
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error) as error:
        raise ConfigError(f"{path}: damaged ({error}); reinstall: {install_command('demo')}") from error
    order = shuffled_order(len(pictures), SPLIT_SEED)
    count = round(len(pictures) * TRAIN_SHARE)
    index = order[:count] if spec.split == "train" else order[count:]
    examples = Arrays.from_inputs(pictures) if labels is None else Arrays(pictures, labels)
    return examples.subset(np.sort(index))


def read_part(spec: Data, most: int | None = None) -> ReadPart:  # noqa: ARG001 - it is small
    """Read all examples; raise as `read`."""
    arrays = read(spec)
    return ReadPart(arrays, arrays.labels)


def find() -> Path:
    """Locate the digits file in the installed scikit-learn.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    for place in (package.submodule_search_locations or ()) if package else ():
        path = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise ConfigError(f"source digits needs scikit-learn, which is not installed: {install_command('demo')}")
