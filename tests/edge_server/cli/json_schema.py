"""A check of values against a JSON Schema, of the keywords that a plan's schema uses; any other keyword is an error."""

from __future__ import annotations

import re
from typing import Any

TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
NOTES = {"$schema", "$defs", "title", "description", "default", "discriminator"}
"""Keywords that refuse nothing."""


def require_valid(value: Any, schema: dict[str, Any]) -> None:
    """Check a value.

    Raises:
        ValueError: It is not valid; the message begins with the place, such as `$.cohort`.
    """
    _check(value, schema, schema["$defs"], "$")


def _check(value: Any, schema: Any, definitions: dict[str, Any], place: str) -> None:
    if isinstance(schema, bool):
        if not schema:
            raise ValueError(f"{place}: nothing may stand here")
        return
    for keyword, said in schema.items():
        if keyword not in NOTES:
            CHECKS[keyword](value, said, schema, definitions, place)


def _reference(value, said, _schema, definitions, place):
    _check(value, definitions[said.removeprefix("#/$defs/")], definitions, place)


def _type(value, said, _schema, _definitions, place):
    if not any(TYPES[one](value) for one in ([said] if isinstance(said, str) else said)):
        raise ValueError(f"{place}: {value!r} is no {said}")


def _any_of(value, said, _schema, definitions, place):
    problems = []
    for one in said:
        try:
            return _check(value, one, definitions, place)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(f"{place}: none of {len(said)} fits: {'; '.join(problems)}")


def _enum(value, said, _schema, _definitions, place):
    if value not in said:
        raise ValueError(f"{place}: {value!r} is none of {said}")


def _pattern(value, said, _schema, _definitions, place):
    if not re.search(said, value):
        raise ValueError(f"{place}: {value!r} is not like {said}")


def _required(value, said, _schema, _definitions, place):
    if lacking := set(said) - set(value):
        raise ValueError(f"{place}: without {sorted(lacking)}")


def _properties(value, said, _schema, definitions, place):
    for key in value.keys() & said.keys():
        _check(value[key], said[key], definitions, f"{place}.{key}")


def _others(value, said, schema, definitions, place):
    for key in value.keys() - schema.get("properties", {}).keys():
        _check(value[key], said, definitions, f"{place}.{key}")


def _items(value, said, schema, definitions, place):
    for index, one in enumerate(value[len(schema.get("prefixItems", [])) :]):
        _check(one, said, definitions, f"{place}[{index}]")


def _prefix(value, said, _schema, definitions, place):
    for index, (one, shape) in enumerate(zip(value, said, strict=False)):
        _check(one, shape, definitions, f"{place}[{index}]")


def _least(value, said, _schema, _definitions, place):
    if len(value) < said:
        raise ValueError(f"{place}: fewer than {said}")


def _most(value, said, _schema, _definitions, place):
    if len(value) > said:
        raise ValueError(f"{place}: more than {said}")


CHECKS = {
    "$ref": _reference,
    "type": _type,
    "anyOf": _any_of,
    "enum": _enum,
    "const": lambda value, said, *rest: _enum(value, [said], *rest),
    "pattern": _pattern,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _others,
    "items": _items,
    "prefixItems": _prefix,
    "minItems": _least,
    "maxItems": _most,
}
