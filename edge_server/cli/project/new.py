"""Write the working folder of a new project: plan, network, data source, test, README."""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from string import Template

from shared.errors import ConfigError
from shared.projects.names import require_project_name

ROWS, SEED = 900, 1
HEADER = "temperature,humidity,pressure,gas"
TEMPLATES: Mapping[str, str] = {
    "plan.toml": "plan.toml",
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    "$name/__init__.py": "package.py",
    "$name/network.py": "network.py",
    "$name/data.py": "data.py",
    "tests/test_$name.py": "test.py",
}
"""Template by path of the written file."""
KIND_VALUES: Mapping[str, Mapping[str, str]] = {
    "classification": {
        "task": "",
        "targets": "",
        "target": "state",
        "outputs": "3",
        "meaning": "one number for each of three states of the air",
        "convert": "table[:, -1].astype(np.int64)",
        "shape": "(count,)",
    },
    "regression": {
        "task": '\n[task]\nkind = "regression"\n',
        "targets": '\ntargets = "values"',
        "target": "quality",
        "outputs": "1",
        "meaning": "one number: the quality of the air",
        "convert": "table[:, -1:].astype(np.float32)",
        "shape": "(count, 1)",
    },
}
"""What the templates of a kind differ in."""


def write_project(parent: Path, name: str, kind: str) -> Path:
    """Write a working folder below `parent`; return its path.

    Args:
        kind: A key of `KIND_VALUES`.

    Raises:
        ConfigError: The name is not suitable, or the folder exists.
    """
    try:
        require_project_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name or folder")
    if importlib.util.find_spec(name):
        raise ConfigError(f"{name!r} is the name of an installed module; choose another")
    values = {"name": name, **KIND_VALUES[kind]}
    for path, template in TEMPLATES.items():
        target = folder / Template(path).substitute(values)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_read_template(template).substitute(values))
    (folder / "data").mkdir()
    (folder / "data" / "measurements.csv").write_text("\n".join(_example_rows(kind)) + "\n")
    return folder


def _read_template(name: str) -> Template:
    return Template(importlib.resources.files(__package__).joinpath("templates", f"{name}.template").read_text())


def _example_rows(kind: str) -> Iterator[str]:
    """Yield a table of invented measurements, the same on every machine."""
    random = Random(SEED)  # noqa: S311 - examples, not secrets
    target: Callable[[float], str] = (lambda quality: f"{quality:.3f}") if kind == "regression" else _state
    yield f"{HEADER},{KIND_VALUES[kind]['target']}"
    for _ in range(ROWS):
        temperature, humidity = random.uniform(-5, 35), random.uniform(20, 95)
        pressure, gas = random.gauss(1013, 8), random.uniform(0, 1)
        quality = 2 * gas + 0.02 * (humidity - 50) - 0.03 * (temperature - 20) + random.gauss(0, 0.1)
        yield f"{temperature:.1f},{humidity:.1f},{pressure:.1f},{gas:.3f},{target(quality)}"


def _state(quality: float) -> str:
    return str(int(quality > 0.7) + int(quality > 1.6))  # noqa: PLR2004 - thirds of the examples
