"""Agent's libraries on each Python from 3.10 to 3.14 on this machine.

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

from edge_server.fleet.broker import run_private_broker
from edge_server.fleet.view import watch_site
from shared.transport.base import Broker
from tests.device_agent.agent_side import until
from tests.machine import find_pythons

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
HEAVY = {"PIL", "cvxpy", "httptools", "numpy", "onnxruntime", "safetensors", "sklearn", "torch"}
MOST_ANONYMOUS_MB, SETTLING_S = 22, 3.0
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


def anonymous_mb(pid: int) -> float:
    """Return the megabytes of a process that belong to no file, from the kernel's own sum."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024 / 1e6


@pytest.mark.broker
@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_an_agent_connects_and_keeps_little(python, tmp_path):
    """It needs neither torch nor NumPy, and while it waits it keeps at most 22 MB of its own.

    Only anonymous memory is limited here: the share of a library's pages in the PSS depends on which other processes
    have it loaded. The benchmark `idle` measures the PSS.
    """

    async def story() -> float:
        async with run_private_broker(tmp_path) as broker, watch_site(Broker(port=broker.port), "lab") as look:
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
                await asyncio.sleep(SETTLING_S)
                return anonymous_mb(process.pid)
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.communicate()

    kept = asyncio.run(story())
    print(f"{python.resolve()}: {kept:.1f} MB anonymous")  # noqa: T201 - -s shows it
    assert 0 < kept <= MOST_ANONYMOUS_MB
