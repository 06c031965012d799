"""A project on real boards: published, installed where the operator lists it, trained with, and rolled back.

Three agents join a site with certificates by tokens; its enrolment service offers the project.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess  # noqa: TID251 - the system is processes
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from device_agent import __main__ as agent_command
from device_agent.inference.store import BoardStore
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.projects import project_wheel
from edge_server.gateway.packages.store import edit_index, read_index, write_index
from edge_server.gateway.site_folder import SiteFolder
from edge_server.journal.records import AnyRecord, LeftOut, RunOpened, closed_rounds
from edge_server.journal.sqlite import read_records
from shared.runtime.folder_lock import hold_lock
from tests.edge_server.gateway.sites import LiveSite, make_site, now
from tests.edge_server.processes import ROOT, Ended, captured, final, folder_of, forked, started, until
from tests.edge_server.textbook import require_equal
from tests.machine import free_port, needs_mosquitto
from tests.naming import names_all
from tests.test_enrolment_system import typed

pytestmark = [needs_mosquitto, pytest.mark.broker, pytest.mark.slow]
BOARDS = ("board-1", "board-2", "board-3")
KILLS = 8


@dataclass
class Field:
    """A site, its enrolment service, a project and the agents that run."""

    folder: Path
    site: LiveSite
    port: int
    agents: dict[str, ExitStack] = field(default_factory=dict)
    runs: int = 0

    @property
    def project(self) -> Path:
        return self.folder / "air"

    def typed(self, *words: object) -> Ended:
        """Run a command of the server, which must succeed."""
        done = captured(*words)
        assert done.code == 0, done.err
        return done

    def publish(self) -> None:
        self.typed("project", "publish", self.project, "--folder", self.site.path)

    def set_version(self, version: str) -> None:
        path = self.project / "pyproject.toml"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(f'version = "{version}"' if line.startswith("version") else line for line in lines))

    def edit(self, file: str, before: str, after: str) -> None:
        """Replace a text in a file of the project's package."""
        path = self.project / "air" / file
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def join(self, name: str, *, listed: bool = True, data: str = "", more: str = "") -> None:
        """Have a board join the site, with a file that its operator writes."""
        folder = self.folder / name
        folder.mkdir()
        data = f'[data]\nsource = "air.data:read"\npath = "{self.project}/data/measurements.csv"\n{data}'
        projects = 'projects = ["air"]\n' if listed else ""
        config = f'state_dir = "state"\n{data}[trainer]\nthreads = 1\n{projects}{more}'
        (folder / "agent.toml").write_text(config)
        token = self.typed("enrol", name, "--folder", self.site.path, "--port", self.port).out.strip()
        code, _, why = typed(agent_command.main, "join", "-", "--config", folder / "agent.toml", stdin=f"{token}\n")
        assert code == 0, why

    def start(self, name: str) -> None:
        stack = self.agents[name] = ExitStack()
        path = self.folder / name / "agent.toml"
        stack.enter_context(started("device_agent", "run", "--config", path, log=self.log(name)))

    def restart(self, *names: str) -> None:
        for name in names:
            self.agents.pop(name).close()
            self.start(name)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def installed(self, name: str) -> list[str]:
        """Return the versions of the project on a board."""
        home = self.folder / name / "state" / "projects" / "air"
        return (
            sorted(path.name for path in home.iterdir() if path.is_dir() and not path.is_symlink())
            if home.exists()
            else []
        )

    def train(self, plan: Path | None = None) -> tuple[Path, list[AnyRecord], str]:
        """Run a plan with the boards, that of the project by default; return the run's folder, records and log."""
        self.runs += 1
        runs, log = self.folder / f"runs-{self.runs}", self.folder / f"server-{self.runs}.log"
        words = ("trial", "run", plan or self.project / "plan.toml", "--config", self.site.path / "server.toml")
        with forked(*words, "--data-dir", runs, log=log) as process:
            assert process.wait(240) in (0, 1), log.read_text()
        return folder_of(runs), read_records(folder_of(runs)), log.read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Field]:
    """A site with a broker, an enrolment service and a project; no board has joined it."""
    live = make_site(tmp_path)
    initialise(live.folder, SiteSettings(addresses=("127.0.0.1",)), now())
    port = free_port()
    with asyncio.Runner() as runner, ExitStack() as ending:
        runner.run(live.start())
        ending.callback(lambda: runner.run(live.stop()))
        words = ("enrolment-service", "--folder", live.path, "--host", "127.0.0.1", "--port", port)
        ending.enter_context(started("edge_server", *words, log=tmp_path / "enrolment.log"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert captured("new", "air").code == 0
        plan = tmp_path / "air" / "plan.toml"
        text = plan.read_text().replace("rounds = 5", "rounds = 2").replace("local = 3", "cohort = { min_devices = 2 }")
        plan.write_text(f"{text}\n[round]\ndeadline_s = 60.0\n")
        field_ = Field(tmp_path, live, port)
        ending.callback(lambda: [stack.close() for stack in field_.agents.values()])
        until(lambda: answers(port), "the enrolment service to begin", 60.0)
        yield field_


def answers(port: int) -> bool:
    """Tell whether anybody listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def left_out(records: list[AnyRecord]) -> dict[str, str]:
    return {record.device: record.cause for record in records if isinstance(record, LeftOut)}


def test_a_published_project_trains_on_the_boards_that_list_it(site):
    """Installed by each of them, in the version that the task names; live is replay; old versions remain."""
    site.publish()
    for name in BOARDS:
        site.join(name, listed=name != "board-3")
        site.start(name)
    folder, records, said = site.train()
    assert closed_rounds(records)[-1].arrived == BOARDS[:2], said + site.log("board-1").read_text()
    assert names_all(left_out(records)["board-3"], "'air'", "projects")
    assert [site.installed(name) for name in BOARDS] == [["0.1.0"], ["0.1.0"], []]
    [opened] = [record for record in records if isinstance(record, RunOpened)]
    assert {(plugin.name, plugin.distribution, plugin.version) for plugin in opened.plugins} == {
        ("air.network:build", "air", "0.1.0"),
        ("air.data:read", "air", "0.1.0"),
    }
    first = final(folder, 2)

    # Another version: installed beside the first, after its code has changed.
    network = site.project / "air" / "network.py"
    text = network.read_text()
    network.write_text(text.replace("hidden: int = 16", "hidden: int = 8"))
    refused = captured("project", "publish", site.project, "--folder", site.site.path)
    assert (refused.code, names_all(refused.err, "air", "0.1.0", "version")) == (2, True)
    site.set_version("0.2.0")
    plan, about = site.project / "plan.toml", site.project / "pyproject.toml"
    plan_text, about_text = plan.read_text(), about.read_text()
    about.write_text(f'{about_text}\n[project.entry-points."fieldfleet.models"]\nquick = "air.network:build"\n')
    plan.write_text(plan_text.replace('name = "air.network:build"', 'name = "quick"'))
    site.publish()
    folder, records, said = site.train()
    assert closed_rounds(records)[-1].arrived == BOARDS[:2], said
    assert site.installed("board-1") == ["0.1.0", "0.2.0"]
    [opened] = [record for record in records if isinstance(record, RunOpened)]
    assert [(plugin.name, plugin.version) for plugin in opened.plugins if plugin.kind == "model"] == [
        ("quick", "0.2.0")
    ]
    assert len(final(folder, 2)["0.bias"]) == 8

    # Back: the earlier version is still there, also where the gateway offers it no more.
    site.typed("project", "remove", "air", "0.1.0", "--folder", site.site.path)
    network.write_text(text)
    plan.write_text(plan_text)
    about.write_text(about_text)
    site.set_version("0.1.0")
    folder, records, said = site.train()
    assert closed_rounds(records)[-1].arrived == BOARDS[:2], said
    require_equal(final(folder, 2), first)
    assert (site.folder / "board-1" / "state" / "projects" / "air" / "current").readlink().name == "0.1.0"


def test_other_code_and_a_missing_package_leave_out_one_board(site, monkeypatch):
    """Each is named with its reason, and the run goes on with the others."""
    site.publish()
    for name in BOARDS:
        site.join(name)
    # Board 1 has other code in the same version: somebody has edited what was installed.
    installer = [
        sys.executable,
        "-m",
        "device_agent.projects.install",
        site.folder / "board-1" / "state",
        "air",
        "0.1.0",
    ]
    subprocess.run(list(map(str, installer)), cwd=ROOT, check=True, timeout=120)  # noqa: S603 - ours
    path = site.folder / "board-1" / "state" / "projects" / "air" / "0.1.0" / "air" / "network.py"
    path.write_text(path.read_text() + "\n# edited\n")
    for name in BOARDS:
        site.start(name)
    _, records, said = site.train()
    assert closed_rounds(records)[-1].arrived == BOARDS[1:], said
    cause = left_out(records)["board-1"]
    assert names_all(cause, "device board-1", "'air.network:build'", "0.1.0")
    assert cause.count("digest") == 2

    # Board 3 lacks a package that the server and the other boards have.
    (site.project / "air" / "__init__.py").write_text("import fieldlib\n")
    libraries = site.folder / "libraries"
    libraries.mkdir()
    (libraries / "fieldlib.py").write_text("")
    site.set_version("0.2.0")
    site.publish()
    for name in BOARDS:
        site.agents.pop(name).close()
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    for name in BOARDS[:2]:
        site.start(name)
    until(lambda: all("connected" in site.log(name).read_text() for name in BOARDS[:2]), "the boards to connect")
    monkeypatch.delenv("PYTHONPATH")
    site.start("board-3")
    monkeypatch.syspath_prepend(libraries)
    _, records, said = site.train()
    assert closed_rounds(records)[-1].arrived == BOARDS[:2], said
    assert names_all(left_out(records)["board-3"], "'fieldlib'")


PLAIN_PLAN = """
name = "plain"
rounds = 1
cohort = { min_devices = 1 }
algorithm = { name = "fedavg" }
model = { name = "mlp", options = { features = 4, hidden = 8, classes = 3 } }
hyper = { local_epochs = 1, batch_size = 16, learning_rate = 0.05 }
evaluation = { every = 0, on_device = true }
round = { deadline_s = 60.0 }
"""
LOG_READERS = """
    with open(f"{data.path}.readers", "a") as file:
        print(__file__, *sys.orig_argv, file=file)
"""


def test_a_reverted_release_takes_its_project_back(site):
    """The gates read by the code of each release; trainer and data check by that of the release that serves."""
    site.edit("data.py", "import numpy", "import sys\n\nimport numpy")
    site.edit("data.py", "    table = np", f"{LOG_READERS}\n    table = np")
    readers = site.project / "data" / "measurements.csv.readers"

    def read_versions(module: str) -> set[str]:
        """Return the versions by which processes of a module have read since the last call."""
        lines = readers.read_text().splitlines() if readers.exists() else []
        readers.unlink(missing_ok=True)
        installed = site.folder / "board-1" / "state" / "projects" / "air"
        return {Path(line.split()[0]).relative_to(installed).parts[0] for line in lines if module in line}

    config, agent = site.site.path / "server.toml", site.folder / "board-1" / "agent.toml"

    def run(*words: object, code: int = 0, cwd: Path = ROOT) -> str:
        log = site.folder / "command.log"
        log.unlink(missing_ok=True)
        with forked(*words, log=log, cwd=cwd) as process:
            assert process.wait(240) == code, log.read_text() + site.log("board-1").read_text()
        return log.read_text()

    def release(version: str) -> None:
        """Publish a version, train with it and roll the model out to the board."""
        site.set_version(version)
        site.publish()
        folder, _, _ = site.train()
        words = ("--data-dir", site.folder / "releases", "--config", config)
        create = ("release", "create", folder, "--name", "air", *words)
        assert names_all(run(*create, code=2), "'air'", "air.network:build", "FIELDFLEET_PROJECTS")
        run(*create, cwd=site.project)
        terms = ("--soak", "0.3s", "--max-latency-ms", 10_000, "--max-drop", 1)
        run("rollout", "start", "air", *terms, *words)

    plan = site.project / "plan.toml"
    plan.write_text(plan.read_text().replace("min_devices = 2", "min_devices = 1"))
    site.join("board-1", data="holdout = 0.2\n", more=f"[serve]\nport = {free_port()}\n")
    site.publish()
    site.start("board-1")
    release("0.1.0")
    assert read_versions("gates.main") == {"0.1.0"}
    site.edit("data.py", "TEST_EVERY = 5", "TEST_EVERY = 4")
    release("0.2.0")
    assert read_versions("gates.main") == {"0.2.0"}
    assert typed(agent_command.main, "data", "check", "--config", agent)[0] == 0
    assert read_versions("data_reader") == {"0.2.0"}

    run("rollout", "back", "--data-dir", site.folder / "releases", "--config", config)
    until(lambda: BoardStore(agent.parent / "state").record("air").serving == 1, "the earlier release")
    assert typed(agent_command.main, "data", "check", "--config", agent)[0] == 0
    assert read_versions("data_reader") == {"0.1.0"}
    plain = site.folder / "plain.toml"
    plain.write_text(PLAIN_PLAN)
    for restarted in ([], ["board-1"]):
        site.restart(*restarted)
        _, records, said = site.train(plain)
        assert closed_rounds(records)[-1].arrived == ("board-1",), said + site.log("board-1").read_text()
        assert read_versions("trainer.main") == {"0.1.0"}


def test_a_submitted_plan_brings_its_project_to_the_server(site):
    """The server was started elsewhere; another version of loaded code needs another server, and says so."""
    plan, config = site.project / "plan.toml", site.site.path / "server.toml"
    plan.write_text(plan.read_text().replace("min_devices = 2", "min_devices = 1"))
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith("plan = ")))

    def jobs() -> list[dict[str, str]]:
        return json.loads(site.typed("queue", "--format", "json", "--config", config).out)["jobs"]

    def submit() -> None:
        site.publish()
        with forked("submit", "plan.toml", "--config", config, log=log, cwd=site.project) as process:
            assert process.wait(120) == 0, log.read_text()

    site.join("board-1")
    site.start("board-1")
    log = site.folder / "queue.log"
    with forked("run", "--wait", "--config", config, log=log, cwd=site.folder):
        submit()
        until(lambda: jobs()[0]["state"] in ("finished", "failed"), "the end of the first job")
        assert jobs()[0]["state"] == "finished", jobs()[0]["cause"] + log.read_text()
        site.set_version("0.2.0")
        submit()
        until(lambda: any(job["state"] == "failed" for job in jobs()), "the end of the second job")
    [cause] = [job["cause"] for job in jobs() if job["state"] == "failed"]
    assert names_all(cause, "'air'", "0.1.0", "0.2.0", "another process")


def install(state: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run the installer of a board's agent."""
    words = [sys.executable, "-m", "device_agent.projects.install", str(state), "air", version]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - ours


def test_a_killed_installer_leaves_the_earlier_version_or_the_new_one(site):
    """And what the gateway does not offer, or somebody tampered with, is not installed."""
    site.publish()
    site.join("board-1")
    state = site.folder / "board-1" / "state"
    assert install(state, "0.1.0").returncode == 0
    home = state / "projects" / "air"
    (site.project / "air" / "weights.bin").write_bytes(os.urandom(8 << 20))  # takes a while to write
    site.set_version("0.2.0")
    site.publish()
    words = [sys.executable, "-m", "device_agent.projects.install", str(state), "air", "0.2.0"]
    begun = time.monotonic()
    whole = subprocess.Popen(words, cwd=ROOT)  # noqa: S603 - ours
    assert whole.wait(120) == 0
    seconds = time.monotonic() - begun
    for number in range(KILLS):
        version = f"0.2.{number + 1}"
        site.set_version(version)
        site.publish()
        process = subprocess.Popen([*words[:-1], version], cwd=ROOT, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
        time.sleep(seconds * random.uniform(0.3, 1.0))  # noqa: TID251 - the moment of the kill
        process.send_signal(signal.SIGKILL)
        process.wait()
        if version in site.installed("board-1"):
            paths = {path.relative_to(home / version).as_posix() for path in (home / version).rglob("*.bin")}
            assert paths == {"air/weights.bin"}
            assert (home / version / "air" / "weights.bin").stat().st_size == 8 << 20
        assert install(state, version).returncode == 0
        assert version in site.installed("board-1")

    done = install(state, "0.9.0")
    assert (done.returncode, names_all(done.stderr, "roof", "project publish")) == (2, True)
    site.set_version("0.3.0")
    site.publish()
    wheel = project_wheel(site.site.path, read_index(site.site.path).project_manifests()[-1])
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    done = install(state, "0.3.0")
    assert (done.returncode, names_all(done.stderr, "SHA-256")) == (2, True)
    assert "0.3.0" not in site.installed("board-1")


def test_what_no_board_may_install_is_refused(site, disk):
    """Manifests that were changed or signed elsewhere, a full disk, a second installer, and a revoked board."""
    site.join("board-1")
    state = site.folder / "board-1" / "state"

    def refusal(version: str, *named: str, code: int = 2, state: Path = state) -> None:
        done = install(state, version)
        assert (done.returncode, names_all(done.stderr, *named)) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
        home = state / "projects" / "air"
        assert [path.name for path in home.iterdir() if path.name not in ("lock", "0.1.0")] == []

    site.publish()
    assert install(state, "0.1.0").returncode == 0
    folder = site.site.folder
    [signed] = read_index(folder.path).projects
    other = SiteFolder(site.folder / "other")
    initialise(other, SiteSettings("cellar", ("127.0.0.1",)), now())
    site.set_version("0.3.0")
    site.typed("project", "publish", site.project, "--folder", other.path)
    [foreign] = read_index(other.path).projects
    changed = msgspec.structs.replace(signed, manifest=signed.manifest.replace(b"0.1.0", b"0.2.0"))
    borrowed = msgspec.structs.replace(foreign, certificates=signed.certificates)
    with edit_index(folder) as index:
        write_index(folder, msgspec.structs.replace(index, projects=(signed, changed, foreign)))
    refusal("0.2.0", "changed")
    refusal("0.3.0", "root")
    with edit_index(folder) as index:
        write_index(folder, msgspec.structs.replace(index, projects=(signed, borrowed)))
    refusal("0.3.0", "changed")
    with edit_index(folder) as index:
        write_index(folder, msgspec.structs.replace(index, projects=(signed,)))

    site.set_version("0.4.0")
    site.publish()
    shutil.copytree(state, disk.path / "state", ignore=shutil.ignore_patterns("projects"))
    refusal("0.4.0", "MiB", "free some space", state=disk.path / "state")
    with hold_lock(state / "projects" / "air"):
        refusal("0.4.0", "in use", code=1)
    site.typed("revoke", "board-1", "--folder", folder.path)
    refusal("0.4.0", "roof", "revoked")
