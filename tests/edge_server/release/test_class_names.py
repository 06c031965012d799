"""Class names of a release reach the answers of the served model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_agent.inference.http.message import Request
from device_agent.inference.http.routes import Routes
from device_agent.inference.models import ServedModels
from device_agent.inference.session import OpenModel, open_model
from device_agent.inference.settings import InferenceSettings
from edge_server.plan.sections import Chosen
from edge_server.release import store
from edge_server.release.rollout.orders import begin_rollout
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.inference.release import GRAPH, MANIFEST, PARAMETERS, ReleaseManifest, write_manifest
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import called
from tests.edge_server.release.boards import make_release
from tests.edge_server.release.runs import leave_run
from tests.edge_server.release.test_rollout import TERMS
from tests.naming import names_all, naming

pytest.importorskip("onnx")

SETTINGS = InferenceSettings(port=0, socket="", memory_bytes=2 << 30)


def write_table(folder: Path, names: tuple[str, ...]) -> None:
    """Write a table whose classes lie far apart, in both splits."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for split in ("train", "test"):
        rows = ["a,b,c,d,label"]
        for number in range(120):
            features = random.normal(size=4) * 0.3
            features[number % 3] += 3
            rows.append(",".join(f"{value:.3f}" for value in features) + "," + names[number % 3])
        (folder / f"{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def opened(folder: Path, manifest: bytes = b"") -> OpenModel:
    """Return an exported release as a board opens it, with another manifest where one is given."""
    parts = {name: folder / name for name in (GRAPH, PARAMETERS)}
    return open_model(manifest or (folder / MANIFEST).read_bytes(), parts, SETTINGS)


def digests(manifest: ReleaseManifest) -> set[str]:
    return {part.sha256 for part in manifest.parts.values()}


def train(folder: Path, names: tuple[str, ...], outputs: int) -> None:
    write_table(folder / "table", names)
    plan = write_plan(
        folder,
        rounds=5,
        model=f'name = "mlp"\noptions = {{ features = 4, hidden = 16, classes = {outputs} }}',
        hyper="local_epochs = 2\nbatch_size = 16\nlearning_rate = 0.1",
        data='source = "csv"\npath = "table"',
        evaluation="every = 1",
        more='[partition]\nkind = "even"\n[[device]]\nname = "a"\n[[device]]\nname = "b"',
    )
    assert called("replay", plan, "--data-dir", folder, "--data-root", folder, "--workers", 1) == 0


@pytest.mark.parametrize(
    "names", [("01", "02", "03"), ("007", "3", "12"), ("1", "01", "2"), ("3", "1", "002"), ("cafe\u0301", "b", "a")]
)
def test_a_served_model_answers_with_the_name_in_the_file(tmp_path, capsys, names):
    """Asked as README's client asks; 01 was answered as 02, and 03 ended the client."""
    train(tmp_path, names, outputs=3)
    assert called("release", "create", "last", "--name", "zero", "--data-dir", tmp_path) == 0, capsys.readouterr().err
    assert called("release", "export", "zero", tmp_path / "out", "--data-dir", tmp_path) == 0
    model = opened(tmp_path / "out")
    answered = [model.manifest.classes[int(row.argmax())] for row in model.run(3 * np.eye(3, 4, dtype=np.float32))]
    assert answered == [name.replace("e\u0301", "é") for name in names]


@pytest.mark.parametrize(("names", "outputs"), [(("a", "b", "c"), 4), (("a", "b", "c"), 2), (("01", "02", "03"), 4)])
def test_a_release_without_a_name_for_each_output_is_refused(tmp_path, capsys, names, outputs):
    """With both numbers, the names and what to do; nothing is kept."""
    data = Data(source="csv", path="away.csv", classes=names)
    model = Chosen(name="mlp", options={"features": 4, "hidden": 4, "classes": outputs})
    leave_run(tmp_path, "mlp", model=model, data=data)
    assert called("release", "create", "last", "--data-dir", tmp_path) == 2
    problem = capsys.readouterr().err
    assert names_all(problem, len(names), names[0], outputs, "model.options")
    assert not list((tmp_path / "releases").glob("**/*.json"))


def test_an_earlier_release_without_a_name_for_each_output_is_not_rolled_out(tmp_path):
    """Version 0.1 made such releases; this one has four outputs."""
    made = make_release(tmp_path, {"w": b"1234"})
    manifest = msgspec.structs.replace(made.manifest, classes=("a", "b", "c"), version=0)
    stored = store.publish(tmp_path, manifest, {digest: made.path(digest).read_bytes() for digest in digests(manifest)})
    with pytest.raises(ConfigError, match=naming(3, 4)):
        begin_rollout(tmp_path, stored, TERMS)


def test_an_earlier_release_that_is_served_already_names_no_class(tmp_path, capfd):
    """It goes on answering with numbers; a wrong name is worse than none."""
    leave_run(tmp_path, "mlp")
    assert called("release", "create", "last", "--name", "net", "--data-dir", tmp_path) == 0
    assert called("release", "export", "net", tmp_path / "out", "--data-dir", tmp_path) == 0
    manifest = msgspec.json.decode((tmp_path / "out" / MANIFEST).read_bytes(), type=ReleaseManifest)
    data = write_manifest(msgspec.structs.replace(manifest, classes=("a", "b")))
    models = ServedModels()
    models.add(opened(tmp_path / "out", data))
    models.switch("net", manifest.version)
    assert names_all(capfd.readouterr().err, 2)
    answer = Routes(models, None, 8)(Request("GET", "/v2/models/net", {}, b""))
    assert msgspec.json.decode(answer.body)["parameters"]["classes"] == []
