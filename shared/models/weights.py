"""Load pretrained weights into a network."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.models.adaptation import select_names
from shared.models.base import Model
from shared.models.leaves import read_leaves, tied_names
from shared.tensors.tree import Tree

COUNTER = "num_batches_tracked"
"""Buffer that files of older versions of torch lack."""
MOST_NAMED = 6


def load_weights(model: Model, stored: Tree, source: str, skip: Collection[str] = ()) -> None:
    """Copy weights into a network.

    Args:
        model: With storage; or without, to check the weights alone.
        source: Where they come from, for messages.
        skip: Names of layers or parameters that keep their values, such as a head for other classes; `*` and `?` are
            wildcards.

    Raises:
        ConfigError: Names or shapes are others than those of the network.
    """
    leaves = read_leaves(model.layers)
    skipped = select_names({*leaves, *stored}, skip, "model.weights_skip")
    expected = {name: leaf for name, leaf in leaves.items() if name not in skipped}
    tied = tied_names(model.layers)
    loaded = {name: leaf for name, leaf in stored.items() if name not in skipped and name not in tied}
    if faults := _find_faults(expected, loaded):
        raise ConfigError(f"{source} does not fit the network: {'; '.join(faults)}; correct the file or the model")
    if any(leaf.is_meta for leaf in leaves.values()):
        return
    with torch.no_grad():
        for name, leaf in expected.items():
            if name in loaded:
                leaf.copy_(loaded[name])


def _find_faults(expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    missing = [name for name in expected if name not in loaded and name.rpartition(".")[2] != COUNTER]
    unexpected = [name for name in loaded if name not in expected]
    shapes = [
        f"{name} is {_show(loaded[name])} in the file and {_show(leaf)} in the network"
        for name, leaf in expected.items()
        if name in loaded and loaded[name].shape != leaf.shape
    ]
    faults = [f"the file has no {_list(missing)}"] if missing else []
    faults += [f"the network has no {_list(unexpected)}"] if unexpected else []
    if shapes:
        more = [f"and {len(shapes) - MOST_NAMED} more"] if len(shapes) > MOST_NAMED else []
        faults += [*shapes[:MOST_NAMED], *more, "weights_skip leaves such layers at their initial values"]
    return faults


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _show(leaf: Tensor) -> str:
    return "x".join(map(str, leaf.shape)) or "scalar"
