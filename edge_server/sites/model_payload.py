"""Encoding of models that sites exchange, and its validation."""

from __future__ import annotations

from shared.codecs.dense import dense
from shared.errors import WireError
from shared.protocol.payload import pack, unpack
from shared.tensors.tree import Tree, check_like

CODEC = dense()


def require_model(data: memoryview, like: Tree) -> None:
    """Refuse bytes that do not encode a model like ours, by their outline before decoding where possible.

    Raises:
        WireError: Leaves, shapes or dtypes differ, or a value is not finite.
    """
    payload = unpack(data)
    outline = CODEC.outline(payload)
    check_like(outline, like)
    if missing := sorted(like.keys() - outline.keys()):
        raise WireError(f"{missing[0]!r} and {len(missing) - 1} more tensors are missing", reason="shape")
    check_like(CODEC.decode(payload).tree, like)


def pack_model(tree: Tree) -> list[memoryview]:
    """Encode a model in key order; aggregated again, it has the same digest."""
    return pack(CODEC.encode(dict(sorted(tree.items())), None)[0])


def read_model(data: memoryview) -> Tree:
    """Decode a model accepted by `require_model`; its tensors are views of the bytes."""
    return CODEC.decode(unpack(data)).tree
