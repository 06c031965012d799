"""Python environment with Flower, on top of this one, since Flower excludes some versions of other extras."""

from __future__ import annotations

import os
import string
import subprocess  # noqa: TID251 - creates an environment
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "flower-app"
CONSTRAINTS = ROOT / "constraints-flower.txt"
PYTHON = FOLDER / "bin" / "python"
READY = FOLDER / "ready"
APP = ROOT / "tests" / "flower_quickstart"
OFFLINE = APP / "offline"
TEMPLATES = "flwr==1.24.0"
"""Newest version of Flower whose wheel contains the apps that `flwr new` writes; later ones download them."""


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


def write_own_quickstart(kind: str, folder: Path) -> Path:
    """Write Flower's own quickstart of one kind, unchanged, as its `flwr new` does; return the app's folder.

    Raises:
        subprocess.CalledProcessError: The wheel with the templates cannot be fetched.
    """
    wheels = ROOT / "build" / "flower-templates"
    if not list(wheels.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        subprocess.run([*pip, "-d", str(wheels), TEMPLATES], check=True)  # noqa: S603 - ours
    app, package = folder / f"quickstart-{kind}", f"quickstart_{kind}"
    names = dict.fromkeys(("project_name", "package_name", "import_name", "username", "framework_str"), package)
    files = {"pyproject.toml": f"pyproject.{kind}.toml", f"{package}/__init__.py": "code/__init__.py"}
    files |= {f"{package}/{part}_app.py": f"code/{part}.{kind}.py" for part in ("client", "server")}
    files[f"{package}/task.py"] = f"code/task.{kind}.py"
    (app / package).mkdir(parents=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        for path, template in files.items():
            text = wheel.read(f"flwr/cli/new/templates/app/{template}.tpl").decode()
            (app / path).write_text(string.Template(text).safe_substitute(names))
    return app


def environment(*folders: Path) -> Mapping[str, str]:
    """Return the environment variables of commands there: the repository and some folders can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))}
