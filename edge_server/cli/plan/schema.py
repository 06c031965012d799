"""JSON Schema of a plan, for completion and validation in editors.

msgspec produces it: structs describe the sections, and each choice of a method, network or codec with its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.cli.plan.reference import CHOICES, list_builder_parameters, read_option_meanings, unwrap_builder
from edge_server.plan.network import ModelPlan
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from shared.config_reference import DIALECT, describe, every_struct
from shared.registry import Registry, offered_plugins

OwnName = Annotated[str, msgspec.Meta(pattern="^[^:]+:[^:]+$")]
"""A plugin, `module:attribute`; its options are not checked here."""
Scalars = dict[str, bool | float | str]


def plan_schema() -> dict[str, Any]:
    """Return the schema: every key with meaning and default, every choice with its options."""
    choices = {what: list(_make_choices(what)) for what in CHOICES}
    solvers = [_make_optimizer(name) for name in ALLOCATORS]
    structs = [*solvers, *(choice for choices_of in choices.values() for choice in choices_of)]
    (reference, *_), definitions = msgspec.json.schema_components([Plan, *structs], ref_template="#/$defs/{name}")
    described = {struct.__name__: struct for struct in every_struct(Plan)}
    described |= {struct.__name__: struct.__bases__[0] for struct in structs}
    described |= {allocator.options.__name__: allocator.options for allocator in ALLOCATORS.values()}
    for name, struct in described.items():
        describe(definitions[name], struct)
    for what, named in choices.items():
        definitions[f"{what}_choice"] = {"anyOf": [_refer(struct.__name__) for struct in named]}
        for plan in ("Plan", "FallbackPlan"):
            if key := definitions[plan]["properties"].get(what):
                notes = {name: key[name] for name in ("description", "default") if name in key}
                definitions[plan]["properties"][what] = {**notes, **_refer(f"{what}_choice")}
    definitions[OptimizerPlan.__name__] |= {"anyOf": [_refer(struct.__name__) for struct in solvers]}
    del definitions[Chosen.__name__], definitions[ModelPlan.__name__]
    return {"$schema": DIALECT, "title": "fieldfleet plan", **reference, "$defs": dict(sorted(definitions.items()))}


def _refer(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def _make_choices(what: str) -> Iterator[type[msgspec.Struct]]:
    """Yield a struct for each name of a choice, with the options of its builder, and for each kind of plugin."""
    builders, base = CHOICES[what], ModelPlan if what == "model" else Chosen
    offered = [name for name, _ in offered_plugins(builders.group)] if isinstance(builders, Registry) else []
    kinds: dict[str, tuple[Any, Any]] = {name: (Literal[name], Scalars) for name in offered if name not in builders}
    kinds |= {name: (Literal[name], _make_options(f"{what}_{name}_options", build)) for name, build in builders.items()}
    kinds["plugin"] = OwnName, Scalars
    for name, (own_name, options) in kinds.items():
        fields = [("name", own_name, msgspec.NODEFAULT), ("options", options, msgspec.field(default_factory=dict))]
        yield msgspec.defstruct(f"{what}_{name}", fields, bases=(base,), kw_only=True, frozen=True)


def _make_options(name: str, builder: Callable[..., object]) -> type:
    """Return a struct of a builder's options, with the defaults of its variant; any are accepted with `**options`."""
    function = unwrap_builder(builder)
    hints, notes = get_type_hints(function), read_option_meanings(function)
    parameters = list_builder_parameters(builder).values()
    fields = [
        (
            option.name,
            Annotated[hints[option.name], msgspec.Meta(description=notes.get(option.name, ""))],
            msgspec.NODEFAULT if option.default is option.empty else option.default,
        )
        for option in parameters
        if option.kind is not option.VAR_KEYWORD
    ]
    is_closed = len(fields) == len(parameters)
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=is_closed)


def _make_optimizer(name: str) -> type[msgspec.Struct]:
    allocator = ALLOCATORS[name]
    fields: list[tuple[str, Any, Any]] = [
        ("name", Literal[name], msgspec.NODEFAULT),
        ("solver", Literal[tuple(allocator.solvers)], "numpy"),
        ("options", allocator.options, msgspec.field(default_factory=allocator.options)),
    ]
    return msgspec.defstruct(f"optimizer_{name}", fields, bases=(OptimizerPlan,), kw_only=True, frozen=True)
