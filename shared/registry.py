"""Registries: built-in objects by name, and plugins that the operator of this process allows.

A plugin is an entry point of an installed distribution (`fieldfleet.models` and others) or `module:attribute`. A task
from the server or a plan of a foreign trace must not choose what a process imports: importing runs code, and calling a
function of the standard library with arbitrary options is as good as a shell. So each process has an allow-list.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_ATTRIBUTE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_ENTRY = re.compile(r"\w[\w.-]*:(\w[\w.-]*|\*)")
VARIABLE, OLDER_VARIABLE = "FIELDFLEET_PLUGINS", "FIELDFLEET_MODELS"
"""Environment variables for commands without a settings file: entries separated by spaces."""
PREFIX = "fieldfleet."
"""Entry-point groups are named `fieldfleet.models`, `fieldfleet.algorithms`, and so on."""

FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)
"""Exceptions from custom code; they must not end the process."""


class Registry(dict[str, T]):
    """Built-in objects of one kind by name; `find` returns plugins too.

    Attributes:
        kind: Kind of object in the singular, such as `algorithm`.
        group: Entry-point group without its prefix, such as `algorithms`.
        product: Type of what a plugin's builder must return; None where the caller checks it.
        holds_products: Whether the entries are such objects themselves, not builders.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, T],
        *,
        product: type | None = None,
        holds_products: bool = False,
    ) -> None:
        super().__init__(built_in)
        self.kind, self.group, self.product, self.holds_products = kind, group, product, holds_products


@dataclass(frozen=True)
class Plugin:
    """Location of a plugin.

    Attributes:
        module: Name of its module.
        attribute: Its name in the module; dotted for an attribute of an attribute.
        distribution: Normalised name of the distribution whose entry point it is; empty for `module:attribute`.
        version: Version of that distribution.
    """

    module: str
    attribute: str
    distribution: str = ""
    version: str = ""


def find(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return a built-in object, or the plugin of that name.

    Args:
        what: Kind of object, for the error: algorithm, codec, model.

    Raises:
        ConfigError: The name is unknown, or its plugin is not allowed in this process or cannot be imported.
    """
    if name in registry:
        return registry[name]
    if not isinstance(registry, Registry) or not (plugin := locate(registry, name)):
        known_names = ", ".join(sorted(registry))
        raise ConfigError(f"unknown {what} {name!r}; known: {known_names}{guess(name, registry)}")
    key = registry.group, name
    if key not in _imported:
        _imported[key] = _import_allowed(registry, name, plugin, what)
    return _imported[key]  # type: ignore[no-any-return]  # checked where it is used


def build(registry: Mapping[str, Callable[..., T]], spec: Spec, what: str) -> T:
    """Build the object that a spec names, with its options.

    Args:
        what: Kind of object, for the error: algorithm, codec, model.

    Raises:
        ConfigError: As `find`; or an option is unknown, the builder refuses a value, or it is NaN or infinite, which
            the journal cannot store.
    """
    builder = find(registry, spec.name, what)
    if spec.name in registry:
        return _call(builder, _cached_parameters(builder), spec, what)
    try:
        built = _call(builder, _read_parameters(builder), spec, what)
    except FAULTS as error:
        raise ConfigError(f"{what} {spec.name!r}: {type(error).__name__}: {error}; correct its builder") from error
    product = registry.product if isinstance(registry, Registry) else None
    if product and not isinstance(built, product):
        kind = f"{product.__module__}.{product.__qualname__}"
        raise ConfigError(f"{what} {spec.name!r} returned a {type(built).__name__}, not a {kind}; correct its builder")
    return built


def _call(builder: Callable[..., T], parameters: Mapping[str, inspect.Parameter], spec: Spec, what: str) -> T:
    """Call a builder with a spec's options, once these are checked."""
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
_packages: dict[str, str] = {}
"""Packages of which every module is allowed, with their versions: those of this process's projects."""
_refused: dict[str, str] = {}
"""Packages of projects that are not used, with the reason, for errors."""
_declared: dict[str, Mapping[str, Mapping[str, str]]] = {}
"""Entry points that projects declare whose code is not installed: `module:attribute` by package, group and name."""
_imported: dict[tuple[str, str], Any] = {}
_located: dict[tuple[str, str], Plugin] = {}
"""Plugins by group and name, since the metadata of installed distributions takes milliseconds to read."""


def require_entries(entries: Iterable[str], key: str = "models") -> None:
    """Validate the syntax of allow-list entries; `key` is their setting.

    Raises:
        ValueError: An entry is none of `module:attribute`, `distribution:name`, `module:*`, `distribution:*`.
    """
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise ValueError(f"{key}: {entry[:60]!r} is neither module:attribute, distribution:name nor module:*")


def allow(entries: Iterable[str]) -> None:
    """Set this process's allow-list of plugins; called once, by its composition root.

    Args:
        entries: `module:attribute`; `distribution:name` for an entry point; or `module:*` for everything defined in
            exactly that module, and `distribution:*` for all its entry points.

    Raises:
        ConfigError: An entry is none of these.
    """
    entries = set(entries)
    try:
        require_entries(entries, "plugins")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _allowed.clear()
    _allowed.update(entries)
    _imported.clear()
    _located.clear()


def allow_package(name: str, version: str = "", entry_points: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Allow every module of a project's package, until this process ends.

    Args:
        version: Version of the project, if its code is not installed.
        entry_points: Its entry points, `module:attribute` by full group and name, likewise.
    """
    _packages[name], _declared[name] = version, entry_points or {}
    _imported.clear()
    _located.clear()


def entries_of_environment() -> list[str]:
    """Return the entries of the environment variables."""
    return [entry for name in (VARIABLE, OLDER_VARIABLE) for entry in os.environ.get(name, "").split()]


def project_version(package: str) -> str:
    """Return the version of an allowed package; empty if it is another one, or installed."""
    return _packages.get(package, "")


def refuse_package(name: str, reason: str) -> None:
    """Give the reason in the error where a project's package is not allowed."""
    _refused[name] = reason


def allowed_entries() -> list[str]:
    """Return the allow-list of this process, sorted."""
    return sorted(_allowed)


def locate(registry: Registry[Any], name: str) -> Plugin | None:
    """Locate a plugin without importing it; None if no installed distribution has this entry point.

    Raises:
        ConfigError: Several distributions have it, and not exactly one of them is allowed.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        return Plugin(module, attribute)
    key = registry.group, name
    if key in _located:
        return _located[key]
    offered = [plugin for entry, plugin in offered_plugins(registry.group) if entry == name]
    allowed = [plugin for plugin in offered if _is_listed(plugin, name)]
    if len(allowed) > 1:
        names = " and ".join(plugin.distribution for plugin in allowed)
        raise ConfigError(f"{registry.kind} {name!r} is offered by {names}; list one of them under plugins")
    if chosen := [*allowed, *offered]:
        _located[key] = chosen[0]
    return chosen[0] if chosen else None


def offered_plugins(group: str) -> Iterator[tuple[str, Plugin]]:
    """Yield names and plugins of a group's entry points: of active working folders and installed distributions."""
    from importlib import metadata  # noqa: PLC0415 - two megabytes, which only plugins need

    for package, groups in _declared.items():
        for name, value in groups.get(f"{PREFIX}{group}", {}).items():
            module, _, attribute = value.partition(":")
            yield name, Plugin(module, attribute, normalise_distribution(package), _packages[package])
    for entry in metadata.entry_points(group=f"{PREFIX}{group}"):
        assert entry.dist
        yield entry.name, Plugin(entry.module, entry.attr, normalise_distribution(entry.dist.name), entry.dist.version)


def normalise_distribution(name: str) -> str:
    """Return a distribution's name in the form of the package index: lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_allowed(plugin: Plugin, name: str) -> bool:
    """Check whether this process may import a plugin that a plan calls `name`."""
    if plugin.distribution:
        return _is_listed(plugin, name)
    is_name = _ATTRIBUTE.fullmatch(name) is not None
    return is_name and (name in _allowed or f"{plugin.module}:*" in _allowed or _is_of_project(plugin.module))


def _is_listed(plugin: Plugin, name: str) -> bool:
    """Check whether an entry point is listed, by its own name or by the attribute that it refers to."""
    if {f"{plugin.module}:{plugin.attribute}", f"{plugin.module}:*"} & _allowed or _is_of_project(plugin.module):
        return True
    listed = (entry.partition(":") for entry in _allowed)
    return any(
        normalise_distribution(owner) == plugin.distribution and item in (name, "*") for owner, _, item in listed
    )


def _is_of_project(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _packages)


def _has(package: str, plugin: Plugin) -> bool:
    """Tell if a project's package has the module of a plugin that was named without the package."""
    try:
        return importlib.util.find_spec(f"{package}.{plugin.module}") is not None
    except FAULTS:  # of the project's own `__init__.py`, which this imports
        return False


def _import_allowed(registry: Registry[T], name: str, plugin: Plugin, what: str) -> T:
    """Import a plugin.

    Raises:
        ConfigError: It is not allowed in this process, or cannot be imported.
    """
    if not is_allowed(plugin, name):
        full = f"{plugin.distribution}:{name}" if plugin.distribution else name
        reason = _refused.get(plugin.module.partition(".")[0])
        remedy = f"list it under plugins in its settings or {VARIABLE}, a project's code under projects of [trainer]"
        if within := [package for package in _packages if _has(package, plugin)]:
            remedy = f"did you mean '{within[0]}.{plugin.module}:{plugin.attribute}', of the project?"
        raise ConfigError(
            f"{what} {full[:120]!r} is not allowed in this process{f': {reason}' if reason else f'; {remedy}'}"
        )
    try:
        item: Any = importlib.import_module(plugin.module)
        for part in plugin.attribute.split("."):
            item = getattr(item, part, None)
    except FAULTS as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name and not plugin.module.startswith(error.name)
        remedy = "install it for this Python" if is_missing else "correct the module, or PYTHONPATH of this process"
        raise ConfigError(f"{what} {name!r}: {type(error).__name__}: {error}; {remedy}") from error
    is_product = registry.product is not None and isinstance(item, registry.product)
    if not (is_product if registry.holds_products else callable(item)):
        kind = registry.product.__qualname__ if registry.holds_products and registry.product else "function"
        raise ConfigError(f"{what} {name!r}: {plugin.module} has no {kind} {plugin.attribute!r}; correct the name")
    is_by_name = plugin.distribution or f"{plugin.module}:{plugin.attribute}" in _allowed or is_product
    if not is_by_name and not _is_defined_in(item, plugin.module):
        raise ConfigError(
            f"{what} {name!r}: {plugin.attribute} is not defined in {plugin.module} itself; list it by its name"
        )
    return item  # type: ignore[no-any-return]  # checked above


def _is_defined_in(item: object, module: str) -> bool:
    """Check whether a function belongs to a module, or to the same project as it."""
    defined = getattr(item, "__module__", None)
    return defined == module or (isinstance(defined, str) and _is_of_project(defined) and _is_of_project(module))
