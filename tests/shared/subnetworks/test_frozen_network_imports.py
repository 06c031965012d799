"""What frozen training loads; a fresh interpreter is asked, for here everything is loaded."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter is the point
import sys
from pathlib import Path

PROGRAM = """
import sys
from shared.runtime.processes import loading
with loading():
    import torch
from torch.nn import functional
from shared.subnetworks.neurons import first_neurons, read_chain
from shared.subnetworks.frozen_network import freeze
from shared.models.spu import spu_emnist

layers = spu_emnist(width=4).layers
for name, size in (("own", ()), ("torch's", (2, 1, 28, 28))):
    part = freeze(layers, dict(layers.state_dict()), first_neurons(read_chain(layers).hidden, 0.5), size)
    functional.cross_entropy(part(torch.randn(2, 1, 28, 28)), torch.tensor([0, 1])).backward()
    assert all(leaf.grad is not None for leaf in part.weights.values())
    print(name, *(name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules))
"""


def test_frozen_training_loads_neither_a_compiler_nor_an_algebra():
    """By its own backward pass and by torch's: they would be 70 MB of a board's memory, and seconds of its time."""
    child = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=False,
    )
    assert child.stdout.splitlines() == [b"own", b"torch's"], child.stderr.decode()
