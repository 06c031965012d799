"""Plan key reference: type, unit, default and meaning, read from structs and builders.

The meaning of a key is its entry under `Attributes:` of the struct's docstring, or under `Args:` of the builder's; a
builder may refer to another docstring in its first line, as in "options as in `FedslSettings`". The unit follows from
the name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_type_hints

import msgspec

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.early_stopping import STOPPING_OPTIONS, can_stop_early
from shared.codecs import CODECS
from shared.config_reference import (
    ABSENT,
    Key,
    KeyGroup,
    attribute_docs,
    docstring_entries,
    field_keys,
    format_default,
    format_type,
    struct_keys,
    summary,
    unit_of,
)
from shared.models import MODELS

INTRODUCTION = """# Reference of a plan

A plan is one TOML file; keys that are not listed here are errors. The commented examples are in `deploy/plans/`;
those in `deploy/plans/options/` show every key. Every row is read from the program itself. `edge-server plan schema`
prints the same; `edge-server plan schema --format json` prints a JSON Schema, with which editors complete and check
plans. A key that is `required` must be given; one that is `absent` has no value unless it is given. Relative paths of
data and traces start at the folder of data sets (`--data-root`).
"""
"""Head of the page."""

CHOICES: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "algorithm": ALGORITHMS,
    "model": MODELS,
    "codec": CODECS,
    "cut_codec": CODECS,
}
"""Builders by name, for each section that chooses one."""

PLAIN_BUILDER = re.compile(r"Build the (algorithm|model|codec|chain)\b")
LINK = re.compile(r"`(\w+)`")


def plan_keys() -> list[KeyGroup]:
    """Return every section of a plan, followed by the options of each choice."""
    groups = struct_keys(Plan)
    for what in ("algorithm", "model", "codec"):
        groups += _option_sections(f"[{what}.options]", CHOICES[what])
    for name, allocator in ALLOCATORS.items():
        options = allocator.options
        groups.append(KeyGroup(f'[optimizer.options] of "{name}"', summary(options), field_keys(options)))
    return groups


def _option_sections(heading: str, builders: Mapping[str, Callable[..., object]]) -> Iterator[KeyGroup]:
    """Yield the options of builders, grouped by function, with differing defaults."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, builder in builders.items():
        rows = tuple((key.name, key.type, key.meaning) for key in list_option_keys(builder))
        groups.setdefault(rows, []).append(name)
    for names in groups.values():
        usual = list_option_keys(builders[names[0]])
        about = dict.fromkeys(_summary(unwrap_builder(builders[name])) for name in names)
        others = [
            f"`{name}`: {difference}"
            for name in names
            if (difference := _format_differences(usual, list_option_keys(builders[name])))
        ]
        parts = [*about, "Other defaults: " + "; ".join(others) + "."] if others else [*about]
        yield KeyGroup(f"{heading} of " + ", ".join(f'"{name}"' for name in names), " ".join(parts), usual)


def _summary(function: Callable[..., object]) -> str:
    """Return the summary of a builder's docstring, or of its module's if that says more."""
    first = summary(function)
    return summary(sys.modules[function.__module__]) if PLAIN_BUILDER.match(first) else first


def _format_differences(usual: Sequence[Key], others: Sequence[Key]) -> str:
    """Return the defaults that differ from the usual ones."""
    pairs = zip(usual, others, strict=True)
    return ", ".join(f"{other.name} {other.default}" for key, other in pairs if key.default != other.default)


def list_option_keys(builder: Callable[..., object]) -> list[Key]:
    """Return a builder's options, with the defaults of its variant."""
    function = unwrap_builder(builder)
    hints, notes = get_type_hints(function), read_option_meanings(function)
    keys = []
    for name, option in list_builder_parameters(builder).items():
        default = format_default(option.default, msgspec.NODEFAULT)
        if option.kind is option.VAR_KEYWORD:
            name, default = "NAME_OPTION", ABSENT  # noqa: PLW2901 - any key of that form
        note = notes.get(option.name, "")
        keys.append(Key(name, format_type(hints[option.name]), unit_of(name), default, note))
    return keys


def list_builder_parameters(builder: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a builder, without those of early stopping, which have a section of their own."""
    hidden = STOPPING_OPTIONS if can_stop_early(builder) else ()
    return {name: option for name, option in inspect.signature(builder).parameters.items() if name not in hidden}


def unwrap_builder(builder: Callable[..., object]) -> Callable[..., object]:
    """Return the function behind a builder that may be a partial."""
    while isinstance(builder, partial):
        builder = builder.func
    return builder


def read_option_meanings(function: Callable[..., object]) -> dict[str, str]:
    """Return the meaning of each argument of a builder, including those of the docstrings that it refers to."""
    referred = [
        attribute_docs(linked).items() if isinstance(linked, type) else docstring_entries(linked.__doc__)
        for linked in _linked_objects(function)
    ]
    return {name: text for part in [*referred, docstring_entries(function.__doc__)] for name, text in part}


def _linked_objects(function: object) -> list[object]:
    """Return the classes of settings or builders that a builder's first paragraph names in backticks."""
    names = vars(sys.modules[str(getattr(function, "__module__", __name__))])
    objects = [names.get(name) or ALGORITHMS.get(name) for name in LINK.findall(summary(function))]
    return [target for target in objects if target is not None and target is not function]
