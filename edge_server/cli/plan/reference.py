"""Reference of a plan's keys: type, unit, default and meaning, read from the structs and the builders themselves.

The meaning of a key is its entry under `Attributes:` of the struct's docstring, or under `Args:` of the builder's; a
builder may name another docstring in its first line, as in "options as in `FedslSettings`". The unit follows from the
name.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from edge_server.allocation.coordinator import ALLOCATORS
from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.local_training import STOPPING_OPTIONS, can_stop_early
from shared.codecs import CODECS
from shared.models import MODELS
from shared.protocol.messages import Spec

INTRODUCTION = """# Reference of a plan

A plan is one TOML file; keys that are not listed here are errors. The commented examples are in `deploy/plans/`. Every
row is read from the program itself. `edge-server plan schema` prints the same; `edge-server plan schema --format json`
prints a JSON Schema, with which editors complete and check plans. A key that is `required` must be given; one that is
`absent` has no value unless it is given. Relative paths of data and traces start at the folder of data sets
(`--data-root`).
"""
"""Of the page."""

TOP = "Top of the file"
REQUIRED, ABSENT = "required", "absent"
CHOICES: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "algorithm": ALGORITHMS,
    "model": MODELS,
    "codec": CODECS,
    "cut_codec": CODECS,
}
"""By the section that chooses one: builders by name."""

UNITS = {
    "_bits_per_s": "bit/s",
    "_mbit_s": "Mbit/s",
    "_dbm_hz": "dBm/Hz",
    "_db_1m": "dB",
    "_dbm": "dBm",
    "_hz": "Hz",
    "hertz": "Hz",
    "seconds": "s",
    "joules": "J",
    "kappa": "J s\N{SUPERSCRIPT TWO}/cycle",
    "_s": "s",
    "_w": "W",
    "_m": "m",
}
"""By the ending of a key's name; the first that fits."""

WORDS: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}
NOTHING = (type(None), msgspec.UnsetType)
"""Types of what is absent."""
ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")
PLAIN_BUILDER = re.compile(r"Build the (algorithm|model|codec|chain)\b")
LINK = re.compile(r"`(\w+)`")


class Key(NamedTuple):
    """A key of a plan.

    Attributes:
        name: As a plan writes it.
        type: What its value is.
        unit: Of the value; empty for none.
        default: As a plan would write it; `required` or `absent` where there is none.
        meaning: What it does.
    """

    name: str
    type: str
    unit: str
    default: str
    meaning: str


class KeyGroup(NamedTuple):
    """Keys that stand together.

    Attributes:
        heading: The table of the plan, such as `[cohort]`.
        meaning: What it is for.
        keys: In the order of the struct.
    """

    heading: str
    meaning: str
    keys: Sequence[Key]


def plan_keys() -> list[KeyGroup]:
    """Return every section of a plan, then the options of what a section chooses by name."""
    found: list[KeyGroup] = []
    _add_struct(found, Plan, TOP, {})
    for what in ("algorithm", "model", "codec"):
        found += _option_sections(f"[{what}.options]", CHOICES[what])
    for name, allocator in ALLOCATORS.items():
        options = allocator.options
        found.append(KeyGroup(f'[optimizer.options] of "{name}"', summary(options), _keys(options)))
    return found


def _add_struct(found: list[KeyGroup], struct: type[msgspec.Struct], heading: str, seen: dict[type, str]) -> None:
    """Add a struct's keys, then the sections of the structs in it; one that was described before is referred to."""
    notes, below, keys = meanings(struct), [], []
    if tag := struct.__struct_config__.tag:
        keys.append(Key("kind", f'"{tag}"', "", REQUIRED, "Says which of the kinds the table is."))
    prefix = "" if heading == TOP else heading.strip("[]").partition("]")[0] + "."
    for field in msgspec.structs.fields(struct):
        key = _key(field, notes.get(field.name, ""))
        if parts := _structs(field.type):
            name = f"[[{prefix}{key.name}]]" if get_origin(field.type) is list else f"[{prefix}{key.name}]"
            known = seen.get(parts[0])
            key = key._replace(type=f"table, as {known}" if known else f"table {name}")
            below += [] if known else [(one, _of_kind(name, one)) for one in parts]
            seen.update(dict.fromkeys(parts, known or name))
        keys.append(key)
    found.append(KeyGroup(heading, summary(struct), keys))
    for one, name in below:
        _add_struct(found, one, name, seen)


def _keys(struct: type[msgspec.Struct]) -> list[Key]:
    notes = meanings(struct)
    return [_key(one, notes.get(one.name, "")) for one in msgspec.structs.fields(struct)]


def _key(field: msgspec.structs.FieldInfo, meaning: str) -> Key:
    """Return the row of a field; the defaults of one that holds a struct are those of that struct's keys."""
    if _structs(field.type):
        usual = f'name = "{field.default.name}"' if isinstance(field.default, Spec) else ABSENT
        return Key(field.encode_name, "", "", REQUIRED if field.required else usual, meaning)
    default = _default(field.default, field.default_factory)
    return Key(field.encode_name, type_words(field.type), unit_of(field.name), default, meaning)


def _of_kind(name: str, struct: type[msgspec.Struct]) -> str:
    """Return a section's name with its kind, where it is one of several."""
    tag = struct.__struct_config__.tag
    return f'{name} kind = "{tag}"' if tag else name


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a field may hold."""
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if issubclass(hint, msgspec.Struct) else []
    return [struct for part in get_args(hint) for struct in _structs(part)]


def _option_sections(heading: str, builders: Mapping[str, Callable[..., object]]) -> Iterator[KeyGroup]:
    """Yield the options of builders; those that share a function stand together with their other defaults."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, builder in builders.items():
        rows = tuple((key.name, key.type, key.meaning) for key in option_keys(builder))
        groups.setdefault(rows, []).append(name)
    for names in groups.values():
        usual = option_keys(builders[names[0]])
        about = dict.fromkeys(_about(option_function(builders[name])) for name in names)
        others = [f"`{name}`: {one}" for name in names if (one := _differing(usual, option_keys(builders[name])))]
        parts = [*about, "Other defaults: " + "; ".join(others) + "."] if others else [*about]
        yield KeyGroup(f"{heading} of " + ", ".join(f'"{name}"' for name in names), " ".join(parts), usual)


def _about(function: Callable[..., object]) -> str:
    """Return what a builder makes: as its docstring says, or that of its module where its own says no more."""
    first = summary(function)
    return summary(sys.modules[function.__module__]) if PLAIN_BUILDER.match(first) else first


def _differing(usual: Sequence[Key], others: Sequence[Key]) -> str:
    """Return the defaults of some keys that are not the usual ones."""
    pairs = zip(usual, others, strict=True)
    return ", ".join(f"{other.name} {other.default}" for one, other in pairs if one.default != other.default)


def option_keys(builder: Callable[..., object]) -> list[Key]:
    """Return a builder's options, with the defaults of a variant of it."""
    function = option_function(builder)
    hints, notes = get_type_hints(function), meanings(function)
    found = []
    for name, option in own_options(builder).items():
        default = _default(option.default, msgspec.NODEFAULT)
        if option.kind is option.VAR_KEYWORD:
            name, default = "NAME_OPTION", ABSENT  # noqa: PLW2901 - any key of that form
        note = notes.get(option.name, "")
        found.append(Key(name, type_words(hints[option.name]), unit_of(name), default, note))
    return found


def own_options(builder: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a builder, less those of early stopping, which have a section of their own."""
    hidden = STOPPING_OPTIONS if can_stop_early(builder) else ()
    return {name: option for name, option in inspect.signature(builder).parameters.items() if name not in hidden}


def option_function(builder: Callable[..., object]) -> Callable[..., object]:
    """Return the function that a builder's options are those of."""
    while isinstance(builder, partial):
        builder = builder.func
    return builder


def type_words(hint: Any) -> str:
    """Return the type of a value in words, such as `integer` or `"continue" or "stop"`."""
    if hint in WORDS:
        return WORDS[hint]
    arguments = get_args(hint)
    if (origin := get_origin(hint)) is Literal:
        return " or ".join(f'"{one}"' for one in arguments)
    if origin in (Union, types.UnionType):
        if set(arguments) == {bool, int, float, str}:
            return "number, text or true or false"
        return " or ".join(type_words(one) for one in arguments if one not in NOTHING)
    if origin is tuple:
        return _list_words(arguments)
    if origin is dict:
        return "table"
    raise TypeError(f"no words for {hint}; add them to WORDS")


def _list_words(items: tuple[Any, ...]) -> str:
    """Return what a tuple of items of these types is called."""
    if Ellipsis not in items:
        return "[number, number]"
    if get_origin(items[0]) is tuple:
        return "list of pairs"
    return f"list of {'texts' if str in items else 'numbers'}"


def unit_of(name: str) -> str:
    """Return the unit that a key's name ends in; empty for none."""
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


def _default(value: object, factory: object) -> str:
    if value is None or value is msgspec.UNSET:
        return ABSENT
    if value not in (msgspec.NODEFAULT, inspect.Parameter.empty):
        return msgspec.json.encode(value).decode()
    return REQUIRED if factory is msgspec.NODEFAULT else "{}"


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def meanings(thing: object) -> dict[str, str]:
    """Return what a docstring says of each attribute or argument, with those of what it is built on or refers to."""
    if isinstance(thing, type):
        parts = [dict(_entries(one.__dict__.get("__doc__"))) for one in reversed(thing.__mro__)]
    else:
        referred = (meanings(one) if isinstance(one, type) else dict(_entries(one.__doc__)) for one in _referred(thing))
        parts = [*referred, dict(_entries(thing.__doc__))]
    return {name: text for part in parts for name, text in part.items()}


def _referred(function: object) -> list[object]:
    """Return what a builder's first paragraph names in backticks: a class of settings, or another builder."""
    names = vars(sys.modules[str(getattr(function, "__module__", __name__))])
    found = [names.get(name) or ALGORITHMS.get(name) for name in LINK.findall(summary(function))]
    return [one for one in found if one is not None and one is not function]


def _entries(docstring: str | None) -> Iterator[tuple[str, str]]:
    """Yield name and text of every entry below `Attributes:` or `Args:`."""
    names: list[str] = []
    text = ""
    is_inside = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if not line.startswith(" "):
            is_inside = line in ("Attributes:", "Args:") or (is_inside and not line)
            continue
        if is_inside and line.startswith(" " * 4) and not line.startswith(" " * 5) and (entry := ENTRY.match(line[4:])):
            yield from ((name, text) for name in names)
            names, text = entry[1].split(", "), entry[2]
        elif is_inside:
            text += f" {line.strip()}"
    yield from ((name, text) for name in names)


def as_markdown(sections: Sequence[KeyGroup]) -> str:
    """Return the reference as a page: a heading and a table for each section."""
    return INTRODUCTION + "".join(f"\n## {_escaped(one.heading)}\n\n{_body(one)}" for one in sections)


def _body(section: KeyGroup) -> str:
    lines = [section.meaning, ""] if section.meaning else []
    if not section.keys:
        return "\n".join([*lines, "No options.", ""])
    lines += ["| key | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for key in section.keys:
        default = key.default if key.default in (REQUIRED, ABSENT) else f"`{key.default}`"
        cells = (f"`{key.name}`", key.type, key.unit, default, key.meaning)
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
