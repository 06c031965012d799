"""A network of the user's own in the trainer's real process: only one that the device's file allows."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from device_agent.config import load
from device_agent.exchange.outbox import Outbox
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.errors import ConfigError, TaskFailed
from shared.protocol.messages import Spec
from tests.device_agent.agent_side import Host
from tests.naming import naming

SOURCE = """
from torch import nn
from shared.models.base import Model


def net() -> Model:
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), {1: 3})


other = net


def raising() -> Model:
    return {}["no such layer"]


class Moody(nn.Module):
    def forward(self, inputs):
        return inputs.no_such_thing


def moody() -> Model:
    return Model(nn.Sequential(*net().layers, Moody()))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("1", nn.Linear(4, 8))
        self.add_module("3", nn.Linear(8, 2))

    def forward(self, inputs):
        hidden = self.get_submodule("1")(inputs)
        return self.get_submodule("3")(hidden.relu() if hidden.sum() < 1e9 else hidden)


class Wide(Plain):
    def forward(self, inputs):
        return super().forward(inputs.repeat(1, 2))
"""


def test_a_task_names_it_and_the_trainer_imports_it_if_it_may(tmp_path: Path, make_task, make_job, monkeypatch) -> None:
    """The allowed one trains; another of the same module and one of the standard library cost a task, not the child."""
    (tmp_path / "boardnets.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    shell = Spec(name="os:system", options={"command": f"touch {tmp_path}/ran"})
    with asyncio.Runner() as runner:
        trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1, plugins=["boardnets:net"]))
        host = Host(runner, trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)
        try:
            host.do(host.train(make_task(round=1, model=Spec(name="boardnets:net"))))
            pid = host.pid
            for number, model in enumerate((Spec(name="boardnets:other"), shell), 2):
                with pytest.raises(TaskFailed, match=naming(repr(model.name), "plugins")):
                    host.do(host.train(make_task(round=number, model=model)))
            assert host.pid == pid
            assert host.rounds == [1]
        finally:
            runner.run(trainer.close())
    assert not (tmp_path / "ran").exists()


def test_one_that_fails_costs_its_task_and_not_the_trainer(tmp_path: Path, make_task, make_job, monkeypatch) -> None:
    """Whatever its builder or its layers raise."""
    (tmp_path / "badnets.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    with asyncio.Runner() as runner:
        trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1, plugins=["badnets:*"]))
        host = Host(runner, trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)
        try:
            host.do(host.train(make_task(round=1)))
            pid = host.pid
            with pytest.raises(TaskFailed, match="KeyError: 'no such layer'"):
                host.do(host.train(make_task(round=2, model=Spec(name="badnets:raising"))))
            with pytest.raises(TaskFailed, match="no_such_thing"):
                host.do(host.train(make_task(round=3, model=Spec(name="badnets:moody"))))
            host.do(host.train(make_task(round=4, model=Spec(name="badnets:Plain"))))
            assert host.rounds == [1, 4]
            with pytest.raises(
                TaskFailed, match=r"layer 1, Linear, gets float32 \(N x 8\), and expects \(N x ... x 4\)"
            ):
                host.do(host.train(make_task(round=5, model=Spec(name="badnets:Wide"))))
            assert host.pid == pid
        finally:
            runner.run(trainer.close())


def test_the_devices_file_says_what_is_allowed(tmp_path: Path) -> None:
    """By default nothing; an entry that cannot be meant is refused when the file is read."""
    path = tmp_path / "agent.toml"
    text = 'device = "pi"\nsite = "lab"\nstate_dir = "state"\n[data]\nsource = "digits"\n[trainer]\n'
    path.write_text(text)
    assert load(path).trainer.models == []
    path.write_text(text + 'models = ["boardnets:*", "others.deep:net"]\n')
    assert load(path).trainer.models == ["boardnets:*", "others.deep:net"]
    path.write_text(text + 'models = ["*"]\n')
    with pytest.raises(ConfigError, match=r"'\*'"):
        load(path)
