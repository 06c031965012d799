"""The libraries of the agent's package on each Python from 3.10 to 3.14 that this machine has; those that it lacks are
listed as skipped. `make pythons` trains on each of them too.

One folder of libraries serves all of them, as in the package; neither torch nor NumPy is there.
"""

from __future__ import annotations

import asyncio
import platform
import subprocess  # noqa: TID251 - other interpreters run
import sys
from asyncio.subprocess import PIPE
from importlib import import_module
from pathlib import Path

import pytest

from edge_server.fleet.broker import running
from edge_server.fleet.view import watch_site
from shared.transport.base import Broker
from tests.device_agent.agent_side import until
from tests.machine import find_pythons

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
HEAVY = {"PIL", "cvxpy", "httptools", "numpy", "onnxruntime", "safetensors", "sklearn", "torch"}
IMPORTS = """
import importlib, pkgutil, sys
count = 0
for name in ("shared", "device_agent"):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
            count += 1
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in sys.argv[1:]:
                raise
print(count)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Return the folder of a version of the agent's package, filled as `make deb` does."""
    sys.path.insert(0, str(ROOT / "deploy" / "debian"))
    try:
        build = import_module("build")
    finally:
        sys.path.remove(str(ROOT / "deploy" / "debian"))
    folder = tmp_path_factory.mktemp("package")
    try:
        wheel = build.make_wheel(folder, "1.0")
        target = build.Target(ARCHES[platform.machine()], "1.0", 0)
        build.fill(build.make_environment(folder / "1.0", build.AGENT), build.AGENT, target, wheel)
    except SystemExit as error:
        pytest.skip(f"the package's wheels cannot be fetched: {str(error)[:200]}")
    return folder / "1.0"


@pytest.fixture
def python(library, tmp_path, request) -> Path:
    """Return an interpreter that finds the package's libraries, as it would where it is the system's Python."""
    found = next(iter(find_pythons(request.param)), None)
    if found is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").symlink_to(library / "lib")
    (tmp_path / "bin/python3").symlink_to(found)
    compiled = [found, "-I", "-m", "compileall", "-qq", library / "lib/common"]  # as the package's postinst does
    subprocess.run(compiled, check=True)  # noqa: S603 - a Python of this machine
    (tmp_path / "pyvenv.cfg").write_text(f"home = {found.parent}\ninclude-system-site-packages = false\n")
    return tmp_path / "bin/python3"


@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_everything_is_imported(python):
    command = [python, "-I", "-c", IMPORTS, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a Python of this machine
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 200


@pytest.mark.broker
@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_an_agent_connects(python, tmp_path):
    """It needs neither torch nor NumPy. Its memory depends on the machine: the benchmark `idle` measures it."""

    async def story() -> None:
        async with running(tmp_path) as broker, watch_site(Broker(port=broker.port), "lab") as look:
            config = tmp_path / "agent.toml"
            config.write_text(
                f'device = "pi"\nsite = "lab"\nstate_dir = "{tmp_path / "state"}"\n[broker]\nport = {broker.port}\n'
                f'[data]\nsource = "folder"\npath = "{tmp_path}"\n'
            )
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-I", "-m", "device_agent", "run", "--config", str(config)), stderr=PIPE
            )
            try:
                await until(lambda: "pi" in look.fleet.online or process.returncode is not None)
                assert process.returncode is None, (await process.communicate())[1].decode()
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.communicate()

    asyncio.run(story())
