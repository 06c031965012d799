"""Codecs against memcpy of the same 32-bit values, top-k against torch's own, in CPU seconds of one thread; headers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from measure import Figure

from shared.codecs import CODECS
from shared.codecs.largest import find_largest
from shared.codecs.topk import sent_values, topk_bytes
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.messages import Spec
from shared.tensors.bits import pack, unpack
from shared.tensors.quantizer import dequantize, magnitude_range, quantize_codes
from shared.tensors.tree import Tree

TURNS = 7
VALUES, QUICK_VALUES = 8_000_000, 400_000
LARGE_VALUES = 25_000_000
"""Of a large network, whose largest changes are sent."""
SHARES = (0.001, 0.01, 0.1, 0.5)
PRUNED = 0.35
WIDTHS = (2, 3, 5, 9, 17)
CUTS = (4, 8, 12, 16)
SENDERS = {"masked": {}, "quantize": {"bits": 8}, "chain": {"quantize_bits": 8}}


def run(*, quick: bool = False) -> list[Figure]:
    """Measure packing and its way back, the mathematics of the quantizer, and whole codecs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = QUICK_VALUES if quick else VALUES
        large = QUICK_VALUES if quick else LARGE_VALUES
        return [*_packing(values), *_codecs(values), *_topk(large), *_headers(CUTS[:1] if quick else CUTS)]
    finally:
        torch.set_num_threads(threads)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median of the CPU seconds that a call takes."""
    spent = []
    for _ in range(TURNS):
        started = time.process_time()
        call()
        spent.append(time.process_time() - started)
    return statistics.median(spent)


def _memcpy(values: int) -> float:
    source = np.random.default_rng(1).random(values, np.float32)
    target = np.zeros_like(source)
    return _seconds(lambda: np.copyto(target, source))


def _packing(values: int) -> list[Figure]:
    """Take numbers of some widths as the quantizer gives them."""
    copy_s, figures = _memcpy(values), []
    figures.append(Figure("memcpy of float32", values * 4 / copy_s / 1e9, "GB/s"))
    for width in WIDTHS:
        numbers = np.random.default_rng(width).integers(0, 1 << width, values, np.uint32)
        numbers = numbers.astype(np.min_scalar_type((1 << width) - 1))
        packed = pack(numbers, width)
        pack_s, unpack_s = (
            _seconds(lambda numbers=numbers, width=width: pack(numbers, width)),
            _seconds(lambda packed=packed, width=width: unpack(packed, values, width)),
        )
        figures.append(Figure(f"pack {width} bits over memcpy", copy_s / pack_s, "x", ">= 0.05"))
        figures.append(Figure(f"unpack {width} bits over memcpy", copy_s / unpack_s, "x", ">= 0.05"))
    return figures


def _codecs(values: int) -> list[Figure]:
    """Take a tree of four leaves of which a share is zero."""
    copy_s, generator = _memcpy(values), torch.Generator().manual_seed(1)
    tree = {str(place): torch.randn(1000, values // 4000, generator=generator) for place in range(4)}
    tree = {key: leaf * (torch.rand(leaf.shape, generator=generator) >= PRUNED) for key, leaf in tree.items()}
    low, high = magnitude_range(tree["0"])
    found = quantize_codes(tree["0"], 8, low, high, generator)
    figures = [
        Figure("draw", 4e9 / values * _seconds(lambda: torch.rand(values // 4, generator=generator)), "ns/value"),
        Figure(
            "round to 8 bits",
            4e9 / values * _seconds(lambda: quantize_codes(tree["0"], 8, low, high, generator)),
            "ns/value",
        ),
        Figure("knots of 8 bits", 4e9 / values * _seconds(lambda: dequantize(found, 8, low, high)), "ns/value"),
    ]
    for name, options in SENDERS.items():
        codec = CODECS[name](**options)
        sent, _ = codec.encode(tree, None)
        encode_s, decode_s = (
            _seconds(lambda c=codec: c.encode(tree, None)),
            _seconds(lambda c=codec, s=sent: c.decode(s)),
        )
        figures += [
            Figure(f"{name} encode", 1e9 / values * encode_s, "ns/value"),
            Figure(f"{name} decode", 1e9 / values * decode_s, "ns/value"),
            Figure(f"{name} encode over memcpy", copy_s / encode_s, "x"),
            Figure(f"{name} decode over memcpy", copy_s / decode_s, "x"),
        ]
    return figures


def _topk(values: int) -> list[Figure]:
    """Take the largest values of one leaf: where they are, beside what torch takes for that, and the whole codec."""
    leaf, figures = torch.randn(values, generator=torch.Generator().manual_seed(1)), []
    bits, sizes = leaf.view(torch.int32).numpy(), leaf.abs()
    for share in SHARES:
        count, codec = sent_values(values, share), CODECS["topk"](share=share)
        sent, _ = codec.encode({"w": leaf}, None)
        torch_s, ours_s, encode_s, decode_s = (
            _seconds(lambda count=count: torch.topk(sizes, count, sorted=False)),
            _seconds(lambda count=count: find_largest(bits, count)),
            _seconds(lambda codec=codec: codec.encode({"w": leaf}, None)),
            _seconds(lambda codec=codec, sent=sent: codec.decode(sent)),
        )
        told = topk_bytes(values, share)
        figures += [
            Figure(f"largest {share:.1%}: time over torch.topk", ours_s / torch_s, "x", "<= 1.5"),
            Figure(f"largest {share:.1%}", 1e9 / values * ours_s, "ns/value"),
            Figure(f"topk {share:.1%} encode", 1e9 / values * encode_s, "ns/value"),
            Figure(f"topk {share:.1%} decode", 1e9 / values * decode_s, "ns/value"),
            Figure(f"topk {share:.1%}: bytes over those told", sent.num_bytes / told, "x", "<= 1"),
        ]
    return figures


def _headers(cuts: Sequence[int]) -> list[Figure]:
    """Take the client parts of VGG-19, a share of whose weights is pruned: header and gaps over the formulas' bytes."""
    model = build_initial(Spec(name="vgg19"), seed=1)
    figures = []
    for cut in cuts:
        part = _part(model.tree(), model.cuts[cut])
        for name, options in SENDERS.items():
            sent, _ = CODECS[name](**options).encode(part, None)
            whole = sum(one.nbytes for one in payload.pack(sent))
            share = 100 * (whole - sent.num_bytes) / sent.num_bytes
            figures.append(Figure(f"VGG-19 cut {cut}, {name}: header", share, "%", "<= 1"))
    return figures


def _part(tree: Tree, layers: int) -> Tree:
    generator = torch.Generator().manual_seed(1)
    part = {key: leaf.clone() for key, leaf in tree.items() if int(key.partition(".")[0]) < layers}
    for leaf in part.values():
        if leaf.dim() > 1:
            leaf[torch.rand(leaf.shape, generator=generator) < PRUNED] = 0
    return part
