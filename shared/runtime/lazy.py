"""Lazy loading of rarely used modules that a third-party library imports."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    """Placeholder for a module until an attribute is used; `importlib.util.LazyLoader` would load it on import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def load_lazily(name: str) -> None:
    """Replace a module by a placeholder, so that its code runs only when an attribute is used.

    Args:
        name: Full name; its package is imported.
    """
    if name in sys.modules:
        return
    package, _, attribute = name.rpartition(".")
    module = sys.modules[name] = _LazyModule(name)
    module.__spec__ = ModuleSpec(name, None)
    if package:
        setattr(import_module(package), attribute, module)
