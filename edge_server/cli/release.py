"""`edge-server export`: a run's model as one file."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli import places
from shared import registry
from shared.errors import ConfigError
from shared.protocol.units import BYTES, choose_unit
from shared.runtime import processes
from shared.runtime.processes import loading

if TYPE_CHECKING:
    from edge_server.release.run_model import RunModel

log = logging.getLogger(__name__)

FORMATS = ("onnx", "safetensors", "torchscript")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `export` takes."""
    _model_arguments(parser)
    help_ = "onnx: with its weights inside; safetensors: the weights alone; torchscript: for libtorch"
    parser.add_argument("--format", choices=FORMATS, required=True, help=help_)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN-round-N with the format's suffix, here")
    parser.add_argument("--json", action="store_true", help="say in JSON what was written, for scripts")
    places.add(parser)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=places.RUN)
    help_ = "the model after this round; default: the most accurate that is kept, or the last, as the plan keeps them"
    parser.add_argument("--round", type=int, metavar="N", help=help_)
    help_ = "shape of one input; default: that of the plan's data, or else what the network is made for"
    parser.add_argument("--example", type=int, nargs="+", default=[], metavar="N", help=help_)


def export(options: argparse.Namespace) -> int:
    """Write a run's model as one file.

    Raises:
        ConfigError: The run keeps no such model, or it cannot be written so.
    """
    processes.configure("warning", options.verbose)
    with loading():
        from edge_server.release.export import SUFFIXES, export_model  # noqa: PLC0415

    found = _read(options)
    source = found.source
    out = options.out or Path(f"{source.run}-round-{source.round}{SUFFIXES[options.format]}")
    written = export_model(found, options.format, out)
    if options.json:
        _print_json(written)
        return 0
    unit = choose_unit(written.size, BYTES, between=("GB", "kB"))
    like = "" if written.error is None else f", within {written.error:.1e} of PyTorch"
    size = f"{written.size / unit.size:.1f} {unit.name}"
    sys.stdout.write(f"{source.run}, round {source.round}{_accuracy(found)}: {size}{like}\n{written.file}\n")
    return 0


def _read(options: argparse.Namespace) -> RunModel:
    """Return the model that is asked for."""
    from edge_server.journal.runs import find  # noqa: PLC0415
    from edge_server.release.run_model import read_model  # noqa: PLC0415

    if any(size < 1 for size in options.example):
        raise ConfigError("--example: give numbers from 1")
    if options.config:
        from edge_server.plan.server_config import load  # noqa: PLC0415

        registry.allow([*registry.allowed_entries(), *load(options.config).models])
    found = read_model(find(options.data_dir, options.run), options.round, options.example)
    if found.source.personal:
        log.warning("devices of %s use models of their own; this is the server's", found.source.algorithm.name)
    return found


def _accuracy(found: RunModel) -> str:
    known = found.source.accuracy
    return "" if known is None else f", accuracy {known:.4f}"


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
