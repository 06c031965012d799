"""Install the packages on a fresh system, learn by a round, upgrade, purge: `make fresh`, `make fresh ARCH=arm64`.

The board is the fresh system; on amd64 the gateway is too, elsewhere it is this checkout. The broker is this machine's
mosquitto, on loopback. Wheels come from a folder, as on a site without internet.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import which
from socket import create_connection, create_server

import numpy as np

from shared.runtime.support.command import find_usual_index
from shared.runtime.support.fetch import bring
from shared.runtime.support.table import System as Kind
from shared.runtime.support.table import choose, read_sets, read_table
from tests.install.roots import BUILD, ROOT, System, fresh, in_own_mounts

KINDS = {"amd64": Kind("x86_64", "3.11"), "arm64": Kind("aarch64", "3.11", lacks="atomics")}
"""As the fresh systems tell of themselves; the second is a Raspberry Pi 4."""
PATIENCE_S = 1800.0
PLAN = """name = "fresh"
rounds = 1
[algorithm]
name = "fedavg"
[model]
name = "mlp"
options = { features = 16, hidden = 8, classes = 2 }
[hyper]
batch_size = 8
learning_rate = 0.1
[cohort]
min_devices = 1
[round]
deadline_s = 1500.0
min_updates = 1
[evaluation]
every = 0
[[device]]
name = "pi-01"
"""


class Steps:
    """What is done, with the seconds that it took."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.commands = 0

    def done(self, told: str, commands: int = 0) -> None:
        """Tell of a step that is done, and of how many commands an operator gave for it."""
        now = time.monotonic()
        self.commands += commands
        sys.stdout.write(f"{now - self.last:7.1f} s  {told}\n")
        sys.stdout.flush()
        self.last = now


def build_packages(arch: str) -> dict[str, dict[str, Path]]:
    """Return the packages by version and side; this version, and the next one to upgrade to."""
    shutil.rmtree(BUILD / "deb" / arch, ignore_errors=True)
    built: dict[str, dict[str, Path]] = {}
    for version in ("", "99.0"):
        out = BUILD / "deb" / arch / (version or "this")
        told = ["--out", str(out), "--arch", arch, *(["--version", version] if version else [])]
        subprocess.run(
            [sys.executable, "deploy/debian/build.py", *told], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        files = sorted(out.glob("*.deb"))
        if which("lintian"):  # Debian's own judge of packages
            command = ["lintian", "--fail-on", "error,warning", *map(str, files)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        built[version] = {path.name.removeprefix("fieldfleet-").partition("_")[0]: path for path in files}
    return built


def fetch_wheels(arch: str, purposes: tuple[str, ...]) -> Path:
    """Return a folder of the wheels that the fresh system will ask for."""
    folder = BUILD / f"{arch}.wheels"
    sources = [*os.environ.get("PIP_FIND_LINKS", "").split(), find_usual_index()]
    for purpose in purposes:
        bring(choose(read_table(), read_sets(), KINDS[arch], purpose).wheels, folder, sources, print)
    return folder


def free_port() -> int:
    """Return a port of loopback that nobody uses."""
    with create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def await_port(port: int) -> None:
    """Wait until somebody listens at a port of loopback."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        with suppress(OSError), create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {port}")


@contextmanager
def plain_site(system: System) -> Iterator[None]:
    """Run a broker of this machine for an emulated board, whose server is this checkout."""
    port, conf = free_port(), system.share / "mosquitto.conf"
    conf.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    write_agent(system, f'device = "pi-01"\nsite = "lab"\n[broker]\nport = {port}\n')
    where = f'plan = "{system.share}/plan.toml"\ndata_dir = "{system.share}/runs"'
    (system.share / "server.toml").write_text(f'{where}\nsite = "lab"\n[broker]\nport = {port}\n')
    command = [which("mosquitto") or "/usr/sbin/mosquitto", "-c", str(conf)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        await_port(port)
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def secure_site(system: System, steps: Steps) -> Iterator[None]:
    """Make a site with its CA on the fresh system, run its broker, and have the board join by a token."""
    port, enrolment, site = free_port(), str(free_port()), "/etc/fieldfleet/site"
    system.run("edge-server", "site", "init", "--name", "lab", "--address", "localhost", "--port", str(port))
    shutil.copy(system.share / "plan.toml", system.root / site[1:])
    steps.done("made a site", 1)
    service = ("edge-server", "enrolment-service", "--port", enrolment)
    with system.running("mosquitto", "-c", f"{site}/mosquitto.conf", user="mosquitto", log=system.share / "broker.log"):
        await_port(port)
        with system.running(*service, user="fieldfleet-server", log=system.share / "enrolment.log"):
            await_port(int(enrolment))
            told = system.run("edge-server", "enrol", "pi-01", "--port", enrolment, "--csv")
            token = next(cell for row in csv.reader(told.splitlines()) for cell in row if cell.startswith("ff1,"))
            (system.share / "token").write_text(token)
            (system.share / "token").chmod(0o644)
            write_agent(system, "")
            system.run("device-agent", "join", "--token-file", "/share/token", user="fieldfleet")
        steps.done("joined by a token", 2)
        yield


def write_agent(system: System, more: str) -> None:
    """Write the board's file; `more` is what a board that joins need not say."""
    head, _, broker = more.partition("[")
    told = f'{head}state_dir = "/var/lib/fieldfleet"\n[data]\nsource = "npz"\npath = "/share/examples.npz"\n'
    (system.root / "etc/fieldfleet/agent.toml").write_text(told + ("[" + broker if broker else ""))


def write_examples(system: System) -> None:
    """Write a plan and some examples of a board."""
    examples = np.random.default_rng(0)
    inputs = examples.normal(size=(64, 16)).astype(np.float32)
    np.savez(system.share / "examples.npz", x=inputs, y=(inputs.sum(1) > 0).astype(np.int64))
    (system.share / "examples.npz").chmod(0o644)
    (system.share / "plan.toml").write_text(PLAN)


def learn(system: System, *, again: bool) -> None:
    """Run the agent as its service does, and a server until its plan is done; check that a round was learned from."""
    words = ["run", "--config", "/etc/fieldfleet/server.toml", *["--again"] * again]
    shown = ["show", "--format", "json", "--data-dir", "/var/lib/fieldfleet-server/runs"]
    agent = ("device-agent", "run", "--config", "/etc/fieldfleet/agent.toml")
    with system.running(*agent, user="fieldfleet", log=system.share / "agent.log"):
        if system.arch == "amd64":
            system.run("edge-server", *words, user="fieldfleet-server")
            runs = sorted((system.root / "var/lib/fieldfleet-server/runs").glob("fresh-*"))
            told = system.run("edge-server", *shown, runs[-1].name, user="fieldfleet-server")
        else:
            words[2] = str(system.share / "server.toml")
            ours = [sys.executable, "-m", "edge_server"]
            subprocess.run([*ours, *words], cwd=ROOT, check=True, timeout=PATIENCE_S, capture_output=True)
            runs = sorted((system.share / "runs").glob("fresh-*"))
            command = [*ours, "show", "--format", "json", "--data-dir", str(system.share / "runs"), runs[-1].name]
            told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    [only] = json.loads(told)["rounds"]
    assert only["arrived"] == ["pi-01"], only


def check(arch: str) -> None:
    """Do it all on one kind of processor."""
    sides = ("agent", "server") if arch == "amd64" else ("agent",)
    purposes = ("train", "server") if arch == "amd64" else ("train",)
    steps = Steps()
    packages = build_packages(arch)
    wheels = fetch_wheels(arch, purposes)
    steps.done("packages are built and wheels fetched")
    with ExitStack() as stack:
        system = stack.enter_context(fresh(arch))
        site = stack.enter_context(ExitStack())
        place_packages(system, packages, wheels, purposes)
        before, accounts = system.files(), system.accounts()
        steps.done(f"a fresh {arch} system")
        install(system, [packages[""][side] for side in sides])
        steps.done(f"installed {', '.join(sides)}: {system.run('device-agent', '--version').strip()}", 1)
        for side, purpose in zip(sides, purposes, strict=True):
            words = ["device-agent", "setup", "train"] if side == "agent" else ["edge-server", "setup"]
            system.run(*words, "--from", "/share/wheels")
            steps.done(f"set up to {purpose}", 1)
        write_examples(system)
        site.enter_context(secure_site(system, steps) if arch == "amd64" else plain_site(system))
        learn(system, again=False)
        steps.done("a round was learned", 2)
        steps.done(f"so far {time.monotonic() - steps.begun:.0f} s and {steps.commands} commands of an operator")
        upgrade(system, [packages["99.0"][side] for side in sides])
        steps.done("upgraded: files of the operator, state and what was set up are kept")
        learn(system, again=True)
        steps.done("a round was learned by the new version")
        site.close()
        system.run("apt-get", "-q", "-y", "purge", *(f"fieldfleet-{side}" for side in sides))
        left = sorted(system.files() - before)
        assert not left, f"a purge leaves {left[:20]}"
        taken = before - system.files() - {"/opt"}  # which dpkg takes where nothing is in it any more
        assert not taken, f"a purge takes what was not the package's: {taken}"
        assert system.accounts() == accounts, "a purge leaves users or groups"
        steps.done("purged: nothing is left")


def place_packages(
    system: System, packages: dict[str, dict[str, Path]], wheels: Path, purposes: tuple[str, ...]
) -> None:
    """Hand the system the packages, and just the wheels that it will ask for."""
    for sides in packages.values():
        for path in sides.values():
            shutil.copy(path, system.share)
    (system.share / "wheels").mkdir()
    for purpose in purposes:
        for wheel in choose(read_table(), read_sets(), KINDS[system.arch], purpose).wheels:
            place = system.share / "wheels" / wheel.file
            if not place.exists():
                shutil.copy(wheels / wheel.file, place)


def install(system: System, packages: list[Path]) -> None:
    """Install packages as an operator does."""
    names = [f"/share/{path.name}" for path in packages]
    system.run("apt-get", "-q", "-y", "install", "--no-install-recommends", *names)


def upgrade(system: System, packages: list[Path]) -> None:
    """Upgrade, and check what is kept and what is gone."""
    config = (system.root / "etc/fieldfleet/agent.toml").read_bytes()
    state = {path.name for path in (system.root / "var/lib/fieldfleet").iterdir()}
    old = (system.root / "opt/fieldfleet/current").readlink()
    install(system, packages)
    assert "99.0" in system.run("device-agent", "--version")
    assert (system.root / "etc/fieldfleet/agent.toml").read_bytes() == config
    assert state == {path.name for path in (system.root / "var/lib/fieldfleet").iterdir()}
    assert not (system.root / "opt/fieldfleet" / old).exists()


def main() -> None:
    """Check what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=KINDS, default="amd64")
    arch = parser.parse_args().arch
    in_own_mounts("tests.install.check")
    check(arch)


if __name__ == "__main__":
    main()
