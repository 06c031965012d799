"""Install commands for optional parts (extras) of the distribution, fitting this installation.

The distribution is on no package index: a clone installs itself, and a Debian package has its `setup` commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXTRAS: Mapping[str, Sequence[str]] = {
    "server": ("amqtt", "cvxpy", "jinja2", "numpy", "rich", "safetensors", "segno", "torch"),
    "release": ("onnx", "onnxruntime"),
    "device": ("httptools", "numpy", "onnxruntime", "safetensors", "torch"),
    "infer": ("httptools", "numpy", "onnxruntime", "safetensors"),
    "images": ("PIL",),
    "audio": ("soundfile",),
    "parquet": ("pyarrow",),
    "demo": ("sklearn",),
    "ray": ("ray",),
    "flower": ("flwr",),
}
"""Top-level modules of each extra, see `pyproject.toml`."""

SETUP_COMMANDS: Mapping[str, str] = {
    "server": "sudo edge-server setup",
    "release": "sudo edge-server setup",
    "device": "sudo device-agent setup train",
    "infer": "sudo device-agent setup infer",
    "images": "sudo device-agent setup train",
    "audio": "sudo device-agent setup train",
    "parquet": "sudo device-agent setup train",
}
"""Commands of the Debian packages that install an extra; for other extras there is no command."""

CONFIG_FOLDER = Path("/etc/fieldfleet")
PTH = "_setup.pth"
"""File in a Debian package's Python that names the folder of `setup`."""


def setup_pth_path() -> Path:
    """Return the path that this Python's `_setup.pth` has in a Debian package of ours.

    `sysconfig` knows the folder, too, but would take 0.4 MB in an idle agent.
    """
    major, minor = sys.version_info[:2]
    return Path(sys.prefix, "lib", f"python{major}.{minor}", "site-packages", PTH)


def is_packaged() -> bool:
    """Check whether this is the Python of a Debian package of ours."""
    return setup_pth_path().is_file()


def find_packaged_config(name: str) -> Path | None:
    """Return the service's configuration in a Debian package, such as `agent.toml`; None if there is none."""
    path = CONFIG_FOLDER / name
    return path if is_packaged() and os.path.lexists(path) else None


def find_readable_config(name: str) -> Path | None:
    """Return the same file for a command that can do without it; None if this user may not read it."""
    path = find_packaged_config(name)
    return path if path and os.access(path, os.R_OK) else None


def install_command(extra: str) -> str:
    """Return the command that installs an extra here, ready to copy from a message."""
    if is_packaged() and extra in SETUP_COMMANDS:
        return f"`{SETUP_COMMANDS[extra]}`"
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return f"`{sys.executable} -m pip install -e '{root}[{extra}]'`"
    return f"`pip install '.[{extra}]'` in a clone of fieldfleet"
