"""The wheels that `make arm` fetches: without one that the agent needs, its board cannot be made."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent


def test_there_is_a_wheel_for_all_that_the_agent_is_installed_with() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(word) for word in (*project["dependencies"], *project["optional-dependencies"]["device"])]
    wanted = [one for one in wanted if not one.marker or one.marker.evaluate({"python_version": "3.11"})]
    lines = (HERE / "wheels.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    lacking = [str(one) for one in wanted if not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"))]
    assert len(wanted) > 9
    assert not lacking, f"tests/arm/wheels.txt pins no version that will do of {', '.join(lacking)}"
