"""A board that serves as its operator starts it: by `device-agent run`, and measured by `bench-inference`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from device_agent import __main__ as program
from device_agent.commands.bench_inference import UNMETERED
from shared.protocol.inference.release import PARAMETERS
from tests.device_agent.agent_side import LIMIT_S, line_with, living, stop
from tests.machine import free_port

ROOT = Path(__file__).parents[3]
CLIENT = re.compile(r"^    import json\n.*?\n    print\(classes[^\n]*\n", re.DOTALL | re.MULTILINE)


async def test_a_board_without_data_serves_and_takes_no_tasks(made, tmp_path):
    """The client of the page talks to it; killed, its process comes back; told to stop, nothing is left."""
    port = free_port()
    path = tmp_path / "agent.toml"
    path.write_text(
        f'device = "board"\nsite = "lab"\nstate_dir = "{tmp_path}/state"\n'
        f'[serve]\nreleases = ["{made["lenet"]}"]\nport = {port}\n'
    )
    [page] = CLIENT.findall((ROOT / "device_agent" / "README.md").read_text())
    client = re.sub(r"^    ", "", page, flags=re.MULTILINE)
    assert len([line for line in client.splitlines() if line.strip()]) <= 20
    client = client.replace("8471", str(port)).replace("models/digits", "models/lenet")
    assert str(port) in client

    def ask() -> int:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(client, {})  # noqa: S102 - the page's own
        return int(shown.getvalue())

    async with asyncio.timeout(LIMIT_S), living(path) as process:
        await line_with(process, "[data]")
        await line_with(process, "INFO", "lenet/1", "CPUExecutionProvider")
        first = await asyncio.to_thread(ask)
        assert 0 <= first < 10
        [child] = psutil.Process(process.pid).children()
        os.kill(child.pid, signal.SIGKILL)
        await line_with(process, "WARNING", "signal 9")
        await line_with(process, "INFO", "lenet/1", "CPUExecutionProvider")
        assert await asyncio.to_thread(ask) == first
        await stop(process)


def test_what_a_request_costs_is_told(made, copied, capsys, monkeypatch):
    """In words, and as JSON whose figures fit together; a release that is none is something to edit."""

    def told(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["device-agent", "bench-inference", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            program.main()
        return ended.value.code, *capsys.readouterr()

    quick = ("--release", made["tiny-1"], "--seconds", 0.2)
    code, out, err = told(*quick, "--clients", 2, "--batch", 3, "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["model"], found["batch"], found["clients"], found["threads"]) == ("tiny/1", 3, 2, 1)
    assert found["requests"] > 0
    assert found["provider"] == "CPUExecutionProvider"
    for some in (found["request_s"], found["runtime_s"]):
        assert 0 < some[0] <= some[1] <= some[2]
    assert (found["joules"] is None) == (found["source"] == UNMETERED)
    code, out, _ = told(*quick, "--provider", "auto")
    assert (code, "tiny/1" in out) == (0, True)
    code, _, err = told("--release", made["tiny-1"] / "nothing")
    assert (code, "edge-server release export" in err) == (2, True)
    assert told(*quick, "--clients", 0)[0] == 2
    folder = copied("tiny-1")
    (folder / PARAMETERS).write_bytes(b"")
    code, _, err = told("--release", folder, "--seconds", 0.2)
    assert (code, PARAMETERS in err) == (2, True), err
