"""What freezing saves a device: CPU time and memory of a step, against training the same layers whole.

Networks: an MLP 784-1024-1024-10 in batches of 64; the 1.6M CNN of the demo's kind, and a block of VGG with 64, 128 and
256 channels, in batches of 32. SGD with momentum, one thread. The kinds of a step take turns within one process, whose
allocator keeps what is freed, so that none pays another's page faults; figures are ratios of medians of CPU time. Masks
(in the forward) and gradient hooks, which is how freezing is mostly done, stand beside. `chosen` is what FedSPU does:
its own backward or torch's, by the network's size; two networks stand for the small ones.

A step keeps its weights, gradients and momenta of what is trained, and what autograd saves between forward and
backward, each storage counted once. The peak is that of a process of its own for each case, with Python and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from measure import Figure

ONCE = Path(__file__).with_name("frozen_once.py")
ROOT = ONCE.parents[2]
TARGETS = {
    "exact 0.25": {"mlp": "<= 0.66", "cnn": "<= 0.85", "vgg": "<= 0.85"},
    "detached 0.25": dict.fromkeys(("mlp", "cnn", "vgg"), "<= 0.70"),
    "narrowed 0.25": dict.fromkeys(("mlp", "cnn", "vgg"), "<= 0.22"),
}
LESS = {0.2: ">= 40", 0.4: ">= 30", 0.6: ">= 20", 0.8: ">= 10"}
MB, QUICK_TURNS = 1e6, 5


def run(*, quick: bool = False) -> list[Figure]:
    """Measure three large networks and two small ones; quickly the smallest, and the memory of one share."""
    if quick:
        return [*_times("small mlp", QUICK_TURNS), *_memory("mlp", dict(list(LESS.items())[:1]))]
    large = [figure for name in ("mlp", "cnn", "vgg") for figure in (*_times(name), *_memory(name, LESS))]
    return large + [figure for name in ("spu_emnist", "small mlp") for figure in _times(name)]


def _times(name: str, turns: int = 0) -> list[Figure]:
    taken = _once("time", name, str(turns))
    dense = taken.pop("dense")
    return [
        Figure(f"{name}: a step, dense", dense * 1e3, "CPU ms"),
        *(
            Figure(f"{name}: a step, {kind}, over dense", one / dense, "x", TARGETS.get(kind, {}).get(name, ""))
            for kind, one in taken.items()
        ),
    ]


def _memory(name: str, shares: Mapping[float, str]) -> list[Figure]:
    full = _once("hold", name, "1")
    figures = [
        Figure(f"{name}: a step keeps, dense", full["bytes"] / MB, "MB"),
        Figure(f"{name}: peak PSS, dense", full["peak"] / MB, "MB"),
    ]
    for keep, target in shares.items():
        part = _once("hold", name, str(keep))
        less = 100 * (1 - part["bytes"] / full["bytes"])
        figures += [
            Figure(f"{name}: a step keeps less, p = {keep:g}", less, "%", target),
            Figure(f"{name}: activations kept less, p = {keep:g}", 100 * (1 - part["saved"] / full["saved"]), "%"),
            Figure(f"{name}: peak PSS, p = {keep:g}", part["peak"] / MB, "MB"),
        ]
    return figures


def _once(*arguments: str) -> dict[str, float]:
    command = [sys.executable, str(ONCE), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    found: dict[str, float] = json.loads(done.stdout)
    return found
