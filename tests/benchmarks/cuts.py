"""Memory and time of a device's half of VGG-19, by cut.

A trainer's own process, alone and with one thread, does a few steps of batches of 64: of FedAvg on the whole network,
or of a split session, answered at once. Memory is the most that was resident at once. Python, torch and our modules
take a base of it before any task, the same in all rows; the target is for what comes on top. With the base the shallow
cut cannot come to 35 %, since one activation of the first layers, 64 x 64 x 32 x 32 numbers, is 17 MB itself.

In all rows the allocator gives large tensors back at once, as it does in a session with `recompute`; in the last one of
the whole network it is left to itself, as a trainer has it else.
"""

from __future__ import annotations

import os
from dataclasses import replace

import lone
from measure import Figure

from shared.protocol.messages import Spec

MODEL, SHALLOW = Spec(name="vgg19"), 4
CUTS = tuple(map(int, os.environ.get("CUTS", "2,4,8,12,16").split(",")))
STEPS = 2, 4
QUICK_BATCH, QUICK_STEPS = 4, (1, 2)
MIB = 1 << 20


def run(*, quick: bool = False) -> list[Figure]:
    """Measure the whole network, then each cut, keeping activations and computing them again; quickly one cut."""
    batch, steps, cuts = (QUICK_BATCH, QUICK_STEPS, (SHALLOW,)) if quick else (lone.BATCH, STEPS, CUTS)
    whole, usual = (_take(Spec(name="fedavg"), batch, steps, lean=lean) for lean in (True, False))
    figures = [
        Figure("base: Python, torch, our modules", whole.base_bytes / MIB, "MiB"),
        Figure("VGG-19 whole: peak", whole.peak_bytes / MIB, "MiB"),
        Figure("VGG-19 whole: above the base", whole.own_bytes / MIB, "MiB"),
        Figure("VGG-19 whole: a step", whole.cpu_s, "CPU s"),
        Figure("VGG-19 whole, the usual allocator: peak", usual.peak_bytes / MIB, "MiB"),
        Figure("VGG-19 whole, the usual allocator: a step", usual.cpu_s, "CPU s"),
    ]
    for cut in cuts:
        for again in (False, True):
            half = _take(Spec(name="fedsl", options={"cut": cut, "recompute": again}), batch, steps, lean=not again)
            name = f"cut {cut}{', recompute' if again else ''}"
            share, target = 100 * half.own_bytes / whole.own_bytes, "<= 35" if again and cut == SHALLOW else ""
            figures += [
                Figure(f"{name}: above the base", half.own_bytes / MIB, "MiB"),
                Figure(f"{name}: of the whole, above the base", share, "%", target),
                Figure(f"{name}: of the whole, with the base", 100 * half.peak_bytes / whole.peak_bytes, "%"),
                Figure(f"{name}: a step", half.cpu_s, "CPU s"),
            ]
    return figures


def _take(algorithm: Spec, batch: int, steps: tuple[int, int], *, lean: bool) -> lone.Taken:
    """Return what a few steps take, and as CPU seconds those of one step more."""
    few, more = (lone.take(MODEL, _with(algorithm, count), count, batch=batch, lean=lean) for count in steps)
    return replace(more, cpu_s=(more.cpu_s - few.cpu_s) / (steps[1] - steps[0]))


def _with(algorithm: Spec, steps: int) -> Spec:
    return Spec(name=algorithm.name, options={**algorithm.options, "period": steps}) if algorithm.options else algorithm
