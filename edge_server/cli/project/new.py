"""Write the working folder of a new project: plan, network, data source, test, README."""

from __future__ import annotations

import importlib.resources
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from string import Template

import msgspec

from shared.errors import ConfigError
from shared.projects.names import require_project_name

ROWS, SEED = 900, 1
DAY, SIDE = 24, 8
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
CUSTOM_TEMPLATES = {"$name/losses.py": "losses.py"}


def write_project(parent: Path, name: str, kind: str) -> Path:
    """Write a working folder below `parent`; return its path.

    Args:
        kind: Kind of task, a table of `templates/kinds.toml`.

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
    kinds = msgspec.toml.decode(_read_resource("kinds.toml"), type=dict[str, dict[str, str]])
    differences = kinds["default"] | kinds[kind]
    values = {"name": name, **{key: Template(text).substitute(name=name) for key, text in differences.items()}}
    for path, template in {**TEMPLATES, **(CUSTOM_TEMPLATES if kind == "custom" else {})}.items():
        target = folder / Template(path).substitute(values)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(_read_resource(f"{template}.template")).substitute(values))
    (folder / "data").mkdir()
    lines = [values["header"], *(_pictures() if kind == "segmentation" else _measurements(kind))]
    (folder / "data" / "measurements.csv").write_text("\n".join(lines) + "\n")
    return folder


def _read_resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("templates", name).read_text()


def _measurements(kind: str) -> Iterator[str]:
    """Yield invented measurements with their targets, the same on every machine."""
    random = Random(SEED)  # noqa: S311 - examples, not secrets
    for number in range(ROWS):
        temperature, humidity = random.uniform(-5, 35), random.uniform(20, 95)
        pressure, gas = random.gauss(1013, 8), random.uniform(0, 1)
        if kind == "forecast":  # daily cycles
            phase = 2 * math.pi * number / DAY
            temperature, humidity = 15 + 12 * math.sin(phase), 57 - 20 * math.sin(phase - 1)
            gas = 0.5 + 0.3 * math.sin(2 * phase) + random.gauss(0, 0.03)
        is_fault = kind == "anomaly" and random.random() < 0.1  # noqa: PLR2004 - a tenth
        gas += 2 * is_fault
        quality = 2 * gas + 0.02 * (humidity - 50) - 0.03 * (temperature - 20) + random.gauss(0, 0.1)
        targets = {
            "classification": int(quality > 0.7) + int(quality > 1.6),  # noqa: PLR2004 - thirds of the examples
            "multilabel": f"{int(gas > 0.6)},{int(humidity > 70)}",  # noqa: PLR2004 - about a third each
            "anomaly": int(is_fault),
        }
        yield f"{temperature:.1f},{humidity:.1f},{pressure:.1f},{gas:.3f},{targets.get(kind, f'{quality:.3f}')}"


def _pictures() -> Iterator[str]:
    """Yield dark pictures with a bright square, and the class of each pixel."""
    random = Random(SEED)  # noqa: S311 - as above
    places = [(row, column) for row in range(SIDE) for column in range(SIDE)]
    for _ in range(ROWS // 3):
        top, left, size = random.randrange(SIDE - 3), random.randrange(SIDE - 3), random.randrange(2, 4)
        mask = [int(top <= row < top + size and left <= column < left + size) for row, column in places]
        pixels = [f"{0.2 + 0.5 * inside + random.gauss(0, 0.1):.2f}" for inside in mask]
        yield ",".join([*pixels, *map(str, mask)])
