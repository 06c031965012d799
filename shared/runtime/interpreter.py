"""The Python of child processes that load PyTorch or ONNX Runtime.

It need not be the agent's own: a vendor may build PyTorch for one Python of a system alone, such as NVIDIA for JetPack
6 and its Python 3.10. The agent never loads these libraries; it talks with those processes through pipes. `device-agent
setup` notes which Python it installed libraries for, and `[trainer] python` names another one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.runtime.extras import is_packaged, pth_path

NOTE = ".python"
"""File beside the libraries that `setup` brought: the interpreter that they are for."""
OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter.

    Attributes:
        folders: Where it finds our modules and what `setup` brought; empty for the agent's own, which knows.
    """

    python: str = sys.executable
    folders: Sequence[str] = ()

    def command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of ours."""
        return [self.python, "-m", module, *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for it.

        Args:
            more: Variables for where the environment has none of that name.
        """
        found = {**(more or {}), **os.environ}
        return {**found, "PYTHONPATH": os.pathsep.join(self.folders)} if self.folders else found


def find_interpreter(python: str = "") -> Interpreter:
    """Return the interpreter that is named, or that `setup` brought libraries for, or else this process's own.

    Args:
        python: Its path or name; empty where none is named.

    Raises:
        ConfigError: It is not there.
    """
    if python:
        found = shutil.which(python)
        if found is None:
            raise ConfigError(f"trainer.python: {python}: no such program; name a Python of 3.10 to 3.14 with PyTorch")
        return _other(found)
    noted = noted_interpreter()
    if not noted or Path(noted).name == OWN:
        return Interpreter()
    if shutil.which(noted) is None:
        told = f"this system's Python is {OWN[6:]} now, and `device-agent setup` brought libraries for {noted}"
        raise ConfigError(f"{told}; run `sudo device-agent setup train` (or infer) again, everything else stays")
    return _other(noted)


def noted_interpreter() -> str:
    """Return the interpreter that `setup` brought libraries for; empty where there is no note of it."""
    if not is_packaged():
        return ""
    try:
        found = (_extras() / NOTE).read_text().strip()
    except OSError:
        return ""
    return found if re.fullmatch(r"/[\w./-]+/python3\.\d+", found, re.ASCII) else ""


def _extras() -> Path:
    return Path(pth_path().read_text().strip())


def _other(python: str) -> Interpreter:
    """Return another interpreter, which is told where our modules are: in a clone, or in a package's folder."""
    if Path(python).samefile(sys.executable) and sys.prefix == sys.base_prefix:
        return Interpreter()
    root = Path(__file__).parents[2]
    if is_packaged():
        return Interpreter(python, (str(root), str(_extras())))
    return Interpreter(python, () if root.name in ("site-packages", "dist-packages") else (str(root),))
