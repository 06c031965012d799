"""Registry of builders by name, and the allow-list of a user's own builders, `module:function`.

What a task from the server or a plan in somebody's trace names must not choose what a process imports: to import is to
run, and a function of the standard library with options of a stranger's choice is as good as a shell.
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
"""Of the environment, where a command has no file of settings: entries with spaces between."""

FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)
"""What code of the user's own raises when something in it is wrong: no reason for a process of ours to end."""


def build(registry: Mapping[str, Callable[..., T]], spec: Spec, what: str) -> T:
    """Return what the spec names, built with its options.

    Args:
        spec: The name and the options.
        what: What the registry holds, for the error: algorithm, codec, model.

    Raises:
        ConfigError: The name or an option is unknown, the builder refuses a value, or that is NaN or infinite, which no
            journal keeps.
    """
    builder = registry.get(spec.name)
    if builder is None:
        known_names = ", ".join(sorted(registry))
        raise ConfigError(f"unknown {what} {spec.name!r}; known: {known_names}{guess(spec.name, registry)}")
    known = (_declared if is_custom(spec.name) else _declared_once)(builder)
    unknown = sorted(set(spec.options) - set(known))
    if unknown and not any(option.kind is option.VAR_KEYWORD for option in known.values()):
        meant = guess(unknown[0], known)
        raise ConfigError(
            f"{what} {spec.name!r} has no option {unknown[0]!r}; known: {', '.join(known) or 'none'}{meant}"
        )
    if endless := [name for name, value in spec.options.items() if _is_endless(value)]:
        value = spec.options[endless[0]]
        raise ConfigError(f"{what} {spec.name!r}: {endless[0]} is {value}; give a number, a large one in place of inf")
    truths = {name: value for name, value in spec.options.items() if isinstance(value, bool)}
    if odd := _odd_kind(truths, known):  # Python counts with true as with 1
        raise ConfigError(f"{what} {spec.name!r}: {odd}; correct its options")
    try:
        return builder(**spec.options)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: torch, of a layer of impossible size
        odd = _odd_kind(spec.options, known) if isinstance(error, TypeError) else ""
        problem = odd or str(error).partition("\n")[0]  # behind it torch may show its stack
        raise ConfigError(f"{what} {spec.name!r}: {problem}; correct its options") from error


def _declared(builder: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


_declared_once = lru_cache(maxsize=256)(_declared)
"""Of what is registered: a replay builds the same few for every device."""


def _odd_kind(options: Mapping[str, object], known: Mapping[str, inspect.Parameter]) -> str:
    """Return which option is of another kind than its builder declares; empty where none is."""
    for name, value in options.items():
        declared = getattr(known.get(name), "annotation", "")
        kinds, words = _KINDS.get(getattr(declared, "__name__", str(declared)), _ANY)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            return f"{name} is {value!r}; give {words}"
    return ""


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_allowed: set[str] = set()
"""Of this process, as `torch.set_num_threads` is."""


def require_entries(entries: Iterable[str]) -> None:
    """Refuse what is no entry of an allow-list.

    Raises:
        ValueError: An entry is neither `module:function` nor `module:*`.
    """
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise ValueError(f"models: {entry[:60]!r} is neither module:function nor module:*")


def allow(entries: Iterable[str]) -> None:
    """Have this process import these and no others; its composition root says so, once.

    Args:
        entries: `module:function`, or `module:*` for every function that is defined in that very module.

    Raises:
        ConfigError: One is neither.
    """
    entries = set(entries)
    try:
        require_entries(entries)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _allowed.clear()
    _allowed.update(entries)


def allowed_entries() -> list[str]:
    """Return what this process may import, in order."""
    return sorted(_allowed)


def is_custom(name: str) -> bool:
    """Tell whether a name stands for a user's own builder, not for a registered one."""
    return ":" in name


def import_builder(name: str) -> Callable[..., Any]:
    """Import the builder that `module:function` names, from the Python path.

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
        found = getattr(importlib.import_module(module_name), function, None)
    except FAULTS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {name!r}: {problem}; correct the module, or PYTHONPATH of this process") from error
    if not callable(found):
        raise ConfigError(f"model {name!r}: {module_name} has no function {function!r}; correct the name")
    if not by_name and getattr(found, "__module__", None) != module_name:
        raise ConfigError(f"model {name!r}: {function} is not defined in {module_name} itself; list it by its name")
    return found  # type: ignore[no-any-return]  # `callable` told
