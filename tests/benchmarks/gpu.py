"""Step time, memory and rounding on a GPU, beside the CPU.

Every method that trains on devices alone takes one round of one device on both, from the same parameters and with the
same draws; nothing is dropped at random, which each would draw by itself. Seconds are of a task's training after one
that is thrown away, with everything computed that was begun; memory is the most that torch has held on the GPU. The
difference is |gpu - cpu| over |cpu| of the change that a training makes of what is sent, in the Euclidean norm: sums in
another order, and in a deep network what becomes of them. Methods that rank weights or neurons may choose others where
two are nearly alike: then the row says so.

Without a GPU that torch reaches, nothing is measured, and the row says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from measure import Figure, NotRun, Row
from torch import Tensor

from device_agent.trainer.workspace import TaskBatches
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Cohort, Result
from shared.data.load import load as read
from shared.data.spec import Data
from shared.models.build import build_initial
from shared.protocol.messages import Hyper, Spec
from shared.registry import build
from shared.tensors.generators import seed_torch
from shared.tensors.placement import choose_device, describe, synchronize
from shared.tensors.tree import CPU, State, Tree, state_to_device, subtract, to_device, tree_norm

METHODS = (
    *("fedavg", "fedprox", "fedselect", "fedspu", "random_dropout", "fjord", "hermes", "prunefl"),
    *("pruned_personalization", "fedswitch", "semifl"),
)
MODEL = Spec(name="alexnet", options={"channels": 1, "side": 8, "hidden": 1024, "dropout": 0.0})
QUICK = Spec(name="spu_emnist", options={"side": 8, "classes": 10})
BATCH, BATCHES, MB = 32, 8, 1e6


@dataclass(frozen=True)
class Taken:
    """One device's part of a round.

    Attributes:
        seconds: Of a training step, or of what stands for one.
        tree: The change of what is sent, on the CPU.
    """

    seconds: float
    tree: Tree


def difference(here: Tree, there: Tree) -> float | str:
    """Return how far the changes of two trainings are apart, relative to the first; or why that cannot be told."""
    if {key: leaf.shape for key, leaf in here.items()} != {key: leaf.shape for key, leaf in there.items()}:
        return "other neurons or weights were chosen"
    norm = tree_norm(here)
    return tree_norm(subtract(there, here)) / norm if norm else "nothing is sent, or nothing of it has changed"


def run(*, quick: bool = False) -> Sequence[Row]:
    """Measure every method on both, or say why not."""
    if not torch.cuda.is_available():
        return [NotRun("a round of every method on a GPU", f"torch {torch.__version__} reaches no GPU here")]
    gpu, rows = choose_device("cuda"), list[Row]()
    for name in METHODS[:2] if quick else METHODS:
        torch.cuda.reset_peak_memory_stats(gpu)
        method, spec = build(ALGORITHMS, Spec(name=name), "algorithm"), QUICK if quick else MODEL
        here, there = train_once(method, spec, CPU), train_once(method, spec, gpu)
        apart, label = difference(here.tree, there.tree), f"{name}: difference of the change that is sent"
        rows += [
            Figure(f"{name}: a step on the CPU", here.seconds * 1e3, "ms"),
            Figure(f"{name}: a step on {describe(gpu)}", there.seconds * 1e3, "ms"),
            Figure(f"{name}: most memory of the GPU", torch.cuda.max_memory_allocated(gpu) / MB, "MB"),
            NotRun(label, apart) if isinstance(apart, str) else Figure(label, apart, "of its norm"),
        ]
    return rows


def train_once(method: Algorithm, spec: Spec, device: torch.device) -> Taken:
    """Train the one device of a round twice, and time the second."""
    model, examples = build_initial(spec, 1), read(Data(source="digits")).subset(torch.arange(BATCHES * BATCH))
    state = method.init(model, 1)
    told = method.assign(state, Cohort(("a",), Hyper(batch_size=BATCH, learning_rate=0.01), 1, 1), {}, 1)["a"]
    start = to_device(method.broadcast(state, "a", told), device)
    model.layers.to(memory_format=torch.channels_last).to(device)  # type: ignore[call-overload]
    batches = TaskBatches(examples, told, lambda: False, device=device)
    taken = list[float]()
    for _ in range(2):
        with seed_torch(told.seed):
            synchronize(device)
            began = time.perf_counter()
            outcome = method.local(model, state_to_device(State(), device), dict(start), batches, told)
            synchronize(device)
            taken.append(time.perf_counter() - began)
    assert isinstance(outcome, tuple)
    result: Result = outcome[1]
    sent, before = to_device(result.tree, CPU), to_device(start, CPU)
    if not method.sends_changes:
        sent = {key: leaf - before[key] if _is_of(before, key, leaf) else leaf for key, leaf in sent.items()}
    return Taken(taken[-1] / BATCHES, {key: leaf for key, leaf in sent.items() if leaf.is_floating_point()})


def _is_of(before: Tree, key: str, leaf: Tensor) -> bool:
    return key in before and before[key].shape == leaf.shape
