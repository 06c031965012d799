"""`edge-server models`: list the models, or show the cuts of one."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edge_server.cli.terminal import write_text
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models import cost as cuts
from shared.protocol.messages import Scalar, Spec
from shared.runtime.text_table import TextColumn, TextTable

MEGA = 1e6


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its defaults.

    Attributes:
        name: Name in a plan.
        options: Options with their default values.
        example: Shape of one input.
        parameters: Number of trainable parameters.
        cuts: Layers at which it may be cut.
    """

    name: str
    options: dict[str, Any]
    example: tuple[int, ...]
    parameters: int
    cuts: list[int]


def show_models(options: argparse.Namespace) -> int:
    """List the models, or show the cuts of one.

    Raises:
        ConfigError: The model or an option is unknown, or it does not accept such examples.
    """
    if not options.model and (options.option or options.example):
        raise ConfigError("--option and --example need the NAME of a model")
    if options.batch < 1 or any(size < 1 for size in options.example):
        raise ConfigError("--batch and --example: use numbers from 1")
    if not options.model:
        listed = [_describe(name) for name in sorted(MODELS)]
        _print(options, listed, _models_table(listed))
        return 0
    spec = Spec(name=options.model, options=dict(map(_option, options.option)))
    result = cuts.cut_table(spec, tuple(options.example), options.batch)
    _print(options, result, _cuts_table(spec, result))
    return 0


def _print(options: argparse.Namespace, result: object, table: TextTable) -> None:
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")
    else:
        write_text(sys.stdout, table)


def _option(text: str) -> tuple[str, Scalar]:
    """Parse `key=value`, with the value typed as in a plan: number, boolean or text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--option {text!r}: use KEY=VALUE")
    try:
        return key, msgspec.json.decode(value, type=bool | int | float)
    except msgspec.DecodeError:
        return key, value


def _describe(name: str) -> ListedModel:
    table = cuts.cut_table(Spec(name=name))
    parameters = inspect.signature(MODELS[name]).parameters
    return ListedModel(
        name=name,
        options={key: parameter.default for key, parameter in parameters.items()},
        example=table.example,
        parameters=table.whole.parameters,
        cuts=[cut.cut for cut in table.cuts],
    )


def _models_table(listed: Sequence[ListedModel]) -> TextTable:
    columns = (
        *(TextColumn("model"), TextColumn("example"), TextColumn("parameters", right=True)),
        *(TextColumn("cuts", least=12), TextColumn("options", least=24)),
    )
    rows = [
        (
            *(model.name, _shape(model.example), f"{model.parameters:,}"),
            *(_format_numbers(model.cuts), _format_options(model.options)),
        )
        for model in listed
    ]
    return TextTable(columns, rows)


def _cuts_table(spec: Spec, table: cuts.Table) -> TextTable:
    title = f"{spec.name} {_format_options(spec.options)}".rstrip()
    caption = (
        f"one example: {_shape(table.example)}; in all: {table.whole.parameters:,} parameters, "
        f"{table.whole.prunable:,} prunable, {table.whole.forward_macs / MEGA:.1f} MMAC\n"
        f"below the cut: on the device; MMAC: forward, one example; MB: one step of {table.batch_size} examples"
    )
    if table.uncut:
        caption += f"\nno cuts: {table.uncut}"
    headings = ("cut", "features", "numbers", "parameters", "prunable", "MMAC", "MB up", "MB down")
    rows = [
        (
            *(str(cut.cut), _shape(cut.shape), str(cut.features)),
            *(f"{cut.below.parameters:,}", f"{cut.below.prunable:,}", f"{cut.below.forward_macs / MEGA:.1f}"),
            *(f"{cut.features_bytes / MEGA:.2f}", f"{cut.gradient_bytes / MEGA:.2f}"),
        )
        for cut in table.cuts
    ]
    return TextTable([TextColumn(heading, right=True) for heading in headings], rows, title, caption)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _format_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _format_options(options: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items())
