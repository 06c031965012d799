"""Imports and one trained round on every supported Python that this machine has: `python -m tests.install.pythons`.

Each interpreter gets an environment of its own below `build/pythons`, with the versions of constraints.txt. There every
module is imported, and a live trial of one round is run with four agents, their trainers and a broker as processes.
The server needs Python 3.11: on 3.10 the agent's modules are imported, and agents train three rounds of three methods
for a server of the interpreter that runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.compat.plans import FEDSPU
from tests.compat.sides import Side, Site, after, mosquitto
from tests.compat.test_mixed import ROUNDS, SHORT, short
from tests.machine import find_pythons

ROOT = Path(__file__).parents[2]
AGENT_ALONE = "3.10"
VERSIONS = (AGENT_ALONE, "3.11", "3.12", "3.13", "3.14")
BUILD = ROOT / "build" / "pythons"
EXTRAS = "device,server,demo,images"
PACKAGES = ("shared", "device_agent", "edge_server")
LIMIT_S = 900.0
IMPORTS = """
import importlib, pkgutil, sys
count = 0
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith(("__main__", ".ray_cluster")):
            importlib.import_module(found.name)
            count += 1
print(count, "modules")
"""


def interpreters() -> Iterator[tuple[str, str]]:
    """Yield version and path of each supported interpreter of this machine."""
    for version in VERSIONS:
        yield from ((version, str(path)) for path in find_pythons(version))


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command; return the end of what it printed.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "PYENV"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout.strip()


def made_environment(python: str) -> Path:
    """Return the interpreter of an environment with everything installed, made where it is not there."""
    exact = run(python, "-c", "import platform; print(platform.python_version())")
    place = BUILD / exact
    own = place / "bin" / "python"
    alone = exact.startswith(f"{AGENT_ALONE}.")
    pins = ROOT / (f"constraints-{AGENT_ALONE}.txt" if alone else "constraints.txt")
    extras = EXTRAS.replace("server,", "") if alone else EXTRAS
    torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    if not own.exists():
        run(python, "-m", "venv", place)
    pip = (own, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    index = os.environ.get("FIELDFLEET_TORCH_INDEX")
    run(*pip, "--no-deps", *(("--index-url", index) if index else ()), torch)
    run(*pip, "-c", pins, "-e", f"{ROOT}[{extras}]")
    return own


def tried(python: Path) -> str:
    """Return what was seen with an environment's interpreter: modules imported, and a trained round."""
    modules = run(python, "-c", IMPORTS, *PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.toml"
        text = (ROOT / "deploy" / "plans" / "demo.toml").read_text()
        plan.write_text("\n".join("rounds = 1" if line.startswith("rounds") else line for line in text.splitlines()))
        command = (python, "-m", "edge_server", "trial", "run", plan, "--local", "4", "--data-dir", f"{folder}/runs")
        ended = run(*command).splitlines()
    result = next((line for line in ended if line.startswith("finished")), "no result")
    return f"{modules}; {result}"


def tried_agent(python: Path) -> str:
    """Return what was seen of the agent with an environment's interpreter: modules imported, and trained rounds."""
    modules = run(python, "-c", IMPORTS, *(name for name in PACKAGES if name != "edge_server"))
    with tempfile.TemporaryDirectory() as text, mosquitto(Path(text)) as port:
        site = Site(Path(text), port, devices=FEDSPU.devices, data=FEDSPU.data, partition=FEDSPU.partition)
        try:
            site.start_agents(Side(AGENT_ALONE, python, ROOT))
            for name in SHORT:
                [shown] = after().commands(["show", site.serve(after(), short(name), name), "--format", "json"])
                outcomes = [(one["outcome"], one["arrived"]) for one in json.loads(shown)["rounds"]]
                if outcomes != [("aggregated", list(site.devices))] * ROUNDS:
                    raise subprocess.SubprocessError(f"{name}: {outcomes}")
        finally:
            site.close()
    return f"{modules}; {ROUNDS} rounds each of {', '.join(SHORT)}, every update of {len(site.devices)} agents"


def main() -> int:
    """Try every interpreter; return 1 where one fails."""
    failed, seen = 0, set[str]()
    for version, python in interpreters():
        seen.add(version)
        began = time.monotonic()
        try:
            told = (tried_agent if version == AGENT_ALONE else tried)(made_environment(python))
        except (subprocess.SubprocessError, OSError, AssertionError) as error:
            failed += 1
            told = f"FAILED: {error}\n{getattr(error, 'stderr', '') or ''}"
        sys.stdout.write(f"{python}: {told} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    if missing := sorted(set(VERSIONS) - seen):
        sys.stdout.write(f"not on this machine: {', '.join(missing)}\n")
    return 1 if failed or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
