"""Reference of configuration keys, generated from structs: type, unit, default, meaning.

The meaning of a key is its entry under `Attributes:` of the struct's docstring. The unit follows from its name.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from shared.protocol.messages import Spec
from shared.runtime.command_line import add_command
from shared.runtime.text_table import TextColumn, TextTable, write_text

TOP = "Top of the file"
REQUIRED, ABSENT = "required", "absent"

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
    "_mb": "MiB",
    "_days": "days",
    "_s": "s",
    "_w": "W",
    "_m": "m",
}
"""Units by the ending of a key's name; the first match counts."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPE_NAMES: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}
NOTHING = (type(None), msgspec.UnsetType)
"""Types of absent values."""
ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


class Key(NamedTuple):
    """A key of a file.

    Attributes:
        name: As the file writes it.
        type: Type in words, such as `integer`.
        unit: Unit of the value; empty for none.
        default: As a file would write it; `required` or `absent` where there is none.
    """

    name: str
    type: str
    unit: str
    default: str
    meaning: str


class KeyGroup(NamedTuple):
    """The keys of one table.

    Attributes:
        heading: Table header, such as `[cohort]`.
        meaning: Purpose of the table.
        keys: In the order of the struct.
    """

    heading: str
    meaning: str
    keys: Sequence[Key]


def struct_keys(struct: type[msgspec.Struct]) -> list[KeyGroup]:
    """Describe the keys of a file and of every table in it."""
    groups: list[KeyGroup] = []
    _add_struct(groups, struct, TOP, {})
    return groups


def _add_struct(groups: list[KeyGroup], struct: type[msgspec.Struct], heading: str, described: dict[type, str]) -> None:
    """Add a struct's keys, then sections for the structs in it; repeated structs refer to their first section."""
    notes, below, keys = attribute_docs(struct), [], []
    if tag := struct.__struct_config__.tag:
        keys.append(Key("kind", f'"{tag}"', "", REQUIRED, "Selects the kind of this table."))
    prefix = "" if heading == TOP else heading.strip("[]").partition("]")[0] + "."
    for field in msgspec.structs.fields(struct):
        key = _key(field, notes.get(field.name, ""))
        if parts := _structs(field.type):
            name = f"[[{prefix}{key.name}]]" if get_origin(field.type) is list else f"[{prefix}{key.name}]"
            section = described.get(parts[0])
            key = key._replace(type=f"table, as {section}" if section else f"table {name}")
            below += [] if section else [(part, _section_name(name, part)) for part in parts]
            described.update(dict.fromkeys(parts, section or name))
        keys.append(key)
    groups.append(KeyGroup(heading, summary(struct), keys))
    for part, name in below:
        _add_struct(groups, part, name, described)


def field_keys(struct: type[msgspec.Struct]) -> list[Key]:
    """Describe the keys of one struct."""
    notes = attribute_docs(struct)
    return [_key(field, notes.get(field.name, "")) for field in msgspec.structs.fields(struct)]


def _key(field: msgspec.structs.FieldInfo, meaning: str) -> Key:
    """Describe a field; a struct has no default of its own, since its keys list theirs."""
    if _structs(field.type):
        usual = f'name = "{field.default.name}"' if isinstance(field.default, Spec) else ABSENT
        return Key(field.encode_name, "", "", REQUIRED if field.required else usual, meaning)
    default = format_default(field.default, field.default_factory)
    return Key(field.encode_name, format_type(field.type), unit_of(field.name), default, meaning)


def _section_name(name: str, struct: type[msgspec.Struct]) -> str:
    """Append the kind to a section's name if it is one of several."""
    tag = struct.__struct_config__.tag
    return f'{name} kind = "{tag}"' if tag else name


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a field may hold."""
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if issubclass(hint, msgspec.Struct) else []
    return [struct for part in get_args(hint) for struct in _structs(part)]


def format_type(hint: Any) -> str:
    """Format a type in words, such as `integer` or `"continue" or "stop"`."""
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    arguments, origin = get_args(hint), get_origin(hint)
    if origin in (Union, types.UnionType):
        return _format_union(arguments)
    formatters: Mapping[object, Callable[[], str]] = {
        Annotated: lambda: format_type(arguments[0]),
        Literal: lambda: " or ".join(msgspec.json.encode(value).decode() for value in arguments),
        tuple: lambda: _format_list(arguments),
        list: lambda: _format_list((*arguments, ...)),
        dict: lambda: "table",
    }
    if origin not in formatters:
        raise TypeError(f"no words for {hint}; add them to TYPE_NAMES")
    return formatters[origin]()


def _format_union(kinds: tuple[Any, ...]) -> str:
    if set(kinds) == {bool, int, float, str}:
        return "number, text or true or false"
    return " or ".join(format_type(kind) for kind in kinds if kind not in NOTHING)


def _format_list(items: tuple[Any, ...]) -> str:
    """Format the type of a tuple or list in words."""
    if Ellipsis not in items:
        return "[number, number]"
    if get_origin(items[0]) is tuple:
        return "list of pairs"
    return f"list of {'texts' if str in items else 'numbers'}"


def unit_of(name: str) -> str:
    """Derive the unit from the ending of a key's name; empty for none."""
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


def format_default(value: object, factory: object) -> str:
    """Format a default as a file would write it."""
    if value is None or value is msgspec.UNSET:
        return ABSENT
    if value not in (msgspec.NODEFAULT, inspect.Parameter.empty):
        return msgspec.json.encode(value).decode()
    return REQUIRED if factory is msgspec.NODEFAULT else "[]" if factory is list else "{}"


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the documentation of a class's attributes by name, including those of its bases."""
    parts = [docstring_entries(base.__dict__.get("__doc__")) for base in reversed(kind.__mro__)]
    return {name: text for part in parts for name, text in part}


def docstring_entries(docstring: str | None) -> Iterator[tuple[str, str]]:
    """Yield name and text of every entry under `Attributes:` or `Args:`."""
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


def as_markdown(introduction: str, sections: Sequence[KeyGroup]) -> str:
    """Render the reference as a Markdown page: a heading and a table for each section."""
    return introduction + "".join(f"\n## {_escape_cell(section.heading)}\n\n{_body(section)}" for section in sections)


def _body(section: KeyGroup) -> str:
    lines = [section.meaning, ""] if section.meaning else []
    if not section.keys:
        return "\n".join([*lines, "No options.", ""])
    lines += ["| key | type | unit | default | meaning |", "|---|---|---|---|---|"]
    for key in section.keys:
        default = key.default if key.default in (REQUIRED, ABSENT) else f"`{key.default}`"
        cells = (f"`{key.name}`", key.type, key.unit, default, key.meaning)
        lines.append(f"| {' | '.join(map(_escape_cell, cells))} |")
    return "\n".join([*lines, ""])


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def file_schema(kind: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Build the JSON Schema of a file, with the meaning and default of every key."""
    (reference,), structs = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for struct in every_struct(kind):
        describe(structs[struct.__name__], struct)
    return {"$schema": DIALECT, "title": title, **reference, "$defs": dict(sorted(structs.items()))}


def every_struct(hint: Any) -> set[type[msgspec.Struct]]:
    """Return a struct and all structs nested in it."""
    structs = {hint} if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else set()
    parts = [field.type for struct in structs for field in msgspec.structs.fields(struct)] or [*get_args(hint)]
    return structs.union(*map(every_struct, parts))


def describe(definition: dict[str, Any], struct: type) -> None:
    """Replace the struct's docstring in a schema by one description per key."""
    definition["description"] = summary(struct)
    notes = attribute_docs(struct)
    for name, entry in definition["properties"].items():
        if name in notes:
            entry["description"] = notes[name]


def add_format(parser: argparse.ArgumentParser, page: str) -> None:
    """Add the option `--format` for `write_reference`."""
    help_ = f"json: a JSON Schema for editors; markdown: the page {page}; default: %(default)s"
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table", help=help_)


def add_schema_verb(parser: argparse.ArgumentParser, file: str, page: str) -> None:
    """Add the subcommand `schema`, which prints the keys of a file."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_format(
        add_command(verbs, "schema", f"print the reference of all keys of {file}: type, unit, default, meaning"), page
    )


def write_file_reference(form: str, introduction: str, kind: type[msgspec.Struct], file: str) -> int:
    """Print the reference of a file that is read as `kind`; return the exit code."""
    write_reference(form, introduction, struct_keys(kind), file_schema(kind, f"fieldfleet {file}"))
    return 0


def write_reference(form: str, introduction: str, groups: Sequence[KeyGroup], schema: dict[str, Any]) -> None:
    """Print the reference as a table, as a page or as a JSON Schema."""
    if form == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(schema), indent=1).decode() + "\n")
        return
    if form == "markdown":
        sys.stdout.write(as_markdown(introduction, groups))
        return
    columns = [TextColumn("key"), TextColumn("type", least=16), TextColumn("unit"), TextColumn("default", least=12)]
    for group in groups:
        about = [group.meaning] if group.meaning else []
        table = TextTable([*columns, TextColumn("meaning", least=24)], group.keys)
        write_text(sys.stdout, [group.heading, *about, *([table] if group.keys else ["no options"]), ""])
