"""Versions and digests of plugins; refusal of a device with other code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.protocol.messages import PluginVersion
from shared.registry import Plugin, Registry, find, locate, normalise_distribution, project_version

SHOWN_DIGITS = 12
"""Digits of a digest in messages."""
SKIPPED = "__pycache__"


def identify(uses: Iterable[tuple[Registry[Any], str]]) -> tuple[PluginVersion, ...]:
    """Return the identity of each plugin among the used names, which are imported; built-in names have none.

    Raises:
        ConfigError: A plugin is unknown, not allowed in this process, or cannot be imported.
    """
    registries = {(registry.kind, name): registry for registry, name in uses if name not in registry}
    return tuple(_identify(registry, name) for (_, name), registry in registries.items())


def _identify(registry: Registry[Any], name: str) -> PluginVersion:
    find(registry, name, registry.kind)
    plugin = locate(registry, name)
    assert plugin
    return describe(plugin, registry.kind, name)


def describe(plugin: Plugin, kind: str, name: str) -> PluginVersion:
    """Return a plugin's identity, without importing it; the digest is empty if its source files are missing."""
    distribution, version = (
        (plugin.distribution, plugin.version) if plugin.distribution else owning_distribution(plugin.module)
    )
    return PluginVersion(
        kind=kind, name=name, distribution=distribution, version=version, digest=source_digest(plugin.module)
    )


def require_same(expected: Sequence[PluginVersion], registries: Iterable[Registry[Any]], device: str) -> None:
    """Refuse a task if this device's code of one of its plugins differs from the server's.

    Raises:
        ConfigError: It differs, or this device does not have or allow the plugin; the message names both.
    """
    by_kind = {registry.kind: registry for registry in registries}
    for plugin in expected:
        if registry := by_kind.get(plugin.kind):
            for present in identify([(registry, plugin.name)]):
                if present.digest != plugin.digest:
                    is_edited = plugin.version and present.version == plugin.version
                    remedy = (
                        "raise its version, and publish or install that" if is_edited else "install the same version"
                    )
                    raise ConfigError(
                        f"device {device}: {plugin.kind} {plugin.name!r} is {_format(present)} here, but "
                        f"{_format(plugin)} on the server; {remedy} on both"
                    )


def _format(plugin: PluginVersion) -> str:
    version = f"{plugin.distribution} {plugin.version} ".lstrip() if plugin.distribution else ""
    return f"{version or 'code without a version '}(digest {plugin.digest[:SHOWN_DIGITS] or 'unknown'})"


@lru_cache(maxsize=64)
def source_digest(module: str) -> str:
    """Return the SHA-256 of the source files of a module's top-level package, hexadecimal; empty if there are none.

    Cached, since the process has imported the files as they were: later changes take effect in the next one.
    """
    files = list(_source_files(module))
    return _digest_files(files) if files else ""


def folder_digest(package: Path) -> str:
    """Return the digest of a package's folder, as of `source_digest` once it is installed."""
    return _digest_files(_package_files(package))


def _digest_files(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _package_files(package: Path) -> list[tuple[str, Path]]:
    files = [file for file in package.rglob("*.py") if SKIPPED not in file.parts]
    return sorted((file.relative_to(package).as_posix(), file) for file in files)


def _source_files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield relative names and paths of a module's package, or of the module itself, sorted by name."""
    path: Sequence[str] = sys.path
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return
        if spec.origin is None and spec.submodule_search_locations:  # a namespace, shared by several distributions
            path = list(spec.submodule_search_locations)
            continue
        if spec.origin is None:
            return
        origin = Path(spec.origin)
        if not spec.submodule_search_locations:
            yield origin.name, origin
            return
        yield from _package_files(origin.parent)
        return


@lru_cache(maxsize=64)
def owning_distribution(module: str) -> tuple[str, str]:
    """Return name and version of the distribution or project that a module belongs to; empty if there is none."""
    package = module.partition(".")[0]
    if version := project_version(package):
        return package, version
    from importlib import metadata  # noqa: PLC0415 - two megabytes, which only plugins need

    names = metadata.packages_distributions().get(package, [])
    return (normalise_distribution(names[0]), metadata.version(names[0])) if names else ("", "")
