"""Derive a module's chain of layers from a symbolic trace.

Each module is traced alone, with its submodules as single calls, once in training and once in evaluation mode. A layer
of the chain lies between two points of the trace where a single value passes: a residual block is one layer, and
functions such as `F.relu` are layers as well. Modules within are divided further, where they are chains themselves.

The trace works by stand-ins of the modules, whose calls and parameters are recorded by `torch.fx` proxies. Unlike
`torch.fx.symbolic_trace`, it replaces no method of torch for the whole process, where other threads may compute.

J. Reed, Z. DeVito, H. He, A. Ussery, J. Ansel. torch.fx: Practical Program Capture and Transformation for Deep
Learning in Python. MLSys 2022. https://arxiv.org/abs/2112.08429
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shared.errors import ConfigError
from shared.models.chain import Arguments, ChainLink, LayerChain, Operation, Value, parts_of
from shared.models.functional_layers import DROPOUTS, layer_of
from shared.models.leaves import tied_names
from shared.models.named_inputs import NAMES
from shared.registry import FAULTS

_PURE = {getattr, operator.getitem}
_SIZES = {"size", "dim"}
_RESHAPES = {"view", "reshape", "unflatten", "unfold", torch.reshape, torch.unflatten}
_BATCH_KEPT = (
    *(nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm),  # noqa: SLF001
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),  # noqa: SLF001
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity),
    *(nn.modules.dropout._DropoutNd,),  # noqa: SLF001
)
"""Layers whose outputs have as many examples as their inputs."""
MATRIX = 2
"""Minimum axes of a weight that multiplies."""
FLATTENING = 3
"""Arguments of `x.view(examples, -1)`."""


def trace_chain(network: nn.Module) -> LayerChain:
    """Return the chain of a module's layers; they are its own modules.

    Args:
        network: With or without storage; its forward takes one tensor.

    Raises:
        ConfigError: Its forward cannot be traced, or is no chain; the message names the layer and the reason.
    """
    kind = type(network).__name__
    if _is_layer(network):
        raise ConfigError(f"model: it is a single layer, {kind}, and no chain of layers")
    if names := getattr(network, NAMES, ()):
        inputs = f"its {len(names)} inputs {', '.join(names)} meet inside of it, and a chain has one input"
        raise ConfigError(f"model: {kind} is not a chain of layers: {inputs}")
    links = _tied_leaf(network) or _divide(network, "")
    if isinstance(links, str):
        raise ConfigError(f"model: {kind} is not a chain of layers: {links}")
    if problem := _shared_leaf(network, links) or _unused_weight(network, links):
        raise ConfigError(f"model: {kind} is not a chain of layers: {problem}")
    return LayerChain(links, network)


def cut_places(layers: nn.Sequential) -> dict[int, int]:
    """Return the legal cuts of a chain: number of layers with weights below, and position in the chain.

    A cut is before a layer with weights, and before a Flatten that leads to it.
    """
    counts = [_count_weighted(layer) for layer in layers]
    cuts, below, total = dict[int, int](), 0, sum(counts)
    for place, count in enumerate(counts):
        if count and 0 < below < total:
            cuts[below] = place - isinstance(layers[place - 1], nn.Flatten)
        below += count
    return cuts


def _count_weighted(layer: nn.Module) -> int:
    """Return the number of modules with a weight that multiplies."""
    return sum(any(leaf.ndim >= MATRIX for leaf in module.parameters(recurse=False)) for module in parts_of(layer))


def is_flat(network: nn.Module) -> bool:
    """Check for an `nn.Sequential` of torch's own layers, which is its own chain."""
    is_sequential = type(network).forward is nn.Sequential.forward
    return is_sequential and all(map(_is_layer, network.children()))


def _is_layer(module: nn.Module) -> bool:
    """Check for a module of torch's own, or one whose call does more than its forward, which stays whole."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)  # noqa: SLF001
    is_torchs = type(module).__module__.startswith("torch.") and type(module) is not nn.Sequential
    return is_torchs or any(hooks)


def _divide(module: nn.Module, path: str) -> list[ChainLink] | str:
    """Return the links of a module, or why it has none.

    Args:
        path: Name of the module in the network; empty for the network.
    """
    if type(module).forward is nn.Sequential.forward:
        return [
            link
            for name, layer in module._modules.items()  # noqa: SLF001 - `named_children` skips repetitions
            if layer is not None
            for link in _divide_layer(layer, f"{path}{name}")
        ]
    try:
        train, evaluate = (_Recorder(module).record(train=mode) for mode in (True, False))
    except FAULTS as error:
        return _explain(error)
    return _find_links(module, path, train, evaluate)


def _divide_layer(layer: nn.Module, name: str) -> list[ChainLink]:
    """Return the links of a layer if it is a chain of several, or else the layer as one."""
    links = [] if _is_layer(layer) else _divide(layer, f"{name}.")
    if isinstance(links, str) or not links or _is_block(layer, links):
        return [ChainLink(name, {name: layer})]
    return links


def _is_block(layer: nn.Module, links: Sequence[ChainLink]) -> bool:
    """Check for a module whose own forward does more than to call its layers in order."""
    branches = any(link.operations and link.modules for link in links)
    return type(layer).forward is not nn.Sequential.forward and (len(links) == 1 or branches)


def _explain(error: BaseException) -> str:
    """Return why a forward cannot be traced, with the line of the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    frames = [frame for frame in frames if frame.filename != __file__]
    where = (
        f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    )
    if isinstance(error, fx.proxy.TraceError):
        return f"the flow of its forward depends on values{where}"
    return f"its forward cannot be traced, {str(error).partition(chr(10))[0]}{where}"


class _Recorder(fx.Tracer):
    """Record one module's forward, with calls of its submodules as single operations."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), module
        self._stand_ins: dict[int, nn.Module] = {}

    def record(self, *, train: bool) -> list[fx.Node]:
        """Return the operations in order, without those whose result is unused."""
        source = self.create_proxy("placeholder", "inputs", (), {})
        stand_in = self._stand_in(self.root, "", train=train)
        outputs = type(self.root).forward(stand_in, source)
        self.create_node("output", "output", (self.create_arg(outputs),), {})
        for node in reversed(self.graph.nodes):
            if _is_dead(node):
                self.graph.erase_node(node)
        return list(self.graph.nodes)

    def create_arg(self, a: Any) -> Any:
        """Return an operation's argument: a number that is computed here is a constant of the graph."""
        if isinstance(a, nn.Module):
            raise TypeError(f"a function takes the module {type(a).__name__}")
        return a if isinstance(a, Tensor) else super().create_arg(a)

    def _stand_in(self, module: nn.Module, path: str, *, train: bool) -> nn.Module:
        """Return an object with a module's class and attributes that records calls and uses of parameters."""
        if id(module) in self._stand_ins:
            return self._stand_ins[id(module)]
        kind = type(module)
        if path and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            kind = type(kind.__name__, (kind,), {"__call__": self._call_of(path)})
        stand_in: nn.Module = object.__new__(kind)
        self._stand_ins[id(module)] = stand_in
        prefix = f"{path}." if path else ""
        leaves = {
            kind: {name: self._leaf(f"{prefix}{name}", leaf) for name, leaf in module.__dict__[kind].items()}
            for kind in ("_parameters", "_buffers")
        }
        modules = {
            name: child and self._stand_in(child, f"{prefix}{name}", train=train)
            for name, child in module._modules.items()  # noqa: SLF001
        }
        stand_in.__dict__.update({**module.__dict__, **leaves, "_modules": modules, "training": train})
        return stand_in

    def _leaf(self, name: str, leaf: Tensor | None) -> fx.Proxy | None:
        if leaf is None:
            return None
        node = self.create_node("get_attr", name, (), {})
        if isinstance(leaf, nn.Parameter):
            return fx.proxy.ParameterProxy(self, node, name, leaf)
        return fx.Proxy(node, self)

    def _call_of(self, path: str) -> Callable[..., fx.Proxy]:
        return lambda _module, *args, **kwargs: self.create_proxy("call_module", path, args, kwargs)


def _find_links(module: nn.Module, path: str, train: list[fx.Node], evaluate: list[fx.Node]) -> list[ChainLink] | str:
    """Divide a trace where a single value passes."""
    if [_signature(node) for node in train] != [_signature(node) for node in evaluate]:
        return "its forward has other steps in training than in evaluation"
    source, output = train[0], train[-1]
    if not isinstance(output.args[0], fx.Node):
        return f"its forward returns a {type(output.args[0]).__name__}, not one tensor"
    modes = dict(zip(train, evaluate, strict=True))
    numbers = {node: number for nodes in (train, evaluate) for number, node in enumerate(nodes)}
    flattened = _drop_batch_sizes(module, train)
    steps = [node for node in train if node.op not in {"placeholder", "get_attr", "output"} and not _is_dead(node)]
    links, group, live = list[ChainLink](), list[fx.Node](), source
    for place, node in enumerate(steps):
        group.append(node)
        passing = [
            other
            for other in (source, *steps[: place + 1])
            if any(numbers[user] > numbers[node] for user in other.users)
        ]
        if len(passing) == 1:
            part = _Part(module, path, group, live, passing[0], modes, numbers, flattened)
            links += part.links()
            group, live = [], passing[0]
    return links


def _is_dead(node: fx.Node) -> bool:
    """Check for a result that nothing uses, of an operation that changes nothing."""
    return not node.users and (node.op == "get_attr" or node.target in _PURE | _SIZES)


def _signature(node: fx.Node) -> tuple[object, ...]:
    return node.op, node.target, [other.name for other in node.all_input_nodes], sorted(node.kwargs)


def _drop_batch_sizes(module: nn.Module, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the reshapes that are `flatten(1)`, and remove the numbers of examples that they read.

    They are `x.view(x.size(0), -1)`, the number being of any earlier layer, and `x.view(-1, n)` before a linear layer
    of n inputs, where no other reshape could make several rows of an example.
    """
    flattened, reshapes = set[fx.Node](), [node for node in nodes if node.target in _RESHAPES]
    for node in reshapes:
        if node.op != "call_method" or len(node.args) != FLATTENING:
            continue
        values, first, last = node.args
        if isinstance(first, fx.Node) and last == -1 and _is_batch_size(module, first, values):
            node.args = (values, -1, -1)  # no user of the number of examples
            flattened.add(node)
        elif first == -1 and len(reshapes) == 1 and all(_takes(module, user, last) for user in node.users):
            flattened.add(node)
    for node in reversed(nodes):
        if _is_dead(node):
            node.args = ()
    return flattened


def _is_batch_size(module: nn.Module, number: fx.Node, values: Any) -> bool:
    """Check whether a number is that of the examples in `values`: read from them, or below layers that keep it."""
    match number.op, number.target, number.args:
        case "call_method", "size", (fx.Node() as read, 0):
            pass
        case "call_function", operator.getitem, (fx.Node(target=target) as shape, 0):
            is_shape = (target == "size" and len(shape.args) == 1) or (target is getattr and shape.args[1] == "shape")
            if not is_shape:
                return False
            [read] = shape.all_input_nodes
        case _:
            return False
    while values is not read:
        if not isinstance(values, fx.Node) or not _keeps_batch(module, values):
            return False
        values = values.args[0]
    return True


def _keeps_batch(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return all(isinstance(part, (*_BATCH_KEPT, nn.Sequential)) for part in _module_at(module, node).modules())
    layer = _functional_layer(node, node)
    return node.target in DROPOUTS or (layer is not None and not isinstance(layer, nn.Flatten))


def _takes(module: nn.Module, user: fx.Node, features: object) -> bool:
    layer = _module_at(module, user) if user.op == "call_module" else None
    return isinstance(layer, nn.Linear) and layer.in_features == features


def _module_at(module: nn.Module, node: fx.Node) -> nn.Module:
    return module.get_submodule(str(node.target))


def _functional_layer(node: fx.Node, evaluated: fx.Node) -> nn.Module | None:
    """Return the layer that computes the same as a call, if it reads one tensor."""
    if node.op not in {"call_function", "call_method"} or [*node.all_input_nodes] != [*node.args[:1]]:
        return None
    if node.args[1:] != evaluated.args[1:]:
        return None
    return layer_of(node.target, node.args[1:], node.kwargs, evaluated.kwargs)


@dataclass(frozen=True)
class _Part:
    """Operations between two points where a single value passes.

    Attributes:
        module: Module whose forward they are from.
        path: Prefix of its names in the network.
        source: The one value that passes before them, as `result` after them.
        modes: Nodes of the trace in evaluation mode, by those in training mode.
        numbers: Numbers of the values, in both modes.
        flattened: Reshapes that are `flatten(1)`.
    """

    module: nn.Module
    path: str
    nodes: Sequence[fx.Node]
    source: fx.Node
    result: fx.Node
    modes: dict[fx.Node, fx.Node]
    numbers: dict[fx.Node, int]
    flattened: set[fx.Node]

    def links(self) -> list[ChainLink]:
        """Return the links: a module's own, a layer that computes the same, or these operations as one."""
        node = self.nodes[0]
        if len(self.nodes) > 1 or self.result is not node:
            return [self._segment()]
        if node.op == "call_module" and node.args == (self.source,) and not node.kwargs:
            return _divide_layer(_module_at(self.module, node), f"{self.path}{node.target}")
        layer = nn.Flatten() if node in self.flattened else _functional_layer(node, self.modes[node])
        if layer is None:
            return [self._segment()]
        return [ChainLink(self._name(node), {self._name(node): layer})]

    def _name(self, node: fx.Node) -> str:
        """Return a name that no attribute of the module has."""
        name = node.name
        while hasattr(self.module, name):
            name += "_"
        return f"{self.path}{name}"

    def _segment(self) -> ChainLink:
        read = list(dict.fromkeys(other for node in self.nodes for other in node.all_input_nodes))
        leaves = [node for node in read if node.op == "get_attr"]
        called = [node for node in self.nodes if node.op == "call_module"]
        return ChainLink(
            self._name(self.nodes[-1]),
            {f"{self.path}{node.target}": _module_at(self.module, node) for node in called},
            tuple(f"{self.path}{node.target}" for node in leaves),
            tuple(self._operation(node) for node in (*leaves, *self.nodes)),
            self.numbers[self.source],
            self.numbers[self.result],
        )

    def _operation(self, node: fx.Node) -> Operation:
        kinds = {"get_attr": "leaf", "call_module": "module", "call_method": "method", "call_function": "function"}
        is_own = node.op in {"get_attr", "call_module"}
        if node in self.flattened:
            values = self._refer(node.args[0])
            return Operation(self.numbers[node], "method", "flatten", ((values, 1), {}), ((values, 1), {}))
        return Operation(
            self.numbers[node],
            kinds[node.op],  # type: ignore[arg-type]  # one of its literals
            f"{self.path}{node.target}" if is_own else node.target,
            self._arguments(node),
            self._arguments(self.modes[node]),
        )

    def _arguments(self, node: fx.Node) -> Arguments:
        return self._refer(node.args), self._refer(node.kwargs)

    def _refer(self, arguments: Any) -> Any:
        """Return arguments with numbered values in place of nodes."""
        return fx.map_arg(arguments, lambda node: Value(self.numbers[node]))  # type: ignore[arg-type,return-value]


def _tied_leaf(network: nn.Module) -> str:
    """Describe the first parameter or buffer with two names; empty without any."""
    return "; ".join(f"{name} is tied to {first}" for name, first in [*tied_names(network).items()][:1])


def _shared_leaf(network: nn.Module, links: Sequence[ChainLink]) -> str:
    """Describe the first parameter or buffer that two layers use; empty without any."""
    names, users = {id(leaf): name for name, leaf in _named_leaves(network)}, dict[int, ChainLink]()
    for link in links:
        read = [leaf for part in link.modules.values() for _, leaf in _named_leaves(part)]
        for leaf in (*read, *(operator.attrgetter(name)(network) for name in link.leaves)):
            if users.setdefault(id(leaf), link) is not link:
                return f"{names[id(leaf)]} is used by two layers, {users[id(leaf)].name} and {link.name}"
    return ""


def _unused_weight(network: nn.Module, links: Sequence[ChainLink]) -> str:
    """Describe the first parameter that no layer uses; empty without any."""
    used = {id(leaf) for link in links for part in link.modules.values() for leaf in part.parameters()}
    used |= {id(operator.attrgetter(name)(network)) for link in links for name in link.leaves}
    unused = [name for name, leaf in network.named_parameters() if id(leaf) not in used]
    return f"its forward does not use parameter {unused[0]}" if unused else ""


def _named_leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
