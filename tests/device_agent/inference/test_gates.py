"""Acceptance gates: refusals and their messages, and the gate process itself."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import load

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates import judgement
from device_agent.inference.gates.process import GateJob, GateProcess, OwnJob
from device_agent.inference.settings import InferenceSettings
from device_agent.projects.environment import INSTALLED, export_plugins
from shared import registry
from shared.data.spec import Data
from shared.objectives.base import build_objective
from shared.plugins import folder_digest
from shared.protocol.inference.release import GRAPH, Reduction, ReleaseTask, write_manifest
from shared.protocol.messages import PluginVersion
from shared.protocol.update import UpdateTerms
from tests.device_agent.inference.releases import damaged, linear_release, put
from tests.device_agent.inference.test_own_model import write_own
from tests.naming import names_all

MIB = 1 << 20
SETTINGS = InferenceSettings(port=0, socket="", memory_bytes=2048 * MIB, spin_us=0)


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> Data:
    """Return 80 points of two classes that their first feature tells apart; half are held out."""
    path, random = tmp_path_factory.mktemp("data") / "points.csv", Random(5)
    lines = ["a,b,c,d,label"]
    for number in range(80):
        kind = number % 2
        lines.append(",".join([f"{(2 * kind - 1) * (1 + random.random()):.3f}", "0", "0", "1", str(kind)]))
    path.write_text("\n".join(lines) + "\n")
    return Data(source="csv", path=str(path), holdout=0.5)


def verdict(
    folder: Path, made, *, data: Data | None = None, committed: int = 1, own: str = "", **terms: float
) -> GateVerdict:
    """Return what becomes of a release on a board that may serve another one; in this process."""
    if committed:
        put(folder, linear_release(1), committed=True)
    put(folder, made)
    job = GateJob(
        state_dir=str(folder),
        name="points",
        candidate=made[0].version,
        committed=committed,
        terms=UpdateTerms(**terms),
        settings=SETTINGS,
        data=data,
        own=own,
    )
    return judgement.run_gates(job, lambda _: None, lambda: None)


def test_a_sound_release_passes(tmp_path, points):
    found = verdict(tmp_path, linear_release(2), data=points)
    assert found.reason == ""
    assert (found.accuracy, found.old_accuracy, found.examples) == (1.0, 1.0, 40)
    assert min(found.p95_s, found.old_p95_s) > 0.0


def test_a_first_release_is_compared_with_nothing(tmp_path, points):
    found = verdict(tmp_path, linear_release(1, np.zeros((4, 2))), committed=0, data=points)
    assert found.reason == ""
    assert (found.old_accuracy, found.old_p95_s) == (None, 0.0)


def named(made, *classes: str):
    """Return a release with other class names."""
    return msgspec.structs.replace(made[0], classes=classes), made[1]


def with_nan() -> np.ndarray:
    weights = np.ones((4, 2))
    weights[3, 1] = np.nan
    return weights


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (linear_release(2, with_nan(), outputs=np.zeros((10, 2))), "load.*'w'.*NaN"),
        (linear_release(2, np.full((4, 2), 3e38), outputs=np.zeros((10, 2))), "finite"),
        (linear_release(2, outputs=np.ones((10, 2))), "probes"),
        (linear_release(2, np.ones((5, 2))), "signature.*input.*float32"),
        (linear_release(2, np.ones((4, 3))), "signature.*output"),
        (linear_release(2, output="answer"), "signature.*output"),
        (named(linear_release(2), "a", "b", "c"), "signature.*3.*2"),
        (damaged(linear_release(2), "graph"), "load.*graph"),
        (damaged(linear_release(2), "parameters"), "load.*parameters"),
    ],
)
def test_what_is_wrong_with_a_model_is_refused_and_said(tmp_path, made, cause):
    found = verdict(tmp_path, made)
    assert found.lasting
    assert found.reason
    assert re.match(cause, found.reason, re.DOTALL), found.reason


def test_a_release_of_8_bits_may_differ_more_from_its_probes(tmp_path):
    """Another processor computed them; the accuracy gate judges the rest. What is far off is refused all the same."""
    manifest, parts = linear_release(2)
    near = linear_release(2, outputs=load(parts[manifest.probes.sha256])["outputs"] * 1.05)
    told = Reduction(
        kind="int8",
        accuracy_before=1.0,
        accuracy=1.0,
        examples=10,
        calibrated_on=10,
        error=0.01,
        bytes_before=100,
        bytes_after=30,
    )
    for number, (made, passes) in enumerate(((near, True), (linear_release(2, outputs=np.ones((10, 2))), False))):
        reduced = msgspec.structs.replace(made[0], reduction=told), made[1]
        assert (verdict(tmp_path / str(number), reduced).reason == "") == passes
    assert verdict(tmp_path / "whole", near).reason.startswith("probes")


def test_files_that_rot_on_the_disk_are_told(tmp_path):
    """Digests are compared with what lies there now; probes that cannot be read are no fault of the model."""
    made = linear_release(2)
    for which in (made[0].parameters, made[0].graph.part, made[0].probes):
        folder = tmp_path / which.sha256[:8]
        put(folder, linear_release(1), committed=True)
        store = put(folder, made)
        path = store.parts.path(which.sha256)
        path.chmod(0o600)
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        job = GateJob(
            state_dir=str(folder), name="points", candidate=2, committed=1, terms=UpdateTerms(), settings=SETTINGS
        )
        found = judgement.run_gates(job, lambda _: None, lambda: None)
        assert names_all(found.reason, path)


def test_a_release_that_is_less_accurate_here_is_refused(tmp_path, points):
    """Its weights are those of the other class; and whatever may be lost, it passes."""
    w = np.zeros((4, 2))
    w[0] = 1.0, -1.0
    found = verdict(tmp_path, linear_release(2, w), data=points, max_drop=0.1)
    assert found.reason.startswith("accuracy")
    assert names_all(found.reason, "0.000", 40, "1.000")
    assert verdict(tmp_path / "other", linear_release(2, w), data=points, max_drop=1.0).reason == ""


def test_a_latency_that_no_network_keeps_is_refused(tmp_path):
    found = verdict(tmp_path, linear_release(2), max_latency_ms=1e-6)
    assert found.reason.startswith("latency: ")
    assert verdict(tmp_path / "other", linear_release(2), max_latency_ms=1e6).reason == ""


@pytest.mark.parametrize(
    "data", [Data(source="csv", path="/nowhere", holdout=0.5), Data(source="csv", path="/nowhere")]
)
def test_examples_that_are_not_there_are_no_fault_of_the_model(tmp_path, data):
    found = verdict(tmp_path, linear_release(2), data=data)
    assert (found.reason, found.accuracy) == ("", None)


def test_the_pure_judgements():
    assert judgement.judge_metric(build_objective(), 0.90, 0.92, 50, 0.02) == ""
    assert judgement.judge_metric(build_objective(), 0.89, 0.92, 50, 0.02)
    assert judgement.judge_metric(build_objective(), 0.0, None, 50, 0.0) == ""
    expected = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert judgement.judge_probes([expected, expected[:1]], expected) == ""
    assert judgement.judge_probes([expected + 3e-4], expected) == ""
    assert "1.0e-03" in judgement.judge_probes([expected + 4e-3], expected)
    assert judgement.judge_probes([expected + 0.3], expected, judgement.MOST_ERROR_INT8) == ""
    assert names_all(judgement.judge_probes([expected[:, :1]], expected), "[2, 1]", "[2, 2]")


def run(process: GateProcess, folder: Path) -> GateVerdict:
    put(folder, linear_release(1), committed=True)
    store = put(folder, linear_release(2))

    async def story() -> GateVerdict:
        async with asyncio.timeout(120.0):
            return await process(store.record("points"))

    return asyncio.run(story())


def test_the_gates_as_a_process(tmp_path):
    """A release that passes, within memory that does, and refused where it does not."""
    found = run(GateProcess(tmp_path, SETTINGS), tmp_path)
    assert (found.reason, found.lasting) == ("", True)
    assert found.p95_s > 0.0
    small = msgspec.structs.replace(SETTINGS, memory_bytes=1 * MIB)
    found = run(GateProcess(tmp_path / "small", small), tmp_path / "small")
    assert found.reason


def gate_by(folder: Path, data: Data, metric: str, w: list[float], plugins: tuple[PluginVersion, ...]) -> GateVerdict:
    """Return the verdict of a process on a release that is compared by a metric of the user."""
    weights = np.zeros((4, 2))
    weights[0] = w
    manifest, parts = linear_release(2, weights)
    source = msgspec.structs.replace(manifest.source, plugins=plugins)
    task = ReleaseTask(kind="classification", metrics=(metric,), direction="max")
    put(folder, linear_release(1), committed=True)
    store = put(folder, (msgspec.structs.replace(manifest, task=task, source=source), parts))
    return asyncio.run(GateProcess(folder, SETTINGS, data=data)(store.record("points")))


def test_a_metric_of_a_listed_project_gates_where_its_code_is_the_one_of_the_training(tmp_path, points, monkeypatch):
    """Not listed, or other code: the release is accepted without it. A metric that raises refuses, with its name."""
    for name in (registry.VARIABLE, INSTALLED):
        monkeypatch.setenv(name, "")
    package = tmp_path / "projects" / "air" / "0.1.0" / "air"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "scores.py").write_text(
        "def margin(outputs, labels):\n"
        "    return (outputs[:, 1] - outputs[:, 0]) * (2 * labels - 1)\n\n\n"
        "def broken(outputs, labels):\n"
        "    raise ValueError('no such column')\n"
    )
    (tmp_path / "projects" / "air" / "current").symlink_to("0.1.0")
    name = "air.scores:margin"
    same = PluginVersion(kind="metric", name=name, digest=folder_digest(package))
    other = msgspec.structs.replace(same, digest="0" * 64)
    worse = [-0.1, 0.1]
    assert gate_by(tmp_path / "unlisted", points, name, worse, (same,)).metric == ""
    export_plugins([], ["air"], tmp_path)
    found = gate_by(tmp_path / "worse", points, name, worse, (same,))
    assert found.reason.startswith("accuracy")
    assert names_all(found.reason, name, 40, "allowed drop")
    assert found.metric == name
    assert found.value < found.old_value
    assert gate_by(tmp_path / "better", points, name, [-2.0, 2.0], (same,)).reason == ""
    changed = gate_by(tmp_path / "changed", points, name, worse, (other,))
    assert (changed.reason, changed.metric) == ("", "")
    raised = gate_by(tmp_path / "raised", points, "air.scores:broken", worse, ())
    assert names_all(raised.reason, "accuracy", "air.scores:broken", "no such column")


CHILD = """
import os, signal, sys
sys.stdin.buffer.read()
sys.stdout.write('{"type":"Entering","gate":"latency"}\\n')
sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashes.*signal 11.*latency"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory.*signal 9"),
        ("sys.exit(3)", "crashes.*exit code 3.*latency"),
        ("signal.pause()", "time.*0 s"),
    ],
)
def test_how_the_process_ends_is_its_verdict(tmp_path, monkeypatch, ends, cause):
    (tmp_path / "dying_gates.py").write_text(CHILD + ends + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run(
        GateProcess(tmp_path, SETTINGS, patience_s=0.5 if "pause" in ends else 60.0, module="dying_gates"), tmp_path
    )
    assert found.lasting
    assert re.match(cause, found.reason), found.reason


async def test_a_call_that_is_given_up_ends_the_process(tmp_path, monkeypatch):
    """As where a newer offer supersedes the one in the gates."""
    (tmp_path / "slow_gates.py").write_text(CHILD + "signal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    put(tmp_path, linear_release(1), committed=True)
    record = put(tmp_path, linear_release(2)).record("points")

    def children() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if "slow_gates" in " ".join(one.cmdline())]

    async with asyncio.timeout(120.0):
        trying = asyncio.create_task(GateProcess(tmp_path, SETTINGS, module="slow_gates")(record))
        while not children():  # noqa: ASYNC110 - a process says nothing
            await asyncio.sleep(0.02)
        trying.cancel()
        await asyncio.wait({trying})
        assert trying.cancelled()
        assert not children()


def others() -> np.ndarray:
    """Return weights that take each class for the other."""
    weights = np.zeros((4, 2))
    weights[0] = 1.0, -1.0
    return weights


def own_model(path: Path, weights: np.ndarray | None = None) -> Path:
    """Write parameters of the device's own: of the usual weights, or of some."""
    manifest, parts = linear_release(9, weights)
    write_own(path, load(parts[manifest.parameters.sha256]), manifest.model)
    return path


def test_where_the_devices_own_parameters_answer_it_is_their_accuracy_that_counts(tmp_path, points):
    """Those of the release, which are worthless here, would never answer; without such parameters they are refused."""
    made = linear_release(2, others())
    assert verdict(tmp_path / "without", made, data=points).reason.startswith("accuracy")
    own = own_model(tmp_path / "own")
    found = verdict(tmp_path / "with", made, data=points, own=str(own))
    assert (found.reason, found.accuracy, found.old_accuracy) == ("", 1.0, 1.0)
    own.write_bytes(b"damaged")
    assert verdict(tmp_path / "damaged", made, data=points, own=str(own)).reason.startswith("accuracy")


@pytest.mark.parametrize(
    ("weights", "max_drop", "named"),
    [(None, 0.02, []), (others(), 0.02, ["accuracy", "0.000", 40, "1.000"]), (others(), 1.0, [])],
)
def test_a_model_of_the_devices_own_is_compared_with_the_release_that_it_answers_for(
    tmp_path, points, weights, max_drop, named
):
    found = judgement.compare_own_model(own_job(tmp_path, points, own_model(tmp_path / "own", weights), max_drop))
    assert names_all(found.reason, *named)
    assert bool(found.reason) == bool(named)


def own_job(folder: Path, data: Data, own: Path, max_drop: float = 0.02) -> OwnJob:
    manifest, parts = linear_release(1)
    paths = {}
    for name, part in manifest.parts.items():
        paths[name] = str(folder / name)
        (folder / name).write_bytes(parts[part.sha256])
    return OwnJob(
        manifest=write_manifest(manifest), parts=paths, own=str(own), max_drop=max_drop, settings=SETTINGS, data=data
    )


def test_what_cannot_be_judged_is_not_refused(tmp_path, points):
    """No example held out, parameters of another network, a release that does not open."""
    own = own_model(tmp_path / "own", others())
    without = msgspec.structs.replace(points, holdout=0.0)
    assert judgement.compare_own_model(own_job(tmp_path, without, own)).reason == ""
    job = own_job(tmp_path, points, own_model(tmp_path / "other", np.ones((5, 2))))
    assert judgement.compare_own_model(job).reason == ""
    Path(job.parts[GRAPH]).write_bytes(b"")
    found = judgement.compare_own_model(job)
    assert (found.reason != "", found.lasting) == (True, False)
