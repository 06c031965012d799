"""Export a run's model to one file: ONNX with weights, safetensors or TorchScript."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from edge_server.release.graph import (
    INPUT,
    OUTPUT,
    TRACED_EXAMPLES,
    embed_weights,
    require_equal_outputs,
    require_parity,
    trace_graph,
)
from edge_server.release.run_model import RunModel, make_probes
from shared.errors import ConfigError, Unwritable, first_line
from shared.protocol.inference.release import Preprocessing, sha256_of
from shared.protocol.messages import Scalar
from shared.registry import FAULTS
from shared.runtime.durable import replace_file
from shared.tensors import file
from shared.tensors.tree import State

SUFFIXES: Mapping[str, str] = {"onnx": ".onnx", "safetensors": ".safetensors", "torchscript": ".pt"}
"""File name suffix of each format."""


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of an exported file, as the command line prints it.

    Attributes:
        format: A key of `SUFFIXES`.
        size: Bytes of the file.
        input: Shape of one input, without the batch.
        output: Shape of one output, without the batch.
        preprocessing: Preparation of the training examples, which the file does not contain.
        error: Largest difference from PyTorch on random inputs, as a share of the largest output; None for
            safetensors, which holds no graph to run.
    """

    file: str
    format: str
    run: str
    round: int
    size: int
    sha256: str
    input: tuple[int, ...]
    output: tuple[int, ...]
    preprocessing: Preprocessing
    error: float | None = None


def export_model(run_model: RunModel, file_format: str, out: Path) -> ExportedFile:
    """Write a model to a file atomically, replacing an existing file.

    Args:
        file_format: A key of `SUFFIXES`.

    Raises:
        ConfigError: The network cannot be exported in this format, or the file cannot be written.
        Unwritable: The disk is full.
    """
    probes = make_probes(run_model.model.layers, run_model.example, run_model.what)
    write: Mapping[str, Callable[[], float | None]] = {
        "onnx": lambda: _write_onnx(run_model, probes, out),
        "safetensors": lambda: _write_safetensors(run_model, out),
        "torchscript": lambda: _write_torchscript(run_model, probes, out),
    }
    try:
        error = write[file_format]()
    except Unwritable:
        raise
    except OSError as problem:
        raise ConfigError(f"{out}: {problem.strerror}; name another file with --out") from problem
    data = out.read_bytes()
    return ExportedFile(
        file=str(out),
        format=file_format,
        run=run_model.source.run,
        round=run_model.source.round,
        size=len(data),
        sha256=sha256_of(data),
        input=run_model.example,
        output=tuple(probes[1].shape[1:]),
        preprocessing=run_model.preprocessing,
        error=error,
    )


def _write_onnx(run_model: RunModel, probes: tuple[Tensor, Tensor], out: Path) -> float:
    graph = trace_graph(run_model.model.layers, run_model.example, (INPUT, OUTPUT), run_model.what)
    data = embed_weights(graph, run_model.tree)
    error = require_parity(data, probes, run_model.what)
    replace_file(out, data)
    return error


def _write_safetensors(run_model: RunModel, out: Path) -> None:
    source = run_model.source
    metadata: dict[str, Scalar] = {"run": source.run, "round": source.round, "model": run_model.plan.model.name}
    for name in ("mean", "std"):
        if numbers := getattr(run_model.preprocessing, name):
            metadata[name] = json.dumps(numbers)
    file.save(out, State(run_model.tree), about=metadata)


def _write_torchscript(run_model: RunModel, probes: tuple[Tensor, Tensor], out: Path) -> float:
    inputs, expected = probes
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch warns that TorchScript is deprecated
            traced = torch.jit.trace(run_model.model.layers, (inputs[:TRACED_EXAMPLES],), check_trace=False)
            outputs = [traced(inputs[:count]).numpy() for count in (len(inputs), 1)]
            torch.jit.save(traced, buffer)
    except FAULTS as fault:
        raise ConfigError(f"{run_model.what} cannot be written as TorchScript: {first_line(fault)}") from fault
    error = require_equal_outputs(outputs, expected, run_model.what)
    replace_file(out, buffer.getvalue())
    return error
