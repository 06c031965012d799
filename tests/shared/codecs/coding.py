"""Trees for tests of codecs, and what becomes of one that travels."""

from __future__ import annotations

import torch

from shared.codecs.base import Codec, Coded
from shared.protocol import payload
from shared.tensors.tree import Tree


def over_the_wire(codec: Codec, tree: Tree) -> Coded:
    """Return what is decoded of the very bytes that a tree is encoded and packed into."""
    packed = b"".join(payload.pack(codec.encode(tree, None)[0]))
    return codec.decode(payload.unpack(memoryview(bytearray(packed))))


def tree_over_the_wire(codec: Codec, tree: Tree) -> Tree:
    """Return its tree alone."""
    return over_the_wire(codec, tree).tree


def trees(shapes: list[list[int]], seed: int) -> Tree:
    """Return leaves of these shapes, named by their places, of normal numbers by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {str(place): torch.randn(shape, generator=generator) for place, shape in enumerate(shapes)}
