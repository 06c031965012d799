"""Run that computes on another device than the CPU; payloads are unchanged.

There is no GPU in continuous integration, and these tests do not pretend to one: the tensors only claim another place
and the CPU computes them. They show that every method places what it computes with, and takes back what it sends; what
a GPU gives, and how fast, `tests/test_gpu.py` and `make bench NAME=gpu` show where there is one.

As on a GPU, an operation on tensors of both places is refused, but for numbers without axes and for indices; so are
numpy, and whatever draws at random in place. torch has no kernels for the device that is claimed ("lazy"), so that
nothing can reach it but through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from edge_server.journal.records import UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.fedavg import descend_batches
from shared.models.build import build_initial
from shared.objectives.classification import CLASSIFICATION
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.messages import Hyper, Spec, Update
from shared.registry import build
from shared.subnetworks.frozen_network import freeze
from shared.subnetworks.neurons import draw_neurons, read_chain
from shared.tensors.placement import describe
from shared.tensors.tree import CPU, to_device
from tests.edge_server.fleets import End, Network, Site
from tests.edge_server.harness import write_plan
from tests.edge_server.textbook import DEVICES, require_equal

APART = torch.device("lazy")
_ATEN = torch.ops.aten
_TAKE_INDICES = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default, _ATEN.index_put.default}
_MOVE = {_ATEN._to_copy.default, _ATEN.copy_.default}
_DRAW = {_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.native_dropout.default}


class Apart(Tensor):
    """A tensor that claims to lie elsewhere; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        """Wrap a tensor of the CPU."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=APART,
            requires_grad=False,
        )

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist:  # which torch refuses of every subclass, as it does `numpy`
            return args[0].held.tolist()
        if func is Tensor.numpy and kwargs.get("force"):
            return args[0].held.detach().numpy().copy()
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute with what the tensors hold; raise RuntimeError where they lie in two places."""
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    apart = any(isinstance(one, Apart) for one in tensors)
    device = kwargs.get("device")
    if apart and func not in _MOVE and (left := [one for one in tensors if _is_left(func, one, args)]):
        raise RuntimeError(f"{func}: a tensor of shape {tuple(left[0].shape)} was left on {left[0].device}")
    if apart and func in _DRAW:
        raise RuntimeError(f"{func}: drawn elsewhere than on the CPU")
    there = apart if device is None and func is not _ATEN.copy_.default else device == APART
    if func is _ATEN.copy_.default:
        there = isinstance(args[0], Apart)
    inner = tree_map(lambda one: one.held if isinstance(one, Apart) else one, (args, kwargs))
    if device == APART:
        inner[1]["device"] = torch.device("cpu")
    given = func(*inner[0], **inner[1])
    given = tree_map(lambda one: Apart(one) if there and isinstance(one, Tensor) and one.is_cpu else one, given)
    return return_and_correct_aliasing(func, args, kwargs, given) if apart else given


def _is_left(func: Any, one: Tensor, args: Any) -> bool:
    """Tell whether a tensor is where a GPU's kernel could not read it."""
    if isinstance(one, Apart) or one.is_meta or not one.ndim:
        return False
    return not (func in _TAKE_INDICES and any(one is index for index in args[1]))


class _Factories(TorchDispatchMode):
    """Have tensors made elsewhere where that is said of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def watched() -> Iterator[torch.device]:
    """Have torch place tensors on the device that is yielded, and refuse what mixes them with others."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `parameter.data = ...` leaves `held` as it is
    try:
        with _Factories():
            yield APART
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


SIZES = {"train": 40, "test": 12}
METHODS = {
    "fedprox": "",
    "fedadam": "",
    "scaffold": "",
    "fedselect": "",
    "fedspu": "keep = 0.5",
    "random_dropout": "keep = 0.5",
    "fjord": "keep = 0.6",
    "hermes": "keep = 0.5",
    "pruned_personalization": "",
    "fedsl": "drop = 0.3, sparsity = 0.5, bits = 8",
    "semisfl": "steps = 2, supervised_steps = 2, hidden = 8, projections = 4, labelled_queue = 16",
    "fedswitch_sl": "steps = 2, supervised_steps = 2, switch_divergence = 0.01",
    "fedswitch": "supervised_steps = 2, threshold = 0.3",
    "semifl": "epochs = 1, server_epochs = 1, threshold = 0.3",
}
NETWORKS = {
    "fedprox": 'name = "alexnet"\noptions = { channels = 1, side = 8, hidden = 16, dropout = 0.3, width = 0.05 }'
}
"""Of all others, one that normalises; this one leaves out at random."""
STEPS = {
    "fedadam": 'optimizer = "adamw"\nclip_norm = 1.0\nweight_decay = 0.01',
    **dict.fromkeys(("scaffold", "fedsl", "semisfl", "fedswitch_sl"), "momentum = 0.0"),
}
"""Of all others, with momentum."""


def make_plan(folder: Path, name: str) -> Plan:
    """Return a plan of two rounds of a method on pictures of noise."""
    method = build(ALGORITHMS, Spec(name=name), "algorithm")
    folder.mkdir()
    random = np.random.default_rng(3)
    arrays = {f"x_{part}": random.integers(0, 256, (count, 8, 8)).astype(np.uint8) for part, count in SIZES.items()}
    np.savez(folder / "pictures.npz", **arrays, **{f"y_{part}": np.arange(count) % 4 for part, count in SIZES.items()})
    examples, evaluation = 'source = "npz"\npath = "pictures.npz"', "every = 1"
    if not (method.split or method.server):
        evaluation = "on_device = true\nevery = " + ("0" if name == "pruned_personalization" else "1")
    sections = {
        "algorithm": f'name = "{name}"\noptions = {{ {METHODS[name]} }}',
        "model": NETWORKS.get(name, 'name = "spu_emnist"\noptions = { side = 8, width = 4, classes = 4 }'),
        "hyper": f"batch_size = 8\nlearning_rate = 0.05\n{STEPS.get(name, 'momentum = 0.9')}",
        "cohort": "min_devices = 3",
        "data": f"{examples}\nholdout = 0.2\nvalidation = 0.2",
        "evaluation": evaluation,
        "partition": 'kind = "even"',
    } | ({"server_data": f"{examples}\ndrawn = {{ per_class = 2 }}"} if method.server else {})
    path = write_plan(folder, rounds=2, more=DEVICES, **sections)
    path.write_text(f"seed = 11\n{path.read_text()}")
    return load(path, folder)


def run(folder: Path, name: str, device: torch.device) -> End:
    with watched() if device == APART else nullcontext():
        return Site(Network(), make_plan(folder, name), folder, device=device).play()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_computes_where_it_is_told_to(tmp_path, name):
    """With the CPU's own kernels at both places every bit of a run is the same, and what is kept is on the CPU."""
    (state, records), (other, again) = run(tmp_path / "here", name, CPU), run(tmp_path / "apart", name, APART)
    assert [one.outcome for one in closed_rounds(again)] == ["aggregated", "aggregated"]
    assert {leaf.device for leaf in other.tree.values()} == {CPU}
    require_equal(other.tree, state.tree)
    assert other.facts == state.facts
    assert [one.accuracy for one in closed_rounds(again)] == [one.accuracy for one in closed_rounds(records)]
    here, apart = ([one.update for one in some if isinstance(one, UpdateAccepted)] for some in (records, again))
    assert [(one.loss, one.metrics) for one in apart] == [(one.loss, one.metrics) for one in here]
    assert ({one.trained_on for one in here}, {one.trained_on for one in apart}) == ({"cpu"}, {str(APART)})


@pytest.mark.parametrize("detached", [False, True])
def test_frozen_layers_of_our_own_compute_where_their_network_is(detached):
    """Those that keep bits on the CPU too: the active part moves alike, to the bit."""
    model = build_initial(Spec(name="spu_emnist", options={"side": 8, "width": 4, "classes": 4}), 3)
    active = draw_neurons(read_chain(model.layers).hidden, 0.5, 1)
    inputs, labels = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(6) % 4

    def part(device: torch.device):
        tree, chosen = to_device(model.tree(), device), to_device(active, device)
        network = freeze(model.layers, tree, chosen, detached=detached)
        batch = inputs.to(device), labels.to(device)
        descend_batches(network, list(network.weights.items()), [batch] * 3, Hyper(learning_rate=0.1), CLASSIFICATION)
        return to_device(network.part(), CPU)

    here = part(CPU)
    with watched():
        apart = part(APART)
    require_equal(apart, here)


def test_what_is_left_behind_is_found():
    """Derivation: the check would be worth nothing if it let these pass."""
    with watched() as device:
        there = torch.ones(3, device=device)
        for careless in (
            lambda: there + torch.ones(3),
            lambda: there.mul_(torch.ones(3, dtype=torch.bool)),
            lambda: torch.cat([there, torch.ones(1)]),
            lambda: there.index_select(0, torch.tensor([0])),
            there.numpy,
            lambda: there.bernoulli_(0.5),
            lambda: torch.nn.functional.dropout(there),
        ):
            with pytest.raises(RuntimeError):
                careless()
        assert (there * 2)[torch.tensor([0])].cpu().tolist() == [2.0]


def test_an_update_that_a_cpu_computed_has_not_a_byte_more_than_before():
    """What is left out is the very default, and not a text that is equal to it."""
    update = Update(run="run", round=1, device="a", params=None)
    told = msgspec.structs.replace(update, trained_on=describe(CPU))
    assert wire.encode(told) == wire.encode(update) == wire.encode(clip(wire.decode_as(Update, wire.encode(told))))
