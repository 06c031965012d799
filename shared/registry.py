"""Turn a `Spec` that a plan or a message names into the thing it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from shared.errors import ConfigError
from shared.protocol.messages import Spec

T = TypeVar("T")


def build(registry: Mapping[str, Callable[..., T]], spec: Spec, what: str) -> T:
    """Return what the spec names, built with its options.

    Args:
        registry: Builders by name.
        spec: The name and the options.
        what: What the registry holds, for the error: algorithm, codec, model.

    Raises:
        ConfigError: The name or an option is unknown, or the builder refuses a value.
    """
    builder = registry.get(spec.name)
    if builder is None:
        raise ConfigError(f"unknown {what} {spec.name!r}; known: {', '.join(sorted(registry))}")
    known = inspect.signature(builder).parameters
    unknown = sorted(set(spec.options) - set(known))
    if unknown and not any(option.kind is option.VAR_KEYWORD for option in known.values()):
        raise ConfigError(f"{what} {spec.name!r} has no option {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    try:
        return builder(**spec.options)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: torch, of a layer of impossible size
        problem = str(error).partition("\n")[0]  # behind it torch may show its stack
        raise ConfigError(f"{what} {spec.name!r}: {problem}; correct its options") from error
