"""ONNX graph for evaluation on devices; parameters are bound each round.

A few kilobytes, sent once per run; a device stores it under its digest and requests it only if it is missing.
"""

from __future__ import annotations

import msgspec

from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec

FORMAT = 1
"""Increased when an older device would misread a graph."""


class EvaluationGraph(msgspec.Struct, frozen=True, kw_only=True):
    """An ONNX graph whose parameters are bound when it is loaded.

    Attributes:
        parameters: Names of the initializers to bind, equal to those of the network's parameters.
        format: Format version, see `FORMAT`.
    """

    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]
    opset: int
    onnx: bytes
    format: int = FORMAT


def encode(graph: EvaluationGraph) -> bytes:
    """Encode a graph, deterministically."""
    return msgspec.msgpack.encode(graph)


def decode(data: bytes | memoryview) -> EvaluationGraph:
    """Decode a graph.

    Raises:
        WireError: The data are invalid, or of a newer format.
    """
    try:
        graph = msgspec.msgpack.decode(data, type=EvaluationGraph)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{len(data)} bytes are not an evaluation graph: {error}") from error
    if graph.format > FORMAT:
        raise WireError(f"graph of format {graph.format}, this side reads {FORMAT}: update it", reason="version")
    return graph
