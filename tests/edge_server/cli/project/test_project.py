"""`edge-server new`, `project build` and `project publish`: from a name to a wheel that a site has signed."""

from __future__ import annotations

import json
import subprocess  # noqa: TID251 - a script as a user runs it
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edge_server.cli.project.arguments import KINDS
from edge_server.gateway.enrolment.registrar import Answer, Request
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.download import Download, PackageCatalogue
from edge_server.gateway.packages.projects import project_wheel
from edge_server.gateway.packages.store import find_package_faults, read_index
from edge_server.gateway.site_folder import SiteFolder
from shared.errors import WireError
from shared.plugins import folder_digest
from shared.projects.manifest import decode_project, verify_project
from shared.projects.wheel import read_wheel
from shared.protocol.packages import decode_signed_manifest, verify
from tests.edge_server.processes import Ended, captured, final, folder_of, forked
from tests.edge_server.textbook import require_equal
from tests.naming import names_all

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert captured("new", "quality").code == 0
    return tmp_path / "quality"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SiteFolder:
    folder = SiteFolder(tmp_path_factory.mktemp("gateway") / "site")
    initialise(folder, SiteSettings("roof", ("gateway.local",)), NOW)
    return folder


def refused(*words: object) -> Ended:
    done = captured(*words)
    assert (done.code, done.out) == (2, "")
    return done


def run(folder: Path, *words: str, module: str = "edge_server") -> str:
    """Run a command in a folder; return what it writes."""
    log = folder.parent / "log"
    log.unlink(missing_ok=True)
    with forked(*words, log=log, cwd=folder, module=module) as process:
        assert process.wait(300) == 0, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_has_tests_that_pass_and_a_plan_that_trains(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    done = captured("new", f"new_{kind}", "--kind", kind)
    assert names_all(done.out, f"new_{kind}", "edge-server replay plan.toml")
    folder = tmp_path / f"new_{kind}"
    run(folder, "-q", "-p", "no:cacheprovider", module="pytest")
    assert names_all(run(folder, "replay", "plan.toml"), "finished", "5")
    assert tomllib.loads((folder / "plan.toml").read_text()).get("task", {"kind": KINDS[0]})["kind"] == kind


@pytest.mark.broker
@pytest.mark.slow
def test_four_commands_lead_from_a_name_to_a_live_run_of_own_code(tmp_path, monkeypatch):
    """As `new` prints them, with an own loss and metric; live is replay, and no file is copied by hand."""
    monkeypatch.chdir(tmp_path)
    shown = captured("new", "quality", "--kind", "custom").out
    commands = [line.partition("#")[0].split() for line in shown.splitlines()[1:]]
    assert [words[:1] for words in commands] == [["cd"], ["edge-server"], ["edge-server"]]
    folder = tmp_path / commands[0][1]
    models = []
    for number, words in enumerate(commands[1:]):
        said = run(folder, *words[1:], "--data-dir", f"runs-{number}")
        assert names_all(said, "finished", "quality.losses:largest_error")
        models.append(final(folder_of(folder / f"runs-{number}"), 5))
    require_equal(*models)


def test_changed_code_is_named_wherever_an_earlier_run_is_read(tmp_path, monkeypatch):
    """An export and a comparison warn; a release, which boards serve, is refused. A script finds the code, too."""
    monkeypatch.chdir(tmp_path)
    captured("new", "heat", "--kind", "regression")
    folder = tmp_path / "heat"
    plan = (folder / "plan.toml").read_text().replace("rounds = 5", "rounds = 1")
    (folder / "plan.toml").write_text(plan.replace("[data]\n", '[data]\nnormalise = "federated"\n'))
    run(folder, "replay", "plan.toml")
    name = next((folder / "runs").glob("heat-replay-*")).name
    script = f"from edge_server import api; print(api.open_run({name!r}).model())"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert "Linear(in_features=4" in done.stdout, done.stderr
    assert "inputs: " in run(folder, "export", name, "--format", "onnx")
    with (folder / "heat" / "network.py").open("a") as file:
        file.write("# edited\n")
    assert names_all(run(folder, "export", name, "--format", "onnx"), "WARNING", "heat.network:build", "inputs: ")
    assert names_all(run(folder, "replay", name, "--compare", name), "WARNING", "heat.network:build")
    log = tmp_path / "log"
    with forked("release", "create", name, log=log, cwd=folder) as process:
        assert process.wait(300) == 2
    assert names_all(log.read_text(), "heat.network:build", "restore")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Air", "'Air'"),
        ("a-b", "'a-b'"),
        ("json", "'json'"),
        ("shared", "'shared'"),
        ("torch", "'torch'"),
        ("yield", "keyword"),
        ("2fast", "begins with"),
        ("../x", "x"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_refused(tmp_path, monkeypatch, name, named):
    monkeypatch.chdir(tmp_path)
    assert names_all(refused("new", name).err, named)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_never_written_twice(project):
    assert "quality" in refused("new", "quality").err


def test_the_same_files_make_the_same_wheel_and_manifest(project):
    for _ in range(2):
        done = captured("project", "build", project)
        assert done.code == 0, done.err
        [wheel] = (project / "dist").glob("*.whl")
        built = wheel.read_bytes(), wheel.with_suffix(".json").read_bytes()
        (project / "quality" / "__pycache__").mkdir(exist_ok=True)
        (project / "quality" / "__pycache__" / "x.pyc").write_text("")
        (project / "quality" / ".hidden").write_text("")
    assert built == (wheel.read_bytes(), wheel.with_suffix(".json").read_bytes())
    manifest = decode_project(built[1])
    assert (manifest.name, manifest.version, manifest.file) == ("quality", "0.1.0", wheel.name)
    assert manifest.digest == folder_digest(project / "quality")
    assert manifest.requires == ("numpy", "torch")
    paths = {entry.path for entry in read_wheel(built[0], "quality", "0.1.0")}
    assert {"quality/network.py", "quality/data.py"} < paths
    assert not any("pyc" in path or "hidden" in path or "data/" in path for path in paths)


def test_what_is_no_project_is_refused(project, tmp_path):
    assert names_all(refused("project", "build", tmp_path).err, "pyproject.toml", "edge-server new")
    (project / "quality" / "link.py").symlink_to("network.py")
    assert "link.py" in refused("project", "build", project).err
    (project / "quality" / "link.py").unlink()
    path = project / "pyproject.toml"
    path.write_text(path.read_text().replace('"0.1.0"', '"../1"'))
    assert names_all(refused("project", "build", project).err, "version", "'../1'")


def test_a_published_project_is_signed_and_served_to_boards_alone(project, made):
    """Twice is once; other content needs another version."""
    words = ("project", "publish", project, "--folder", made.path)
    assert names_all(captured(*words).out, "quality", "0.1.0", "roof", "projects")
    assert captured(*words).code == 0
    [manifest] = read_index(made.path).project_manifests()
    assert manifest.site == "roof"
    catalogue = PackageCatalogue(made.path, lambda certificate: certificate == b"certificate")
    path, file = "/packages/projects/quality/0.1.0.json", f"/packages/projects/quality/{manifest.file}"
    answer = catalogue.find(Request("GET", path, peer=b"certificate"))
    assert isinstance(answer, Answer)
    signed, root = decode_signed_manifest(answer.body), made.ca("root.crt").read_bytes()
    assert verify_project(signed, root) == manifest
    with pytest.raises(WireError):
        verify(signed, root)  # no package of the agent
    wheel = catalogue.find(Request("GET", file, peer=b"certificate"))
    assert isinstance(wheel, Download)
    assert wheel.path == project_wheel(made.path, manifest)
    for asked in (path, file):
        for request in (
            Request("GET", asked),
            Request("GET", asked, peer=b"of a revoked board"),
            Request("GET", asked + "x", peer=b"certificate"),
        ):
            denied = catalogue.find(request)
            assert isinstance(denied, Answer)
            assert denied.status in (403, 404)
    index = catalogue.find(Request("GET", "/packages/index.json"))
    assert isinstance(index, Answer)
    assert json.loads(index.body)["projects"] == []
    assert list(find_package_faults(made.path)) == []
    wheel.path.write_bytes(b"other")
    assert [about for about, _ in find_package_faults(made.path)] == [f"packages/projects/quality/{manifest.file}"]

    (project / "quality" / "more.py").write_text("")
    assert names_all(refused(*words).err, "quality", "0.1.0", "version")
    shown = captured("project", "list", "--folder", made.path, "--format", "json")
    assert [one["version"] for one in json.loads(shown.out)] == ["0.1.0"]
    assert captured("project", "remove", "quality", "0.1.0", "--folder", made.path).code == 0
    assert names_all(refused("project", "remove", "quality", "0.1.0", "--folder", made.path).err, "quality", "0.1.0")
    assert not wheel.path.exists()
