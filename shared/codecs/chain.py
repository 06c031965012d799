"""Chain of codecs: one selects values, the next encodes them.

`codecs = "masked,quantize"` omits zeros and quantizes the others: of n values in sparse leaves and nnz not zero,
⌈nnz (q + 1) / 8⌉ + 8 + ⌈n / 8⌉ bytes with `quantize_scope = "tree"`. Options have the name of their codec as prefix,
such as `quantize_bits = 4`. Both sides build the same chain: a payload of another one is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from shared.codecs import masked
from shared.codecs.base import Codec, Memory
from shared.codecs.dense import dense
from shared.codecs.float16 import float16
from shared.codecs.quantize import quantize
from shared.errors import WireError
from shared.protocol.messages import Payload, Scalar
from shared.tensors.tree import Tree

LAST: Mapping[str, Callable[..., Codec]] = {"dense": dense, "float16": float16, "quantize": quantize}
OVER: Mapping[str, Callable[..., Codec]] = {"masked": masked.build_masked}
"""Codecs that pass their values to another codec: (its name, the codec, options)."""


def chain(*, codecs: str = "masked,quantize", **options: Scalar) -> Codec:
    """Build the chain.

    Args:
        codecs: Names, the outermost first, separated by commas.
        options: Options of each codec, prefixed by its name and an underscore.

    Raises:
        ValueError: A name is unknown in its position, or an option belongs to no codec of the chain.
    """
    *outer, last = names = [name.strip() for name in str(codecs).split(",")]
    for name, choices in [*((name, OVER) for name in outer), (last, LAST)]:
        if name not in choices:
            raise ValueError(f"{name!r} is not possible in this position of {codecs!r}; known: {', '.join(choices)}")
    if unknown := [option for option in options if not option.startswith(tuple(f"{name}_" for name in names))]:
        raise ValueError(f"option {unknown[0]!r} belongs to no codec in {codecs!r}")
    codec, name = LAST[last](**_build_inner(last, options)), last
    for outermost in reversed(outer):
        codec, name = OVER[outermost](name, codec, **_build_inner(outermost, options)), outermost
    return _rename_codec(codec, name)


def _build_inner(name: str, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    start = f"{name}_"
    return {option.removeprefix(start): value for option, value in options.items() if option.startswith(start)}


def _rename_codec(codec: Codec, name: str) -> Codec:
    """Return a codec under the name `chain`, by which a receiver finds it."""

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        payload, memory = codec.encode(tree, memory)
        return msgspec.structs.replace(payload, codec="chain"), memory

    def inner(payload: Payload) -> Payload:
        if payload.codec != "chain":
            raise WireError(f"payload of codec {payload.codec!r}, expected chain", reason="codec")
        return msgspec.structs.replace(payload, codec=name)

    return Codec(encode, lambda payload: codec.decode(inner(payload)), lambda payload: codec.outline(inner(payload)))
