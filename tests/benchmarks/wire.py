"""Encoding 25 million float32 parameters against memcpy of the same bytes, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from measure import Figure

from shared.codecs.dense import dense
from shared.protocol import payload
from shared.protocol.payload import Scattered

TURNS, LEAF = 11, 2_500_000
QUICK_TURNS, QUICK_LEAF = 3, 100_000


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run(*, quick: bool = False) -> list[Figure]:
    """Measure encoding with one copy and decoding with none."""
    turns, leaf = (QUICK_TURNS, QUICK_LEAF) if quick else (TURNS, LEAF)
    tree = {f"layer{index}.weight": torch.randn(leaf) for index in range(10)}
    source = np.concatenate([leaf.numpy() for leaf in tree.values()])
    target, codec = np.zeros_like(source), dense()
    buffer = bytearray(source.nbytes + 8192)

    def encode() -> memoryview:
        return Scattered(payload.pack(codec.encode(tree, None)[0])).join(buffer)

    encoded = encode()
    copies, encodes, decodes = [], [], []
    for _ in range(turns):
        copies.append(_seconds(lambda: np.copyto(target, source)))
        encodes.append(_seconds(encode))
        decodes.append(_seconds(lambda: codec.decode(payload.unpack(encoded))))
    decoded = codec.decode(payload.unpack(encoded)).tree
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    views = sum(start <= leaf.data_ptr() < start + len(buffer) for leaf in decoded.values())
    copy_s, encode_s = statistics.median(copies), statistics.median(encodes)
    return [
        Figure(f"memcpy of {source.nbytes / 1e6:g} MB", source.nbytes / copy_s / 1e9, "GB/s"),
        Figure(f"encode {source.size / 1e6:g}M float32", source.nbytes / encode_s / 1e9, "GB/s"),
        Figure("encode over memcpy", copy_s / encode_s, "x", ">= 0.5"),
        Figure(f"decode {source.size / 1e6:g}M float32", 1e3 * statistics.median(decodes), "ms"),
        Figure("decoded tensors that are views", views / len(decoded), "share", ">= 1"),
    ]
