"""Chain of layers with the parameter names of the original module.

Methods that cut a network, or leave neurons out, need its layers in order: `shared.models.chain_trace` finds them. Here
they run one after the other. A layer named `features.0.conv` in the user's module has that name here too, so that
trees, messages and releases do not depend on whether a chain was derived.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn


@dataclass(frozen=True)
class Value:
    """Reference to the result of an operation, or to the link's input, by number."""

    number: int


Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments; any `Value` in them is replaced by its result."""


@dataclass(frozen=True)
class Operation:
    """One operation of a traced forward.

    Attributes:
        number: Number of its result.
        kind: A call of a module, a function or a method of the first argument; or a parameter or buffer.
        target: Name of the module, parameter, buffer or method; or the function.
        train: Arguments in training mode.
        evaluate: Arguments in evaluation mode.
    """

    number: int
    kind: Literal["module", "function", "method", "leaf"]
    target: str | Callable[..., Any]
    train: Arguments
    evaluate: Arguments


@dataclass(frozen=True)
class ChainLink:
    """One layer of a chain: a module, or operations between two points where a single tensor passes.

    Attributes:
        name: Name of the layer: the module's, or that of the last operation.
        modules: Modules by their name in the network; of a single module, that one alone.
        leaves: Names of the parameters and buffers that operations read directly.
        operations: In order; empty for a single module.
        source: Number of the link's input.
        result: Number of the link's output.
        mode: Holds the mode of the operations, training or evaluation.
    """

    name: str
    modules: Mapping[str, nn.Module]
    leaves: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    source: int = 0
    result: int = 0
    mode: nn.Module = field(default_factory=nn.Module)


class Segment(nn.Module):
    """Layer that repeats the operations of a link; its parameters belong to the chain."""

    def __init__(self, link: ChainLink, chain: LayerChain) -> None:
        super().__init__()
        self._link, self._chain = link, (chain,)  # in a tuple: not a submodule

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the link's output; shapes are those of the user's module."""
        link, chain = self._link, self._chain[0]
        results: dict[int, Any] = {link.source: inputs}
        for operation in link.operations:
            args, kwargs = operation.train if link.mode.training else operation.evaluate
            args, kwargs = _fill(args, results), _fill(kwargs, results)
            match operation.kind, operation.target:
                case "leaf", str(name):
                    results[operation.number] = operator.attrgetter(name)(chain)
                case "module", str(name):
                    results[operation.number] = link.modules[name](*args, **kwargs)
                case "method", str(name):
                    results[operation.number] = getattr(args[0], name)(*args[1:], **kwargs)
                case _, function:
                    assert callable(function)
                    results[operation.number] = function(*args, **kwargs)
        output: Tensor = results[link.result]
        return output

    def parts(self) -> Iterator[nn.Module]:
        """Yield the modules that it calls, with those within."""
        for module in self._link.modules.values():
            yield from module.modules()

    def extra_repr(self) -> str:
        """Return the names of its parts."""
        return ", ".join((*self._link.modules, *self._link.leaves))


def _fill(arguments: Any, results: Mapping[int, Any]) -> Any:
    """Return arguments with results in place of their references."""
    match arguments:
        case Value():
            return results[arguments.number]
        case dict():
            return {key: _fill(value, results) for key, value in arguments.items()}
        case list():
            return [_fill(value, results) for value in arguments]
        case tuple():
            return tuple(_fill(value, results) for value in arguments)
        case slice():
            return slice(*(_fill(part, results) for part in (arguments.start, arguments.stop, arguments.step)))
    return arguments


class LayerChain(nn.Sequential):
    """Layers in order; slices have the same layers, parameters and names.

    Its submodules form the hierarchy of the user's module, as far as the layers need it.
    """

    def __init__(self, links: Sequence[ChainLink], source: nn.Module) -> None:
        """Take the layers of the links.

        Args:
            source: Module in which the names of parameters and buffers are looked up.
        """
        nn.Module.__init__(self)
        self._chain_links = tuple(links)
        for link in links:
            for name, module in link.modules.items():
                _place(self, name, module)
        for link in links:
            for name in link.leaves:
                _place_leaf(self, name, source)
            if link.operations:
                _place(self, f"{link.name}_mode", link.mode)
        self._chain_layers = tuple(
            Segment(link, self) if link.operations else next(iter(link.modules.values())) for link in links
        )

    def named_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the layers with their names, in order; one without parameters may occur several times."""
        return [(link.name, layer) for link, layer in zip(self._chain_links, self._chain_layers, strict=True)]

    def layer_names(self) -> list[list[str]]:
        """Return the names of the modules, parameters and buffers that each layer uses."""
        return [[*link.modules, *link.leaves] for link in self._chain_links]

    def __len__(self) -> int:
        return len(self._chain_layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._chain_layers)

    def __getitem__(self, place: slice | int) -> Any:  # a chain, or a layer
        if isinstance(place, slice):
            return LayerChain(self._chain_links[place], self)
        return self._chain_layers[place]


def chain_of(layers: Sequence[tuple[str, nn.Module]]) -> LayerChain:
    """Return a chain of named layers."""
    holder = nn.Module()
    return LayerChain([ChainLink(name, {name: layer}) for name, layer in layers], holder)


def named_layers(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers by name, in order; one without parameters, such as a ReLU, may occur several times."""
    if isinstance(layers, LayerChain):
        return layers.named_layers()
    return list(zip(layers._modules, layers, strict=True))  # noqa: SLF001 - `named_children` skips repetitions


def parts_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer and the modules within it."""
    return layer.parts() if isinstance(layer, Segment) else layer.modules()


def part_names(layers: nn.Sequential) -> list[str]:
    """Return names that cover all leaves of some layers: `name` stands for itself and for all that begin with it."""
    if isinstance(layers, LayerChain):
        return [name for names in layers.layer_names() for name in names]
    return [name for name, _ in layers.named_children()]


def count_below(layers: nn.Sequential, leaves: Collection[str]) -> int:
    """Return the number of layers up to the last one that uses any of these leaves; 0 if none does."""
    users = layers.layer_names() if isinstance(layers, LayerChain) else [[name] for name, _ in named_layers(layers)]
    return max(
        (place for place, names in enumerate(users, 1) if any(covers(names, leaf) for leaf in leaves)), default=0
    )


def covers(names: Sequence[str], leaf: str) -> bool:
    """Return True if a leaf is one of the names, or in a module of that name."""
    return any(leaf == name or leaf.startswith(f"{name}.") for name in names)


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under a dotted name; one without a state under another name where that is taken."""
    path, _, last = name.rpartition(".")
    parent = _container(root, path)
    while (present := parent._modules.get(last, module)) is not module:  # noqa: SLF001
        assert not module.state_dict() or not present, f"{name} is used twice"
        last += "_"
    parent._modules[last] = module  # noqa: SLF001 - `add_module` refuses names of methods and dots


def _place_leaf(root: nn.Module, name: str, source: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    parent, owner = _container(root, path), source.get_submodule(path)
    if last in owner._parameters:  # noqa: SLF001
        parent._parameters[last] = owner._parameters[last]  # noqa: SLF001
    else:
        parent._buffers[last] = owner._buffers[last]  # noqa: SLF001
        if last in owner._non_persistent_buffers_set:  # noqa: SLF001
            parent._non_persistent_buffers_set.add(last)  # noqa: SLF001


def _container(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a dotted path, made of empty ones where there is none."""
    for name in filter(None, path.split(".")):
        if root._modules.get(name) is None:  # noqa: SLF001
            root._modules[name] = nn.Module()  # noqa: SLF001
        child = root._modules[name]  # noqa: SLF001
        assert child is not None
        root = child
    return root
