"""One process of benchmark `frozen`: time steps, or train and print peak memory.

`time NET TURNS` takes steps of every kind; `hold NET KEEP` trains.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.models.cnn import cnn
from shared.models.spu import spu_emnist
from shared.protocol.messages import Hyper
from shared.runtime import malloc
from shared.subnetworks.frozen_network import freeze
from shared.subnetworks.narrow import build_narrow_network
from shared.subnetworks.neurons import Active, coverage, draw_neurons, extract, read_chain
from shared.tensors.training_step import descend
from shared.tensors.tree import Tree

KEEPS, HELD = (0.25, 0.5, 0.75), 4
TURNS = {"mlp": 75, "cnn": 50, "vgg": 20, "spu_emnist": 100, "small mlp": 200}
HYPER = Hyper(learning_rate=0.01, momentum=0.9)
KEPT_BYTES = 32 << 20
KIB = 1024


def mlp(width: int = 1024) -> nn.Sequential:
    """Return 784-1024-1024-10."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )


def vgg() -> nn.Sequential:
    """Return three convolutions, each with pooling, and two linear layers."""
    blocks: list[nn.Module] = []
    for below, above in ((3, 64), (64, 128), (128, 256)):
        blocks += [nn.Conv2d(below, above, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))


NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (mlp, (64, 1, 28, 28)),
    "cnn": (lambda: cnn(width=32, hidden=512).layers, (32, 1, 28, 28)),
    "vgg": (vgg, (32, 3, 32, 32)),
    "spu_emnist": (lambda: spu_emnist().layers, (16, 1, 28, 28)),
    "small mlp": (lambda: mlp(64), (32, 1, 28, 28)),
}


def made(name: str) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """Return a network, laid out as a trainer has it, and a batch."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    layers = make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layers, (torch.randn(shape), torch.randint(0, 10, (shape[0],)))


def tree_of(layers: nn.Sequential) -> Tree:
    """Return copies of all leaves."""
    return {key: leaf.clone() for key, leaf in layers.state_dict().items()}


def stepping(
    forward: Callable[[Tensor], Tensor], weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """Return what takes a step."""
    momenta = Tree()

    def step() -> None:
        functional.cross_entropy(forward(batch[0]), batch[1]).backward()
        descend(weights.items(), momenta, HYPER)

    return step


def variants(name: str) -> dict[str, Callable[[], None]]:
    """Return a step of each kind."""
    layers, batch = made(name)
    tree, hidden = tree_of(layers), read_chain(layers).hidden
    steps = {"dense": stepping(layers, dict(layers.named_parameters()), batch)}
    for keep in (*KEEPS, 1.0):
        active = draw_neurons(hidden, keep, 0)
        for kind in ("exact", "detached") if keep < 1 else ("exact",):
            part = freeze(layers, tree, active, detached=kind == "detached")
            steps[f"{kind} {keep:g}"] = stepping(part, part.weights, batch)
    for keep in KEEPS:
        active = draw_neurons(hidden, keep, 0)
        part = freeze(layers, tree, active, batch[0].shape)
        steps[f"chosen {keep:g}"] = stepping(part, part.weights, batch)
        small = build_narrow_network(layers, active)
        small.load_state_dict(extract(tree, read_chain(layers).index(active)), strict=False)
        steps[f"narrowed {keep:g}"] = stepping(small, dict(small.named_parameters()), batch)
    active = draw_neurons(hidden, KEEPS[0], 0)
    steps[f"masks {KEEPS[0]:g}"] = _masked(name, active)
    steps[f"hooks {KEEPS[0]:g}"] = _hooked(name, active)
    return steps


def _masks(layers: nn.Sequential, active: Active) -> dict[str, Tensor]:
    shown = coverage(read_chain(layers).index(active), layers.state_dict())
    return {key: mask.float() for key, mask in shown.items()}


def _masked(name: str, active: Active) -> Callable[[], None]:
    """Multiply weights by masks in the forward."""
    layers, batch = made(name)
    weights, masks = dict(layers.named_parameters()), _masks(layers, active)

    def forward(inputs: Tensor) -> Tensor:
        shown = {key: leaf * masks[key] if key in masks else leaf for key, leaf in weights.items()}
        found: Tensor = torch.func.functional_call(layers, shown, (inputs,))
        return found

    return stepping(forward, weights, batch)


def _hooked(name: str, active: Active) -> Callable[[], None]:
    """Multiply gradients by masks in hooks."""
    layers, batch = made(name)
    masks = _masks(layers, active)
    for key, leaf in layers.named_parameters():
        if key in masks:
            leaf.register_hook(lambda gradient, mask=masks[key]: gradient * mask)
    return stepping(layers, dict(layers.named_parameters()), batch)


def timed(name: str, turns: int) -> dict[str, float]:
    """Return CPU seconds of each kind of step: medians of so many turns, 0 for as many as the network needs."""
    malloc.tune(KEPT_BYTES, 8 * KEPT_BYTES)
    steps = variants(name)
    taken: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range((turns or TURNS[name]) + 2):
        for kind, step in steps.items():
            began = time.process_time()
            step()
            if turn > 1:
                taken[kind].append(time.process_time() - began)
    return {kind: statistics.median(several) for kind, several in taken.items()}


def held(name: str, keep: float) -> dict[str, float]:
    """Train a few steps; return bytes that a step must keep, and the most that was this process's own at once."""
    layers, batch = made(name)
    tree, hidden = tree_of(layers), read_chain(layers).hidden
    if keep < 1:
        part = freeze(layers.to("meta"), tree, draw_neurons(hidden, keep, 0))
        forward, weights, whole = part, part.weights, part.leaves
    else:
        forward, weights, whole = layers, dict(layers.named_parameters()), dict(layers.state_dict())
    own = {leaf.untyped_storage().data_ptr() for leaf in whole.values()}
    kept = dict[int, int]()

    def note(leaf: Tensor) -> Tensor:
        if (place := leaf.untyped_storage().data_ptr()) not in own:
            kept[place] = leaf.untyped_storage().nbytes()
        return leaf

    with torch.autograd.graph.saved_tensors_hooks(note, lambda leaf: leaf):
        loss = functional.cross_entropy(forward(batch[0]), batch[1])
    del loss
    step = stepping(forward, weights, batch)
    for _ in range(HELD):
        step()
    counted = sum(leaf.nbytes for leaf in whole.values()) + 2 * sum(leaf.nbytes for leaf in weights.values())
    return {"bytes": counted + sum(kept.values()), "saved": sum(kept.values()), "peak": _peak()}


def _peak() -> float:
    """Return the most that was resident at once, less what is shared with other processes now."""
    peak = _field("/proc/self/status", "VmHWM:")
    return peak - _field("/proc/self/smaps_rollup", "Rss:") + _field("/proc/self/smaps_rollup", "Pss:")


def _field(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(name))


def main() -> None:
    """Do what the command line says; print JSON."""
    torch.set_num_threads(1)
    kind, name, *rest = sys.argv[1:]
    found = timed(name, int(rest[0])) if kind == "time" else held(name, float(rest[0]))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
