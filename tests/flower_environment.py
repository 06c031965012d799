"""Python environment with Flower, on top of this one, since Flower excludes some versions of other extras."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - creates an environment
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "flower-app"
CONSTRAINTS = ROOT / "constraints-flower.txt"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / "ready"
APP = ROOT / "tests" / "flower_quickstart"


def install() -> Path:
    """Create the environment, unless it exists with the same versions; return its interpreter.

    Its own packages come first, then those of the running environment, so torch is not installed twice.

    Raises:
        subprocess.CalledProcessError: A package cannot be installed.
    """
    if READY.exists() and READY.read_bytes() == CONSTRAINTS.read_bytes():
        return PYTHON
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)  # noqa: S603 - ours
    site = FOLDER / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "zz_parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", "-r", str(CONSTRAINTS)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # noqa: S603 - as above
    READY.write_bytes(CONSTRAINTS.read_bytes())
    return PYTHON


def environment(*folders: Path) -> Mapping[str, str]:
    """Return the environment variables of commands there: the repository and some folders can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))}
