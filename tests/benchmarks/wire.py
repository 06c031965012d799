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

TURNS = 11


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run() -> list[Figure]:
    """Measure encoding with one copy and decoding with none."""
    tree = {f"layer{index}.weight": torch.randn(2_500_000) for index in range(10)}
    source = np.concatenate([leaf.numpy() for leaf in tree.values()])
    target, codec = np.zeros_like(source), dense()
    buffer = bytearray(source.nbytes + 8192)

    def encode() -> memoryview:
        return Scattered(payload.pack(codec.encode(tree, None)[0])).join(buffer)

    encoded = encode()
    copies, encodes, decodes = [], [], []
    for _ in range(TURNS):
        copies.append(_seconds(lambda: np.copyto(target, source)))
        encodes.append(_seconds(encode))
        decodes.append(_seconds(lambda: codec.decode(payload.unpack(encoded))))
    decoded = codec.decode(payload.unpack(encoded)).tree
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    views = sum(start <= leaf.data_ptr() < start + len(buffer) for leaf in decoded.values())
    copy_s, encode_s = statistics.median(copies), statistics.median(encodes)
    return [
        Figure("memcpy of 100 MB", source.nbytes / copy_s / 1e9, "GB/s"),
        Figure("encode 25M float32", source.nbytes / encode_s / 1e9, "GB/s"),
        Figure("encode over memcpy", copy_s / encode_s, "x", ">= 0.5"),
        Figure("decode 25M float32", 1e3 * statistics.median(decodes), "ms"),
        Figure("decoded tensors that are views", views / len(decoded), "share", ">= 1"),
    ]
