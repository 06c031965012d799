"""What pruning saves a device: seconds and bytes of a client part dense with zeros, multiplied sparse, made narrower.

The part trains as it is: dense, with zeros where it is pruned. Beside it, one convolution as a product of a sparse
matrix (CSR) with unfolded pictures, forward and backward.

And how much could be left out. A channel can go without any difference where no weight of the next layer reads it: its
own gradient is zero then. One without weights is constant, BatchNorm makes its beta of it; but where there is padding a
constant is no bias, as it ends at the margin, unless beta <= 0 and ReLU makes zeros of it. Besides, each output channel
keeps a weight, so that there is none such. The first kind is counted after training with pruning, and those that are
down to one weight; a step of half as many channels says what it is worth if many go.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from measure import Figure
from torch import Tensor
from torch.nn import functional

from device_agent.trainer.workspace import TaskBatches
from shared.algorithms.base import Cohort
from shared.algorithms.split.client_part import Bottom
from shared.algorithms.split.fedsl import splitfed
from shared.codecs.base import Codec
from shared.codecs.dense import dense
from shared.codecs.masked import masked
from shared.data.load import load as read
from shared.data.spec import Data
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Hyper, Spec
from shared.tensors.generators import seed_torch
from shared.tensors.pruning import apply_mask
from shared.tensors.tree import State, Tree

SPARSITIES = (0.0, 0.35, 0.7, 0.9)
BATCH, CUT, TURNS = 64, 4, 3
CHANNELS, SIDE, SOME = 128, 16, 32
"""Of the fourth convolution of VGG-19, and a batch of it whose unfolded pictures take 38 MB."""
STEPS, PERIODS = 40, 3
NARROW = Spec(name="alexnet", options={"channels": 1, "side": 8, "width": 0.5, "hidden": 64})


def run(*, quick: bool = False) -> list[Figure]:
    """Measure with one thread, in CPU seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shares, turns, steps = (SPARSITIES[2:3], 1, 2) if quick else (SPARSITIES, TURNS, STEPS)
        return [*_steps(shares, turns), *_products(shares, turns), *_channels(shares, steps)]
    finally:
        torch.set_num_threads(threads)


def least_seconds(work: Callable[[], object], turns: int) -> float:
    """Return the least CPU seconds of some turns after the first."""
    work()
    taken = []
    for _ in range(turns):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def _steps(shares: Sequence[float], turns: int) -> list[Figure]:
    """Time a step below the cut and weigh the client part, at each sparsity; and a step of half of the channels."""
    figures = []
    for share in shares:
        bottom, inputs = _bottom(1.0)
        weights = bottom.vector[: bottom.count]
        apply_mask(weights, torch.rand(bottom.count, generator=torch.Generator().manual_seed(1)) >= share)
        name = f"VGG-19 cut {CUT}, sparsity {share:g}"
        figures.append(
            Figure(
                f"{name}: step, dense with zeros", least_seconds(lambda b=bottom, x=inputs: _step(b, x), turns), "CPU s"
            )
        )
        figures.append(Figure(f"{name}: client part, `masked`", _bytes(masked(), bottom.tree()) / 1e6, "MB"))
        if not share:
            figures.append(Figure(f"{name}: client part, `dense`", _bytes(dense(), bottom.tree()) / 1e6, "MB"))
    bottom, inputs = _bottom(0.5)
    return [
        *figures,
        Figure(
            f"VGG-19 cut {CUT}, half of the channels: step",
            least_seconds(lambda: _step(bottom, inputs), turns),
            "CPU s",
        ),
    ]


def _bottom(width: float) -> tuple[Bottom, Tensor]:
    spec = Spec(name="vgg19", options={"width": width})
    whole = build_initial(spec, 0)
    tree = {name: leaf.clone() for name, leaf in whole.below(CUT).state_dict().items()}
    return Bottom(build_blank(spec), CUT, tree), torch.randn(BATCH, *whole.example)


def _step(bottom: Bottom, inputs: Tensor) -> None:
    features, _ = bottom.forward(inputs)
    bottom.backward(features, torch.ones_like(features))


def _bytes(codec: Codec, tree: Tree) -> int:
    payload, _ = codec.encode(tree, None)
    return sum(blob.data.nbytes for blob in payload.blobs.values())


def _products(shares: Sequence[float], turns: int) -> list[Figure]:
    """Time one convolution forward and backward, dense and sparse, at each sparsity."""
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    inputs, upstream = (torch.randn(SOME, CHANNELS, SIDE, SIDE) for _ in range(2))
    figures = []
    for share in shares:
        weight = torch.randn(CHANNELS, CHANNELS, 3, 3)
        weight[torch.rand_like(weight) < share] = 0
        plain = least_seconds(lambda w=weight: _dense(w, inputs, upstream), turns)
        matrix = weight.flatten(1)
        pair = matrix.to_sparse_csr(), matrix.t().contiguous().to_sparse_csr()
        sparse = least_seconds(lambda two=pair: _sparse(*two, inputs, upstream), turns)
        figures.append(Figure(f"a convolution, sparsity {share:g}: sparse over dense", sparse / plain, "x"))
    return figures


def _dense(weight: Tensor, inputs: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of inputs and weight."""
    inputs, weight = inputs.detach().requires_grad_(), weight.detach().requires_grad_()
    outputs = functional.conv2d(inputs, weight, padding=1)
    one, other = torch.autograd.grad(torch.dot(outputs.flatten(), upstream.flatten()), [inputs, weight])
    return one, other


def _sparse(matrix: Tensor, transposed: Tensor, inputs: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same; the weight's gradient is dense, as one of all weights is what pruning ranks by."""
    columns = functional.unfold(inputs, 3, padding=1).permute(1, 0, 2).reshape(len(transposed), -1)
    matrix @ columns
    rows = upstream.permute(1, 0, 2, 3).reshape(len(matrix), -1)
    back = (transposed @ rows).view(len(transposed), SOME, -1).permute(1, 0, 2)
    return functional.fold(back, (SIDE, SIDE), 3, padding=1), rows @ columns.t()


def _channels(shares: Sequence[float], steps: int) -> list[Figure]:
    """Count what could go of the convolutions of an AlexNet that was trained on digits and pruned on the way."""
    figures = []
    for importance in ("taylor", "magnitude"):
        for share in filter(None, shares):
            weights = [leaf for name, leaf in _pruned(importance, share, steps).items() if name.endswith(".weight")]
            counted = sum(len(leaf) for leaf in weights)
            one = sum(int((leaf.flatten(1).count_nonzero(1) <= 1).sum()) for leaf in weights)
            unread = sum(
                int((reader.transpose(0, 1).flatten(1).count_nonzero(1) == 0).sum()) for _, reader in pairwise(weights)
            )
            name = f"{importance}, sparsity {share:g}: channels"
            figures.append(Figure(f"{name} with one weight, of {counted}", 100 * one / counted, "%"))
            figures.append(Figure(f"{name} that no weight reads", 100 * unread / counted, "%"))
    return figures


def _pruned(importance: str, share: float, steps: int) -> Tree:
    """Return the client part of one device after a run."""
    algorithm = splitfed(cut=5, period=steps, sparsity=share, importance=importance)
    hyper, model = Hyper(batch_size=BATCH, learning_rate=0.05), build_blank(NARROW)
    state, device, tree = algorithm.init(build_initial(NARROW, 0), 0), State(), Tree()
    with seed_torch(0):
        for number in range(1, PERIODS + 1):
            told = algorithm.assign(state, Cohort(("board",), hyper, 0, PERIODS), {}, number)
            batches = TaskBatches(read(Data(source="digits")), told["board"], lambda: False)
            session = algorithm.local(
                model, device, algorithm.broadcast(state, "board", told["board"]), batches, told["board"]
            )
            try:
                up = next(session)
                while True:
                    state, down = algorithm.split.serve(model, state, told, {"board": up})
                    up = session.send(down["board"])
            except StopIteration as ended:
                device, result = ended.value
            state, tree = State({**state.tree, **result.tree}, state.facts), result.tree
    return tree
