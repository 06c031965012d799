"""Parameters and buffers of a network, tied ones once.

A tied tensor has several names there. It travels, and is stored and averaged, under the first of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call


def read_leaves(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers in order; they are the network's, without gradients, not copies."""
    first: dict[int, str] = {}
    leaves: Mapping[str, Tensor] = network.state_dict(keep_vars=True)
    return {name: leaf.detach() for name, leaf in leaves.items() if first.setdefault(id(leaf), name) == name}


def load_leaves(network: nn.Module, leaves: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers into a network; tied ones are set under all their names.

    Raises:
        RuntimeError: A leaf of `read_leaves` is missing, an unknown one is present, or a shape differs.
    """
    result = network.load_state_dict(leaves, strict=False)
    if result.unexpected_keys or (result.missing_keys and not tied_names(network).keys() >= {*result.missing_keys}):
        network.load_state_dict(leaves)  # names them


def call_with(network: nn.Module, leaves: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return a network's outputs with other parameters and buffers in place of its own, which stay.

    torch's `functional_call` alone does not restore a tied parameter of a module that has two names, and leaves buffers
    that are not in the state dict on the network's device.

    Args:
        leaves: By the names of `read_leaves`; the network's own where one is missing.
        inputs: Of shape (N, ...).
    """
    constants = [(name, leaf) for name, leaf in network.named_buffers() if leaf.device != inputs.device]
    copies = {name: leaf.to(inputs.device) for name, leaf in constants if not leaf.is_meta}
    every = {**copies, **leaves}
    tied = tied_names(network)
    if tied:
        slots = {name for prefix, module in network.named_modules() for name in _own_names(prefix, module)}
        every |= {name: every[first] for name, first in tied.items() if first in every and name in slots}
    outputs: Tensor = functional_call(network, every, (inputs,), tie_weights=not tied)
    return outputs


def _own_names(prefix: str, module: nn.Module) -> list[str]:
    """Return the names of a module's parameters and buffers, without those of modules within."""
    return [f"{prefix}.{name}" if prefix else name for name in (*module._parameters, *module._buffers)]  # noqa: SLF001


def read_constants(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that are not in the state dict."""
    names = network.state_dict().keys()
    return {name: leaf.clone() for name, leaf in network.named_buffers() if name not in names}


def reset_constants(network: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Set buffers to copies of `read_constants`, whatever a forward has made of them."""
    for name, leaf in constants.items():
        owner, _, buffer = name.rpartition(".")
        network.get_submodule(owner)._buffers[buffer] = leaf.clone()  # noqa: SLF001


def tied_names(network: nn.Module) -> dict[str, str]:
    """Return the further names of tied leaves, each with the name of `read_leaves`."""
    first: dict[int, str] = {}
    leaves: Mapping[str, Tensor] = network.state_dict(keep_vars=True)
    return {name: other for name, leaf in leaves.items() if (other := first.setdefault(id(leaf), name)) != name}
