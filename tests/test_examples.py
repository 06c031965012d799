"""The examples: every command of each README, in order, with a real broker, three agents and a model server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge_server.fleet.broker import find_mosquitto, free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "deploy" / "examples"
LIMIT_S = 400.0
FIRST = "airquality"
"""The example that every test run includes."""
COMMAND = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
ANSWERS = {
    "airquality": r"dust in the next hours: -?\d",
    "keywords": r"^(go|left|right|stop|up)$",
    "defects": r"scratch \d",
}
"""What the application of each example prints last."""


def copy_example(name: str, folder: Path) -> Path:
    """Copy an example's files, with free ports in place of its own."""
    copied = Path(shutil.copytree(EXAMPLES / name, folder / name))
    ports = {"18830": str(free_port()), "18471": str(free_port())}
    for path in [*copied.glob("*.*"), *copied.glob("boards/*.toml")]:
        text = path.read_text()
        for written, port in ports.items():
            text = text.replace(written, port)
        path.write_text(text)
    return copied


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize("name", ANSWERS)
def test_every_command_of_an_example_runs_as_printed(name: str, tmp_path: Path) -> None:
    if not find_mosquitto():
        pytest.skip("mosquitto is not installed")
    if name != FIRST and os.environ.get("EXAMPLES") != "all":
        pytest.skip("takes half a minute; `make examples` runs it")
    folder = copy_example(name, tmp_path)
    commands = COMMAND.findall((folder / "README.md").read_text())
    assert len(commands) == 12
    script = "\n".join(["set -e", "trap 'kill $(jobs -p)' EXIT", *commands])
    environment = os.environ | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/sbin", os.environ["PATH"])),
        "FIELDFLEET_DATA": str(folder),
    }
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    assert re.search(ANSWERS[name], output, re.MULTILINE), output[-2000:]
    assert (folder / "report.html").stat().st_size > 0
