"""Reference of a configuration's keys, read from its structs: type, unit, default and meaning of each.

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
"""By the ending of a key's name; the first that fits."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}
NOTHING = (type(None), msgspec.UnsetType)
"""Types of what is absent."""
ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


class Key(NamedTuple):
    """A key of a file.

    Attributes:
        name: As the file writes it.
        type: What its value is.
        unit: Of the value; empty for none.
        default: As a file would write it; `required` or `absent` where there is none.
    """

    name: str
    type: str
    unit: str
    default: str
    meaning: str


class KeyGroup(NamedTuple):
    """Keys that stand together.

    Attributes:
        heading: The table of the file, such as `[cohort]`.
        meaning: What it is for.
        keys: In the order of the struct.
    """

    heading: str
    meaning: str
    keys: Sequence[Key]


def struct_keys(struct: type[msgspec.Struct]) -> list[KeyGroup]:
    """Return the keys of a file and of every table in it."""
    found: list[KeyGroup] = []
    _add_struct(found, struct, TOP, {})
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


def field_keys(struct: type[msgspec.Struct]) -> list[Key]:
    """Return the keys of one struct."""
    notes = meanings(struct)
    return [_key(one, notes.get(one.name, "")) for one in msgspec.structs.fields(struct)]


def _key(field: msgspec.structs.FieldInfo, meaning: str) -> Key:
    """Return the row of a field; the defaults of one that holds a struct are those of that struct's keys."""
    if _structs(field.type):
        usual = f'name = "{field.default.name}"' if isinstance(field.default, Spec) else ABSENT
        return Key(field.encode_name, "", "", REQUIRED if field.required else usual, meaning)
    default = default_words(field.default, field.default_factory)
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


def type_words(hint: Any) -> str:
    """Return the type of a value in words, such as `integer` or `"continue" or "stop"`."""
    if hint in WORDS:
        return WORDS[hint]
    arguments, origin = get_args(hint), get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union_words(arguments)
    words: Mapping[object, Callable[[], str]] = {
        Annotated: lambda: type_words(arguments[0]),
        Literal: lambda: " or ".join(msgspec.json.encode(one).decode() for one in arguments),
        tuple: lambda: _list_words(arguments),
        list: lambda: _list_words((*arguments, ...)),
        dict: lambda: "table",
    }
    if origin not in words:
        raise TypeError(f"no words for {hint}; add them to WORDS")
    return words[origin]()


def _union_words(kinds: tuple[Any, ...]) -> str:
    if set(kinds) == {bool, int, float, str}:
        return "number, text or true or false"
    return " or ".join(type_words(one) for one in kinds if one not in NOTHING)


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


def default_words(value: object, factory: object) -> str:
    """Return a default as a file would write it."""
    if value is None or value is msgspec.UNSET:
        return ABSENT
    if value not in (msgspec.NODEFAULT, inspect.Parameter.empty):
        return msgspec.json.encode(value).decode()
    return REQUIRED if factory is msgspec.NODEFAULT else "[]" if factory is list else "{}"


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says of each attribute, with those of the classes that it is built on."""
    parts = [docstring_entries(one.__dict__.get("__doc__")) for one in reversed(kind.__mro__)]
    return {name: text for part in parts for name, text in part}


def docstring_entries(docstring: str | None) -> Iterator[tuple[str, str]]:
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


def as_markdown(introduction: str, sections: Sequence[KeyGroup]) -> str:
    """Return the reference as a page: a heading and a table for each section."""
    return introduction + "".join(f"\n## {_escaped(one.heading)}\n\n{_body(one)}" for one in sections)


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


def file_schema(kind: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a file: every key with its meaning and default."""
    (reference,), structs = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for struct in every_struct(kind):
        describe(structs[struct.__name__], struct)
    return {"$schema": DIALECT, "title": title, **reference, "$defs": dict(sorted(structs.items()))}


def every_struct(hint: Any) -> set[type[msgspec.Struct]]:
    """Return a struct and those in it, at any depth."""
    found = {hint} if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else set()
    parts = [one.type for struct in found for one in msgspec.structs.fields(struct)] or [*get_args(hint)]
    return found.union(*map(every_struct, parts))


def describe(definition: dict[str, Any], struct: type) -> None:
    """Put the meaning of each key beside it, in place of a docstring for all of them."""
    definition["description"] = summary(struct)
    notes = meanings(struct)
    for name, entry in definition["properties"].items():
        if name in notes:
            entry["description"] = notes[name]


def add_format(parser: argparse.ArgumentParser, page: str) -> None:
    """Add the option that chooses how `write_reference` prints."""
    help_ = f"json: a JSON Schema for editors; markdown: the page {page}; default: %(default)s"
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table", help=help_)


def add_schema_verb(parser: argparse.ArgumentParser, file: str, page: str) -> None:
    """Add the verb `schema`, which prints the keys of a file."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_format(verbs.add_parser("schema", help=f"print every key of {file} with type, unit, default and meaning"), page)


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
        write_text(sys.stdout, group.heading, *about, *([table] if group.keys else ["no options"]), "")
