"""Existing Flower app: plan, live run, replay, resumption, release."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess  # noqa: TID251 - the commands as a user types them
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_server.__main__ import build_parser
from edge_server.cli.commands import EXIT_INTERRUPTED
from edge_server.cli.flower_app import prepare, read_app
from edge_server.journal import checkpoints
from edge_server.journal.records import Evaluated, UpdateAccepted, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.rounds.check_plan import load
from shared import registry
from shared.errors import ConfigError
from tests import flower_environment
from tests.flower_environment import APP, OFFLINE, ROOT

LIMIT_S = 300.0
ROUNDS = 8
CLIENT, MODEL = "quickstart.client_app:app", "quickstart.task:Net"


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Return a function that parses a command line of `flower-app`, and undoes what `prepare` allows."""
    monkeypatch.syspath_prepend(str(APP))
    monkeypatch.setenv("PYTHONPATH", "")

    def parse(*words: str) -> argparse.Namespace:
        return build_parser().parse_args(["flower-app", *words, "--out", str(tmp_path / "plan.toml")])

    yield parse
    registry.allow([])


def test_the_apps_project_becomes_a_plan(options, tmp_path):
    """Rounds, nodes and settings are those of its pyproject.toml; the options of the command replace them."""
    path = prepare(options(str(APP)))
    plan = load(path, tmp_path)
    assert (plan.name, plan.rounds, [device.name for device in plan.device]) == (
        "quickstart",
        3,
        ["node-0", "node-1", "node-2"],
    )
    assert (plan.algorithm.name, plan.model.name) == ("flower", MODEL)
    assert plan.algorithm.options["app"] == CLIENT
    assert plan.algorithm.options["learning-rate"] == 0.05
    assert {CLIENT, MODEL} <= set(registry.allowed_entries())
    words = (
        "--devices",
        "pi-1, pi-2",
        "--set",
        "num-server-rounds=5",
        "--set",
        "fraction-fit=0.5",
        "--message",
        "lr=0.1",
    )
    plan = load(prepare(options(str(APP), *words)), tmp_path)
    assert (plan.rounds, plan.cohort.size, [device.name for device in plan.device]) == (5, 1, ["pi-1", "pi-2"])
    assert plan.algorithm.options["message.lr"] == 0.1
    assert plan.algorithm.options["devices"] == "pi-1,pi-2"


@pytest.mark.parametrize(
    ("change", "words", "named"),
    [
        (lambda text: text.replace("clientapp =", "client ="), (), "clientapp"),
        (lambda text: text.replace("[project]", "[project"), (), "pyproject.toml"),
        (lambda text: text.replace("quickstart.client_app", "absent.client_app"), (), "--model"),
        (lambda text: text, ("--devices", "0"), "--devices"),
        (lambda text: text, ("--set", "rounds"), "--set"),
    ],
)
def test_an_app_that_cannot_run_is_refused(options, tmp_path, change, words, named):
    """With the file or the option to correct."""
    (tmp_path / "pyproject.toml").write_text(change((APP / "pyproject.toml").read_text()))
    with pytest.raises(ConfigError, match=named):
        prepare(options(str(tmp_path), *words))
    with pytest.raises(ConfigError):
        read_app(tmp_path / "absent")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[measure]\nseconds = 1.0\n", "measure.seconds"),
        ("every = 1\n", "evaluation.every"),
        ('name = "fedavg"\n', "data.source"),
    ],
)
def test_a_plan_that_needs_the_apps_examples_is_refused(options, tmp_path, line, named):
    """Timing steps and testing on the server need examples; another method cannot train without them."""
    path = prepare(options(str(APP)))
    text = path.read_text()
    if line.startswith("name"):
        text = text[: text.index("[algorithm]")] + f"[algorithm]\n{line}\n" + text[text.index("[model]") :]
    else:
        text = text.replace("every = 0\n", line) if "every" in line else text.replace("[cohort]", f"{line}[cohort]")
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load(path, tmp_path)


@pytest.fixture(scope="module")
def python():
    """Return the interpreter of an environment with Flower."""
    try:
        return flower_environment.install()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Flower cannot be installed here: {error}")


def start(python: Path, folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start a command in Flower's environment."""
    environment = {**flower_environment.environment(APP, OFFLINE), registry.VARIABLE: f"{CLIENT} {MODEL}"}
    return subprocess.Popen(  # noqa: S603 - our own programs
        [str(python), *map(str, words)],
        cwd=folder,
        env={**environment, "FIELDFLEET_DATA": os.fspath(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(python: Path, folder: Path, *words: object) -> str:
    """Run a command in Flower's environment to its end; return what it printed."""
    with start(python, folder, *words) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, printed
    return printed


def parameters_after(run_folder: Path, number: int) -> dict[str, torch.Tensor]:
    """Return the model of a run's checkpoint."""
    return checkpoints.load(run_folder / "checkpoints", number).tree


@pytest.mark.slow
def test_the_device_side_with_flowers_classes(python, tmp_path):
    """The unit tests that need Flower, in its environment."""
    path = ROOT / "tests" / "shared" / "algorithms" / "test_flower_client.py"
    printed = run(python, tmp_path, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", path)
    assert "passed" in printed
    assert "skipped" not in printed


@pytest.mark.slow
@pytest.mark.broker
def test_the_quickstart_live_replayed_and_in_a_loop(python, tmp_path):
    """Three agents and a broker give the bits of a replay, and the parameters of the client's own loop to 1e-6."""
    server = ("-m", "edge_server")
    run(python, tmp_path, *server, "flower-app", APP, "--run", "live")
    run(python, tmp_path, *server, "flower-app", APP, "--replay")
    run(python, tmp_path, APP / "local_loop.py", "loop.npz")
    [replayed] = [folder for folder in (tmp_path / "runs").iterdir() if "replay" in folder.name]
    live, again = (parameters_after(folder, 3) for folder in (tmp_path / "runs" / "live", replayed))
    assert list(live) == list(again)
    assert all(torch.equal(leaf, again[name]) for name, leaf in live.items())
    loop = np.load(tmp_path / "loop.npz")
    assert {*loop} == {*live, "accuracies"}
    for name, leaf in live.items():
        np.testing.assert_allclose(leaf.numpy(), loop[name], rtol=0, atol=1e-6)
    records = read_records(tmp_path / "runs" / "live")
    accuracies = [record.accuracy for record in records if isinstance(record, Evaluated)]
    assert accuracies == pytest.approx(loop["accuracies"].tolist())
    assert accuracies[-1] > 0.85
    assert [record.outcome for record in closed_rounds(records)] == ["aggregated"] * 3
    updates = [record.update for record in records if isinstance(record, UpdateAccepted) and record.update.params]
    assert len(updates) == 9
    assert all(update.loss == update.metrics["train_loss"] and update.cost.compute_s for update in updates)
    assert {update.num_examples for update in updates} == {479}
    printed = run(python, tmp_path, *server, "replay", "live", "--compare", "live")
    assert "the same bits" in printed
    run(python, tmp_path, *server, "release", "create", "live", "--example", 1, 8, 8)
    exported = run(python, tmp_path, *server, "release", "export", "quickstart", "served")
    assert exported
    import onnxruntime  # noqa: PLC0415 - slow

    session = onnxruntime.InferenceSession(next((tmp_path / "served").rglob("*.onnx")))
    assert session.get_inputs()[0].shape[1:] == [1, 8, 8]


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.skipif(os.environ.get("EXAMPLES") != "all", reason="fetches Flower's templates; `make examples` runs it")
@pytest.mark.parametrize(("kind", "updates"), [("pytorch_legacy_api", 2), ("pytorch", 2), ("numpy", 6)])
def test_flowers_own_quickstarts_run_unchanged(python, tmp_path, kind, updates):
    """With both of Flower's interfaces, and with arrays that belong to no network, live as in replay."""
    app = flower_environment.write_own_quickstart(kind, tmp_path)
    model = f"quickstart_{kind}.task:{'get_dummy_model' if kind == 'numpy' else 'Net'}"
    words = ("-m", "edge_server", "flower-app", app, "--devices", "3", "--model", model, "--set", "num-server-rounds=2")
    run(python, tmp_path, *words, "--run", "live")
    run(python, tmp_path, *words, "--replay", "--data-dir", ".")
    [replayed] = tmp_path.glob("quickstart*-replay-*")
    live, again = (parameters_after(folder, 2) for folder in (tmp_path / "runs" / "live", replayed))
    assert list(live) == list(again)
    assert all(torch.equal(leaf, again[name]) for name, leaf in live.items())
    records = read_records(replayed)
    assert [record.outcome for record in closed_rounds(records)] == ["aggregated"] * 2
    assert sum(isinstance(record, UpdateAccepted) and bool(record.update.params) for record in records) == updates


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.skipif(os.environ.get("EXAMPLES") != "all", reason="takes a minute; `make examples` runs it")
def test_an_interrupted_run_goes_on_with_the_same_bits(python, tmp_path):
    """After Ctrl-C within the third round or later, the same command ends as a replay without an interruption."""
    words = ("-m", "edge_server", "flower-app", APP, "--set", f"num-server-rounds={ROUNDS}", "--set", "local-epochs=6")
    with start(python, tmp_path, *words, "--run", "cut") as process:
        try:
            assert process.stdout
            assert any(f"round 2/{ROUNDS}  accuracy" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == EXIT_INTERRUPTED
    assert 2 <= len(closed_rounds(read_records(tmp_path / "runs" / "cut"))) < ROUNDS
    run(python, tmp_path, *words, "--run", "cut")
    run(python, tmp_path, *words, "--replay")
    [replayed] = [folder for folder in (tmp_path / "runs").iterdir() if "replay" in folder.name]
    cut, whole = (parameters_after(folder, ROUNDS) for folder in (tmp_path / "runs" / "cut", replayed))
    assert all(torch.equal(leaf, whole[name]) for name, leaf in cut.items())
