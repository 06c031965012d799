"""The Python of child processes that load PyTorch or ONNX Runtime.

It need not be the agent's own: a vendor may build PyTorch for only one Python version of a system, such as NVIDIA for
JetPack 6 and its Python 3.10. The agent never loads these libraries; it talks with the processes through pipes.
`device-agent setup` records which Python it installed libraries for, and `[trainer] python` selects another one.
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
from shared.runtime.extras import is_packaged, setup_pth_path

NOTE = ".python"
"""File beside the libraries installed by `setup`: the interpreter that they are for."""
OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and its module search path.

    Attributes:
        folders: PYTHONPATH with our modules and the libraries of `setup`; empty for the agent's own interpreter.
    """

    python: str = sys.executable
    folders: Sequence[str] = ()

    def command(self, module: str, *arguments: str) -> list[str]:
        """Return the command that runs one of our modules."""
        return [self.python, "-m", module, *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables for it.

        Args:
            more: Defaults for variables that this process's environment lacks.
        """
        variables = {**(more or {}), **os.environ}
        return {**variables, "PYTHONPATH": os.pathsep.join(self.folders)} if self.folders else variables


def find_interpreter(python: str = "") -> Interpreter:
    """Select the interpreter: the configured one, else that of `setup`'s libraries, else this process's own.

    Args:
        python: Configured path or name; empty for none.

    Raises:
        ConfigError: It does not exist.
    """
    if python:
        executable = shutil.which(python)
        if executable is None:
            raise ConfigError(f"trainer.python: {python}: no such program; name a Python of 3.10 to 3.14 with PyTorch")
        return _foreign_interpreter(executable)
    noted = noted_interpreter()
    if not noted or Path(noted).name == OWN:
        return Interpreter()
    if shutil.which(noted) is None:
        cause = f"this system's Python is {OWN[6:]} now, and `device-agent setup` brought libraries for {noted}"
        raise ConfigError(f"{cause}; run `sudo device-agent setup train` (or infer) again, everything else stays")
    return _foreign_interpreter(noted)


def noted_interpreter() -> str:
    """Return the interpreter that `setup` installed libraries for; empty without such a note."""
    if not is_packaged():
        return ""
    try:
        noted = (_extras() / NOTE).read_text().strip()
    except OSError:
        return ""
    return noted if re.fullmatch(r"/[\w./-]+/python3\.\d+", noted, re.ASCII) else ""


def _extras() -> Path:
    return Path(setup_pth_path().read_text().strip())


def _foreign_interpreter(python: str) -> Interpreter:
    """Describe another interpreter, with our modules on its path: from a clone, or from a package's folder."""
    if Path(python).samefile(sys.executable) and sys.prefix == sys.base_prefix:
        return Interpreter()
    root = Path(__file__).parents[2]
    if is_packaged():
        return Interpreter(python, (str(root), str(_extras())))
    return Interpreter(python, () if root.name in ("site-packages", "dist-packages") else (str(root),))
