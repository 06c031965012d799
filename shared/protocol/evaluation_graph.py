"""The network of a run as devices evaluate it by ONNX Runtime: sent once, the parameters of each round are bound to it.

A few kilobytes, the same for a whole run; a device keeps it under its digest and asks for it only where it has none.
"""

from __future__ import annotations

import msgspec

from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec

FORMAT = 1
"""Counted up where an older device would take a graph wrong."""


class EvaluationGraph(msgspec.Struct, frozen=True, kw_only=True):
    """An ONNX graph that is given its parameters when it is loaded.

    Attributes:
        parameters: Names of the initializers that must be bound, which are those of the network's parameters.
        format: See `FORMAT`.
    """

    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]
    opset: int
    onnx: bytes
    format: int = FORMAT


def encode(graph: EvaluationGraph) -> bytes:
    """Return a graph as it travels; the same one gives the same bytes."""
    return msgspec.msgpack.encode(graph)


def decode(data: bytes | memoryview) -> EvaluationGraph:
    """Read a graph.

    Raises:
        WireError: It is none, or of a newer format.
    """
    try:
        found = msgspec.msgpack.decode(data, type=EvaluationGraph)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{len(data)} bytes that are no graph to evaluate by: {error}") from error
    if found.format > FORMAT:
        raise WireError(f"graph of format {found.format}, this side reads {FORMAT}: update it", reason="version")
    return found
