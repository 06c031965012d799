"""Build registered objects by name, and import allowed custom builders (`module:function`).

A task from the server or a plan of a foreign trace must not choose what a process imports: importing runs code, and
calling a function of the standard library with arbitrary options is as good as a shell.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from shared.errors import ConfigError
from shared.protocol.messages import Spec
from shared.spelling import guess

T = TypeVar("T")

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}

_ANY = ((object, bool), "")
_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:([^\W\d]\w*|\*)")
VARIABLE = "FIELDFLEET_MODELS"
"""Environment variable for commands without a settings file: entries separated by spaces."""

FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)
"""Exceptions from custom code; they must not end the process."""


def build(registry: Mapping[str, Callable[..., T]], spec: Spec, what: str) -> T:
    """Build the object that a spec names, with its options.

    Args:
        what: Kind of object, for the error: algorithm, codec, model.

    Raises:
        ConfigError: The name or an option is unknown, the builder refuses a value, or it is NaN or infinite, which the
            journal cannot store.
    """
    builder = registry.get(spec.name)
    if builder is None:
        known_names = ", ".join(sorted(registry))
        raise ConfigError(f"unknown {what} {spec.name!r}; known: {known_names}{guess(spec.name, registry)}")
    parameters = (_read_parameters if is_custom(spec.name) else _cached_parameters)(builder)
    unknown = sorted(set(spec.options) - set(parameters))
    if unknown and not any(option.kind is option.VAR_KEYWORD for option in parameters.values()):
        hint = guess(unknown[0], parameters)
        raise ConfigError(
            f"{what} {spec.name!r} has no option {unknown[0]!r}; known: {', '.join(parameters) or 'none'}{hint}"
        )
    if endless := [name for name, value in spec.options.items() if _is_not_finite(value)]:
        value = spec.options[endless[0]]
        raise ConfigError(f"{what} {spec.name!r}: {endless[0]} is {value}; give a number, a large one in place of inf")
    truths = {name: value for name, value in spec.options.items() if isinstance(value, bool)}
    if odd := _find_wrong_type(truths, parameters):  # Python would calculate with True as 1
        raise ConfigError(f"{what} {spec.name!r}: {odd}; correct its options")
    try:
        return builder(**spec.options)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: torch, for a layer of impossible size
        odd = _find_wrong_type(spec.options, parameters) if isinstance(error, TypeError) else ""
        problem = odd or str(error).partition("\n")[0]  # further lines may be torch's stack
        raise ConfigError(f"{what} {spec.name!r}: {problem}; correct its options") from error


def _read_parameters(builder: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


_cached_parameters = lru_cache(maxsize=256)(_read_parameters)
"""Cached for registered builders: a replay builds the same few for every device."""


def _find_wrong_type(options: Mapping[str, object], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Describe the first option of another type than its builder declares; empty where all fit."""
    for name, value in options.items():
        declared = getattr(parameters.get(name), "annotation", "")
        kinds, advice = _KINDS.get(getattr(declared, "__name__", str(declared)), _ANY)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            return f"{name} is {value!r}; give {advice}"
    return ""


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_allowed: set[str] = set()
"""Global to the process, like `torch.set_num_threads`."""


def require_entries(entries: Iterable[str]) -> None:
    """Validate the syntax of allow-list entries.

    Raises:
        ValueError: An entry is neither `module:function` nor `module:*`.
    """
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise ValueError(f"models: {entry[:60]!r} is neither module:function nor module:*")


def allow(entries: Iterable[str]) -> None:
    """Set this process's allow-list of builders; called once, by its composition root.

    Args:
        entries: `module:function`, or `module:*` for every function defined in exactly that module.

    Raises:
        ConfigError: An entry is neither.
    """
    entries = set(entries)
    try:
        require_entries(entries)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _allowed.clear()
    _allowed.update(entries)


def allowed_entries() -> list[str]:
    """Return the allow-list of this process, sorted."""
    return sorted(_allowed)


def is_custom(name: str) -> bool:
    """Check whether a name is a custom builder's, not a registered one's."""
    return ":" in name


def import_builder(name: str) -> Callable[..., Any]:
    """Import a custom builder, `module:function`, from the Python path.

    Raises:
        ConfigError: It is not allowed in this process, or cannot be imported.
    """
    module_name, _, function = name.partition(":")
    by_name, by_module = name in _allowed, f"{module_name}:*" in _allowed
    if not (by_name or by_module) or not _ENTRY.fullmatch(name) or function == "*":
        raise ConfigError(
            f"model {name[:120]!r} is not allowed in this process; list it under models in its settings or {VARIABLE}"
        )
    try:
        builder = getattr(importlib.import_module(module_name), function, None)
    except FAULTS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r}: {problem}; correct the module, or PYTHONPATH of this process") from error
    if not callable(builder):
        raise ConfigError(f"model {name!r}: {module_name} has no function {function!r}; correct the name")
    if not by_name and getattr(builder, "__module__", None) != module_name:
        raise ConfigError(f"model {name!r}: {function} is not defined in {module_name} itself; list it by its name")
    return builder  # type: ignore[no-any-return]  # checked by `callable`
