"""JSON Schema of a plan, for completion and validation in editors.

Types come from the structs, as msgspec describes them; meanings, and the options of each choice, from the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.cli.plan.reference import CHOICES, list_builder_parameters, read_option_meanings, unwrap_builder
from edge_server.plan.network import ModelPlan
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from shared.config_reference import DIALECT, describe, every_struct
from shared.registry import Registry, offered_plugins

OWN_NAME = "^[^:]+:[^:]+$"
"""A plugin, `module:attribute`; its options are not checked here."""
SCALARS = {"type": ["boolean", "number", "string"]}


def plan_schema() -> dict[str, Any]:
    """Return the schema: every key with meaning and default, every choice with its options."""
    (reference,), structs = msgspec.json.schema_components([Plan], ref_template="#/$defs/{name}")
    options = [allocator.options for allocator in ALLOCATORS.values()]
    definitions = {**structs, **msgspec.json.schema_components(options, ref_template="#/$defs/{name}")[1]}
    for struct in every_struct(Plan).union(options):
        describe(definitions[struct.__name__], struct)
    for what, builders in CHOICES.items():
        definitions[f"{what}_choice"] = {"anyOf": _choices(builders)}
    for choice in definitions["model_choice"]["anyOf"]:
        network = definitions[ModelPlan.__name__]["properties"]
        choice["properties"] = {**network, **choice["properties"]}
    for name in ("Plan", "FallbackPlan"):
        for key in definitions[name]["properties"].keys() & CHOICES.keys():
            _add_reference(definitions[name]["properties"], key)
    chosen = definitions[OptimizerPlan.__name__]
    chosen["anyOf"] = [
        {
            "properties": {
                "name": {"const": name},
                "solver": {"enum": list(allocator.solvers)},
                "options": {"$ref": f"#/$defs/{allocator.options.__name__}"},
            }
        }
        for name, allocator in ALLOCATORS.items()
    ]
    del definitions[Chosen.__name__], definitions[ModelPlan.__name__]
    return {"$schema": DIALECT, "title": "fieldfleet plan", **reference, "$defs": dict(sorted(definitions.items()))}


def _add_reference(properties: dict[str, Any], key: str) -> None:
    """Replace a key's schema by a reference to its choices."""
    shared = {name: value for name, value in properties[key].items() if name in ("description", "default")}
    properties[key] = {**shared, "$ref": f"#/$defs/{key}_choice"}


def _choices(builders: Mapping[str, Callable[..., object]]) -> list[dict[str, Any]]:
    schemas = [_choice({"const": name}, _options(builder)) for name, builder in builders.items()]
    offered = [name for name, _ in offered_plugins(builders.group)] if isinstance(builders, Registry) else []
    plugins = [{"pattern": OWN_NAME}, *({"const": name} for name in offered if name not in builders)]
    return [*schemas, *(_choice(name, {"type": "object", "additionalProperties": SCALARS}) for name in plugins)]


def _choice(name: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"type": "string", **name}, "options": options}
    return {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}


def _options(builder: Callable[..., object]) -> dict[str, Any]:
    """Return the schema of a builder's options, with the defaults of its variant."""
    function = unwrap_builder(builder)
    hints, notes = get_type_hints(function), read_option_meanings(function)
    properties: dict[str, Any] = {}
    others: object = False
    for name, option in list_builder_parameters(builder).items():
        if option.kind is option.VAR_KEYWORD:
            others = SCALARS
            continue
        shape = msgspec.json.schema(hints[name])
        default = {} if option.default is option.empty else {"default": option.default}
        properties[name] = {**shape, **default, "description": notes.get(name, "")}
    return {"type": "object", "properties": properties, "additionalProperties": others}
