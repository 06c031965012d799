"""`edge-server models`: the list, one network's cuts, and what it cannot show."""

from __future__ import annotations

import json
import sys

import pytest

from edge_server.__main__ import main
from edge_server.plan.server_config import load
from shared import registry
from shared.errors import ConfigError
from shared.models import MODELS
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import called, captured
from tests.naming import names_all, naming


@pytest.fixture
def run(monkeypatch):
    """Gives the command; returns its exit code and what it wrote."""
    monkeypatch.setenv("COLUMNS", "140")
    yield lambda *words: captured("models", *words)
    registry.allow([])


def test_the_list_has_every_network_with_its_defaults(run):
    code, out, _ = run("--format", "json")
    listed = {one["name"]: one for one in json.loads(out)}
    assert code == 0
    assert sorted(listed) == sorted(MODELS)
    assert listed["vgg19"]["cuts"] == [2, 4, 8, 12, 16]
    assert listed["vgg19"]["options"] == {"channels": 3, "width": 1.0, "norm": "batch", "classes": 10}
    code, out, _ = run()
    assert code == 0
    assert all(name in out for name in MODELS)
    assert "features=64 hidden=32 classes=10" in out


def test_one_network_is_shown_cut_by_cut(run):
    code, out, _ = run("vgg19", "--option", "width=0.25", "--option", "norm=none", "--batch", "8", "--format", "json")
    shown = json.loads(out)
    assert code == 0
    assert [cut["shape"] for cut in shown["cuts"]] == [[16, 16, 16], [32, 8, 8], [64, 4, 4], [128, 2, 2], [128, 1, 1]]
    assert shown["cuts"][1]["gradient_bytes"] == 4 * 8 * 32 * 8 * 8 + 4
    code, out, _ = run("vgg19")
    assert code == 0
    assert "128 x 8 x 8" in out
    assert [line.split()[-3] for line in out.splitlines() if line.split()[:1] in (["4"], ["8"])] == ["96.1", "228.3"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("vgg20",), ("vgg20", "vgg19")),
        (("cnn", "--option", "depth=3"), ("cnn", "depth", "side")),
        (("cnn", "--option", "side"), ("--option", "side", "KEY=VALUE")),
        (("cnn", "--option", "side=far"), ("cnn", "far")),
        (("cnn", "--example", "1", "9", "9"), ("(1, 9, 9)",)),
        (("cnn", "--batch", "0"), ("--batch",)),
        (("--example", "3"), ("--example",)),
        (("os:system",), ("os:system", registry.VARIABLE)),
    ],
)
def test_a_mistake_names_the_argument(run, words, named):
    code, out, error = run(*words)
    assert (code, out) == (2, "")
    assert names_all(error, *named)


def test_a_network_of_the_users_own(run, tmp_path, monkeypatch):
    """Allowed by the environment; it says what examples it takes, or is told."""
    builder = "def net():\n    return Model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), {1: 1})\n"
    (tmp_path / "shownnets.py").write_text(f"from torch import nn\nfrom shared.models.base import Model\n\n\n{builder}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FIELDFLEET_MODELS", "shownnets:net other:*")
    code, _, error = run("shownnets:net")
    assert code == 2
    assert names_all(error, "shownnets:net")
    assert registry.VARIABLE not in error, "it is allowed; only the shape is missing"
    code, out, _ = run("shownnets:net", "--example", "4", "--format", "json")
    assert code == 0
    assert [cut["features"] for cut in json.loads(out)["cuts"]] == [3]
    monkeypatch.setenv("FIELDFLEET_MODELS", "shownnets")
    code, _, error = run("shownnets:net")
    assert code == 2
    assert names_all(error, "shownnets", "module:attribute")


def test_a_run_imports_what_the_servers_file_allows(tmp_path, monkeypatch, capsys):
    """The command allows it before it reads the plan; a file that would allow everything is refused."""
    sections = '[algorithm]\nname = "fedavg"\n[data]\nsource = "digits"\n[model]\nname = "absent_nets:net"\n'
    (tmp_path / "plan.toml").write_text(f'name = "x"\nrounds = 1\n{sections}')
    path = tmp_path / "server.toml"
    monkeypatch.setattr(sys, "argv", ["edge-server", "run", "--config", str(path)])
    errors = []
    for line in ("", 'models = ["absent_nets:net"]\n'):
        path.write_text(f'plan = "plan.toml"\nsite = "lab"\ndata_dir = "{tmp_path}"\n{line}')
        with pytest.raises(SystemExit, match="2"):
            main()
        errors.append(capsys.readouterr().err)
    registry.allow([])
    assert names_all(errors[0], "absent_nets:net", registry.VARIABLE)
    assert names_all(errors[1], "absent_nets")
    assert registry.VARIABLE not in errors[1], "allowed, but there is no such module"
    path.write_text('plan = "plan.toml"\nsite = "lab"\nmodels = ["*:*"]\n')
    with pytest.raises(ConfigError, match=naming("*:*", "module:attribute")):
        load(path)


def test_a_plan_with_a_network_of_ones_own_is_checked_by_the_servers_file(tmp_path, monkeypatch):
    """It was refused as not allowed, since only the server's file lists such networks."""
    (tmp_path / "checkednets.py").write_text(
        "from torch import nn\nfrom shared.models.base import Model\n\n"
        "def net():\n    return Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), {}, (1, 8, 8))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = write_plan(tmp_path, model='name = "checkednets:net"', data='source = "digits"')
    config = tmp_path / "server.toml"
    config.write_text('plan = "plan.toml"\nsite = "lab"\nmodels = ["checkednets:net"]\n')
    try:
        assert called("plan", "check", plan) == 2
        assert called("plan", "check", plan, "--config", config) == 0
    finally:
        registry.allow([])
