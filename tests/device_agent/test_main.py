"""The agent as a process: what an operator and a supervisor see of it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from device_agent.__main__ import main
from edge_server.fleet.broker import run_private_broker
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Assignment, Hyper, Status, Task, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.transfer import frames
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport
from tests.device_agent.agent_side import DEVICE, LIMIT_S, SITE, line_with, living, stop, until, write_config
from tests.machine import free_port
from tests.naming import names_all

ENDLESS = Assignment(seed=1, hyper=Hyper(local_epochs=1_000_000_000, batch_size=8, learning_rate=0.001))
QUICK_S = 60.0
"""In which a process told to stop must have stopped."""


@asynccontextmanager
async def site(folder: Path, **config: str) -> AsyncIterator[tuple[Process, MqttTransport]]:
    """Run a broker, an agent on it, and a transport for the test."""
    async with (
        asyncio.timeout(LIMIT_S),
        run_private_broker(folder) as broker,
        living(write_config(folder, broker.port, **config)) as process,
        MqttTransport(Broker(port=broker.port), "tester").running() as transport,
    ):
        await transport.connected.wait()
        yield process, transport


async def status(inbox: Inbox) -> Status:
    return wire.decode_as(Status, (await anext(inbox))[1])


async def serve(inbox: Inbox, transport: MqttTransport, parameters: bytes, cut, task: Task) -> None:
    """Send a task's parameters as they are asked for, until all are gone."""
    lacking = set(range(task.params.blocks))
    async for _, data in inbox:
        want = wire.decode_as(Want, data)
        for index, _ in frames.pieces(want, task.params, BLOCK_BYTES):
            await transport.publish(topic(SITE, DEVICE, "model"), cut(parameters, task.params, index))
            lacking.discard(index)
        if not lacking:
            return


@pytest.mark.parametrize(("command", "part"), [("run", "agent"), ("probe", "commands.diagnosis.record_board")])
async def test_importing_a_command_loads_nothing_heavy(command: str, part: str) -> None:
    """A fresh interpreter: neither torch nor what comes with it, so that an idle agent stays small."""
    code = f"import device_agent.__main__, device_agent.commands.{command}, sys; print(' '.join(sys.modules))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    out, _ = await process.communicate()
    loaded = set(out.decode().split())
    assert f"device_agent.{part}" in loaded
    assert not {"torch", "numpy", "safetensors", "onnxruntime", "sklearn", "rich"} & loaded


async def test_without_a_broker_it_retries_says_so_once_and_stops_when_told(tmp_path) -> None:
    """Several attempts, one warning; SIGTERM ends it with 0 at once; the folder it was given is there.

    That its examples are not, which showed when the first task failed, it says before all else.
    """
    examples = f'source = "npz"\npath = "{tmp_path / "absent.npz"}"'
    port = free_port()
    refused = "WARNING", f"127.0.0.1:{port}", "Connection refused"
    async with living(write_config(tmp_path, port, examples)) as process:
        await line_with(process, "WARNING", "data.path", tmp_path / "absent.npz")
        await line_with(process, *refused)
        await asyncio.sleep(1.5)
        seconds, more = await stop(process)
        assert seconds < QUICK_S
        assert not [line for line in more if names_all(line, *refused)]
        assert "INFO" in more[-1]
        assert not [line for line in more if "Traceback" in line]
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {"outbox", "state", "session"}
    others = [path for path in (tmp_path / "state").rglob("*") if path.stat().st_mode & 0o077]
    assert others == [], "states and updates are for the agent's user alone"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("devise = 'x'\n", ["`devise`"]),
        ("device = 'board'\n[data]\nsource = 'digits'\n", ["`state_dir`"]),
        ("device = 'a/b'\nstate_dir = 's'\n[data]\nsource = 'digits'\n", ["device", "'a/b'"]),
        (
            "device = 'board'\nsite = 'lab'\nstate_dir = 'agent.toml/x'\n[data]\nsource = 'digits'\n",
            ["state_dir", "agent.toml/x"],
        ),
        ("device = \n", ["agent.toml", "line 1"]),
        (None, ["agent.toml"]),
    ],
    ids=["unknown", "missing", "name", "folder", "syntax", "absent"],
)
def test_a_bad_file_ends_it_with_2_and_a_line_for_each_fault(tmp_path, monkeypatch, capsys, text, named) -> None:
    """The first line names the program, each of them what to edit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["device-agent", "run", "--config", "agent.toml"])
    if text is not None:
        (tmp_path / "agent.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    first, *others = err.splitlines()
    assert first.startswith("device-agent: ")
    assert names_all(first, *named)
    assert all(line.startswith("agent.toml: ") for line in others)


@pytest.mark.broker
async def test_it_comes_online_soon_lives_through_nonsense_and_says_goodbye(tmp_path, make_task) -> None:
    """A birth is retained within seconds; malformed tasks are dropped; the next one is answered; the will is retained.

    The one that is answered asks for too much, which is a failure that needs no training.
    """
    began = time.monotonic()
    async with site(tmp_path) as (process, transport):
        async with transport.subscribe(topic(SITE, DEVICE, "status")) as inbox:
            birth = await status(inbox)
            assert time.monotonic() - began < 60
            assert (birth.device, birth.online, birth.session, birth.state) == (DEVICE, True, 1, "ready")
        agent = psutil.Process(process.pid)
        mapped = {Path(part.path).name for part in agent.memory_maps()}
        assert any("python" in name for name in mapped)
        assert not [name for name in mapped if "torch" in name or "numpy" in name]
        assert agent.children() == []
        async with transport.subscribe(topic(SITE, DEVICE, "update")) as inbox:
            for nonsense in (b"", b"hello", b"FM\x01\xc1", b"FM\x07\x80", bytes(1 << 21)):
                await transport.publish(topic(SITE, DEVICE, "task"), nonsense)
            huge = Transfer(digest=bytes(16), size=1 << 50, frame_bytes=1024)
            await transport.publish(topic(SITE, DEVICE, "task"), wire.encode(make_task(params=huge)))
            offer = wire.decode_as(Update, (await anext(inbox))[1])
            assert names_all(offer.failure, 1 << 50)
        seconds, said = await stop(process)
        assert seconds < QUICK_S
        *dropped, failed = [line for line in said if "WARNING" in line]
        assert (len(dropped), names_all(failed, 1 << 50)) == (5, True)
        assert not [line for line in said if "Traceback" in line]
        async with transport.subscribe(topic(SITE, DEVICE, "status")) as inbox:
            death = await status(inbox)
            assert (death.online, death.session, death.instance) == (False, 1, birth.instance)


@pytest.mark.broker
async def test_class_folders_whose_names_are_not_utf8_do_not_end_it(tmp_path, make_task, parameters, cut) -> None:
    """It comes online without class names, and a task fails with the escaped name as the cause."""
    for name in (b"cat", b"M\xfcll"):
        os.makedirs(os.fsencode(tmp_path / "set") + b"/" + name)  # noqa: PTH103 - bytes that no text stands for
    async with site(tmp_path, data=f'source = "folder"\npath = "{tmp_path}/set"') as (process, transport):
        channels = [topic(SITE, DEVICE, channel) for channel in ("want", "status", "update")]
        async with (
            transport.subscribe(channels[0]) as wants,
            transport.subscribe(channels[1]) as births,
            transport.subscribe(channels[2]) as updates,
        ):
            assert (await status(births)).classes is None
            task = make_task(run="r")
            await transport.publish(topic(SITE, DEVICE, "task"), wire.encode(task))
            await serve(wants, transport, parameters, cut, task)
            failure = wire.decode_as(Update, (await anext(updates))[1]).failure
            assert failure
            assert "'M\\udcfcll'" in failure
        _, said = await stop(process)
        assert not [line for line in said if "Traceback" in line]


@pytest.mark.broker
async def test_sessions_are_counted_and_a_killed_agent_is_reported_dead(tmp_path) -> None:
    """`kill -9`: the broker says the will; the next session's number is higher, so that a late will is told apart."""
    async with site(tmp_path) as (process, transport), transport.subscribe(topic(SITE, DEVICE, "status")) as inbox:
        assert (await status(inbox)).online
        process.kill()
        await process.communicate()
        death = await status(inbox)
        assert (death.online, death.session) == (False, 1)
        async with living(tmp_path / "agent.toml") as second:
            birth = await status(inbox)
            assert (birth.online, birth.session) == (True, 2)
            assert birth.instance != death.instance
            assert (await stop(second))[0] < QUICK_S


@pytest.mark.broker
@pytest.mark.parametrize("warm", [False, True], ids=["importing", "training"])
async def test_told_to_stop_at_work_it_stops_at_once(tmp_path, make_task, parameters, cut, examples, warm) -> None:
    """While its child imports torch, and while it trains: 0 within 2 s, no process left, and no half update either."""
    data = f'source = "csv"\npath = "{examples.path}"'
    async with site(tmp_path, data=data) as (process, transport):
        channels = [topic(SITE, DEVICE, channel) for channel in ("want", "status")]
        async with transport.subscribe(channels[0]) as wants, transport.subscribe(channels[1]) as births:
            await status(births)
            if warm:
                async with transport.subscribe(topic(SITE, DEVICE, "update")) as inbox:
                    task = make_task(run="warming")
                    await transport.publish(topic(SITE, DEVICE, "task"), wire.encode(task))
                    await serve(wants, transport, parameters, cut, task)
                    assert wire.decode_as(Update, (await anext(inbox))[1]).failure is None
            task = make_task(assignment=ENDLESS)
            await transport.publish(topic(SITE, DEVICE, "task"), wire.encode(task))
            await serve(wants, transport, parameters, cut, task)
            await until(lambda: len(psutil.Process(process.pid).children()) == 1)
            await asyncio.sleep(0.4)
            seconds, said = await stop(process)
            assert seconds < QUICK_S
            assert not [line for line in said if "Traceback" in line or "never retrieved" in line]
    assert [path.name for path in (tmp_path / "state" / "outbox").glob("[!.]*")] == ["warming@000001"] * warm
