"""Delay loading a module that a third-party library imports and hardly ever uses."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Unloaded(ModuleType):
    """Stands for a module until something of it is used; `importlib.util.LazyLoader` loads it when it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def load_when_used(name: str) -> None:
    """Have an import of a module bind it, and its code run when something of it is used.

    Args:
        name: Of the module, with its package's, which is imported.
    """
    if name in sys.modules:
        return
    package, _, own = name.rpartition(".")
    module = sys.modules[name] = _Unloaded(name)
    module.__spec__ = ModuleSpec(name, None)
    if package:
        setattr(import_module(package), own, module)
