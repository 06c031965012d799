"""Secrets never appear in files, messages, logs or process lists."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import sys
import tarfile
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from device_agent import __main__ as agent_command
from device_agent.config import load
from edge_server.fleet import broker
from edge_server.gateway.packages.store import PACKAGES
from edge_server.plan.data import device_data
from edge_server.rounds.check_plan import load as load_plan
from shared.protocol.enrolment import format_token, parse_token
from shared.runtime.processes import terminate
from tests.device_agent.commands.test_doctor import FINE
from tests.edge_server.gateway.installing import bare_board, run, site_with_package
from tests.edge_server.gateway.sites import LiveSite, put_deb
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import TINY, captured, folder_of, started, until
from tests.edge_server.sites.test_peers_config import hashed
from tests.machine import free_port, grow, needs_mosquitto
from tests.test_enrolment_system import agent_file, typed, whole_site

PATIENCE_S = 300.0
PRIVATE = 0o600


@dataclass
class Canaries:
    """Secrets, in each form in which a program might let them out, and the files in which alone they may stand."""

    forms: dict[bytes, str] = field(default_factory=dict)
    homes: set[Path] = field(default_factory=set)

    def add(self, name: str, raw: bytes) -> None:
        """Look for some bytes, also as numbers and as base64, from whichever byte that begins."""
        for form in (raw, raw.hex().encode(), raw.hex().upper().encode(), repr(raw).encode()):
            self.forms[form] = name
        for skipped in range(3):
            usable = raw[skipped : skipped + (len(raw) - skipped) // 3 * 3]
            for coded in (b64encode(usable), b64encode(usable, b"-_")):
                self.forms[coded] = name

    def add_key(self, path: Path) -> None:
        """Look for a private key: its number, and the lines of its file that have some of it (the last is public)."""
        self.homes.add(path.resolve())
        pem = path.read_bytes()
        key = serialization.load_pem_private_key(pem, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.add(path.name, key.private_numbers().private_value.to_bytes(32, "big"))
        for line in pem.splitlines()[1:3]:
            self.forms[line] = path.name

    def found_in(self, data: bytes) -> set[str]:
        """Return which secrets stand in some bytes."""
        return {name for form, name in self.forms.items() if form in data}

    def found_below(self, folder: Path) -> list[str]:
        """Return which files, or names of files, have secrets that they should not."""
        found = []
        for path in sorted(folder.rglob("*")):
            leaks = self.found_in(str(path).encode())
            if path.is_file() and path.resolve() not in self.homes:
                leaks |= self.found_in(content_of(path))
            found += [f"{path.relative_to(folder)}: {one}" for one in sorted(leaks)]
        return found


def content_of(path: Path) -> bytes:
    """Return what is in a file, and in the files that are packed into it."""
    if not path.name.endswith(".tar.gz"):
        return path.read_bytes()
    with tarfile.open(path) as archive:
        parts = [archive.extractfile(one) for one in archive.getmembers()]
        return b"\n".join([*(name.encode() for name in archive.getnames()), *(part.read() for part in parts if part)])


@dataclass
class ProcessList:
    """Command lines and environments of all that this process started, as they were seen."""

    lines: set[bytes] = field(default_factory=set)

    def look(self) -> bool:
        """See what runs now; return true, so that it can be part of a wait."""
        for process in psutil.Process().children(recursive=True):
            try:
                self.lines.add(b"\0".join(one.encode() for one in process.cmdline()))
                self.lines.add(b"\0".join(f"{key}={value}".encode() for key, value in process.environ().items()))
            except psutil.Error:
                continue
        return True

    def has(self, word: str) -> bool:
        """Tell whether a command line with that word was seen."""
        return any(word.encode() in line for line in self.lines)


@asynccontextmanager
async def strict_broker(site: LiveSite, passwords: dict[str, str]) -> AsyncIterator[int]:
    """Run a broker that wants a certificate of the site and a password; yields its port."""
    folder, port, own = site.path.parent, free_port(), site.folder.broker_paths()
    (folder / "passwords").write_text("".join(f"{user}:{hashed(one)}\n" for user, one in passwords.items()))
    (folder / "passwords").chmod(PRIVATE)
    lines = [
        f"listener {port} 127.0.0.1",
        *(f"cafile {own.trusted}", f"certfile {own.certificate}", f"keyfile {own.key}", f"crlfile {own.revoked}"),
        *("require_certificate true", "allow_anonymous false", f"password_file {folder}/passwords"),
        *([f"user {own.user}"] if own.user else []),
    ]
    (folder / "strict.conf").write_text("\n".join([*lines, ""]))
    with (folder / "strict.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(broker.find_mosquitto()), "-v", "-c", str(folder / "strict.conf")), stdout=log, stderr=log
        )
    try:
        await broker.wait_until_listening(process, port, folder / "strict.log")
        yield port
    finally:
        await terminate(process)


@dataclass
class Scene:
    """A site with one board, that takes part in a round by certificate and password.

    Attributes:
        folder: All that is written is in it.
        canaries: What must not be found.
    """

    folder: Path
    canaries: Canaries = field(default_factory=Canaries)
    seen: ProcessList = field(default_factory=ProcessList)
    said: list[str] = field(default_factory=list)
    passwords: dict[str, str] = field(default_factory=dict)

    @property
    def agent(self) -> Path:
        return self.folder / "board" / "agent.toml"

    @property
    def server(self) -> Path:
        return self.folder / "server.json"

    async def join(self, token: str) -> None:
        """Join as a process, with the token where nobody sees it."""
        secret = parse_token(token).secret
        self.canaries.add("token", b64decode(secret + "==", b"-_"))
        self.canaries.forms[secret.encode()] = "token"
        agent_file(self.agent.parent)
        (self.folder / "token").write_text(token)
        self.canaries.homes.add(self.folder / "token")
        words = ("join", "--token-file", self.folder / "token", "--config", self.agent)
        log = self.folder / "join.log"
        with started("device_agent", *words, log=log) as process:
            await asyncio.to_thread(
                until, lambda: self.seen.look() and process.poll() is not None, "the board joins", PATIENCE_S
            )
        assert process.returncode == 0, log.read_text()
        for key in self.folder.rglob("*.key"):
            self.canaries.add_key(key)

    def broker(self, user: str, port: int, tls: object) -> dict[str, object]:
        """Return a broker's settings for somebody, with a new password's file."""
        path = self.folder / f"{user}.password"
        path.touch(mode=PRIVATE)
        path.write_text(self.passwords[user])
        self.canaries.homes.add(path)
        return {"port": port, "user": user, "password_file": str(path), "tls": msgspec.to_builtins(tls)}

    def configure(self, port: int, site: LiveSite) -> None:
        """Write the files of server and board."""
        plan = write_plan(
            self.folder,
            rounds=1,
            **TINY | {"cohort": "min_devices = 1", "more": f'{TINY["more"]}\n[[device]]\nname = "pi-03"'},
        )
        places = {"data_dir": str(self.folder / "runs"), "data_root": str(self.folder)}
        ours = site.at(site.folder.gateway("edge-server"), port).tls
        server = {"site": "roof", "plan": str(plan), "threads": 1, "log_level": "debug", **places}
        self.server.write_text(json.dumps(server | {"broker": self.broker("edge-server", port, ours)}))
        data = msgspec.to_builtins(device_data(load_plan(plan, self.folder), load_plan(plan, self.folder).device, 0))
        board = {"state_dir": str(self.agent.parent / "state"), "data": data, "log_level": "debug"}
        board |= {"trainer": {"threads": 1}, "broker": self.broker("pi-03", port, load(self.agent).broker.tls)}
        (self.agent.parent / "agent.json").write_text(json.dumps(board))

    def learn(self) -> None:
        """Run the plan, and watch who runs."""
        here, log = self.agent.parent / "agent.json", self.folder / "server.log"
        with started("device_agent", "run", "--config", here, log=self.folder / "agent.log"):
            with started("edge_server", "run", "--config", self.server, log=log) as server:
                until(lambda: self.seen.look() and server.poll() is not None, "the run ends", PATIENCE_S)
            assert server.returncode == 0, log.read_text()

    def bundle(self, site: LiveSite, libraries: Path) -> None:
        """Write a bundle on each side, of logs in which somebody else has written all secrets."""
        token, own = (self.folder / "token").read_text().strip(), self.agent.parent / "state/identity/current"
        keys = {"pi-03": own / "device.key", "edge-server": site.folder.gateway("edge-server.key")}
        for user, password in self.passwords.items():
            told = [f"it is {password}, is it?", f"joins by {token}", keys[user].read_text(), "the end"]
            (self.folder / f"{user}.log").write_text("\n".join(told))
            self.canaries.homes.add(self.folder / f"{user}.log")
        for name in ("agent.log", "pi-03.log"):
            here, out = self.agent.parent / "agent.json", self.folder / f"board-{name}.tar.gz"
            words = ("support-bundle", "--config", here, "--out", out, "--log", self.folder / name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(libraries))
                code, said, why = typed(agent_command.main, *words)
            assert code == 0, why
            self.said.append(said + why)
            assert b"the end" in content_of(out) or name == "agent.log"
        logs = [
            word for name in ("server.log", "strict.log", "edge-server.log") for word in ("--log", self.folder / name)
        ]
        places = ("--config", self.server, "--folder", site.path, "--out", self.folder / "server.tar.gz")
        self.call("support-bundle", *places, *logs)
        assert b"the end" in content_of(self.folder / "server.tar.gz")

    def sign(self, site: LiveSite) -> None:
        """Have the gateway sign a package, say what it has, and compare all of it with what it signed."""
        assert site.folder.gateway("packages.key").resolve() in self.canaries.homes
        self.call("packages", "add", put_deb(self.folder / "debs"), "--folder", site.path)
        self.call("packages", "list", "--folder", site.path)
        self.call("packages", "list", "--folder", site.path, "--format", "json")
        assert list((site.path / PACKAGES).glob("*.deb"))

    def call(self, *words: object) -> None:
        """Have a command of the server say what it says."""
        ended = captured(*words)
        assert ended.code == 0, ended.err
        self.said.append(ended.out + ended.err)


@pytest.fixture
def libraries(tmp_path) -> Path:
    """Return a folder of libraries that the doctor has tried at once."""
    return grow(tmp_path / "libraries", FINE)


@needs_mosquitto
@pytest.mark.broker
@pytest.mark.slow
async def test_secrets_are_nowhere_but_in_their_own_files(tmp_path, libraries):
    """Neither in logs, records, traces, settings and bundles, nor in command lines and environments of what ran."""
    scene = Scene(tmp_path)
    for user in ("pi-03", "edge-server"):
        scene.passwords[user] = secrets.token_urlsafe(15)
        scene.canaries.add(f"password of {user}", scene.passwords[user].encode())
    async with whole_site(tmp_path) as (site, token):
        await scene.join(await token("pi-03"))
        async with strict_broker(site, scene.passwords) as port:
            scene.configure(port, site)
            await asyncio.to_thread(scene.learn)
            await asyncio.to_thread(
                scene.call, "trace", "export", folder_of(tmp_path / "runs"), "--out", tmp_path / "trace"
            )
            await asyncio.to_thread(scene.call, "devices", "--config", scene.server, "--format", "json")
            await asyncio.to_thread(scene.call, "enrol", "--list", "--folder", site.path)
            await asyncio.to_thread(scene.sign, site)
            await asyncio.to_thread(scene.bundle, site, libraries)
    assert all(scene.seen.has(word) for word in ("device_agent", "edge_server", "--token-file", "mosquitto"))
    assert {name for line in scene.seen.lines for name in scene.canaries.found_in(line)} == set()
    assert {name for line in scene.said for name in scene.canaries.found_in(line.encode())} == set()
    assert scene.canaries.found_below(tmp_path) == []


WITNESS = """#!/bin/sh
{ echo "$0 $*"; env; } >>"$CALLS.seen"
"""
"""What each command that the script starts writes down first: what others can see of it."""


@pytest.mark.skipif(not shutil.which("dash"), reason="dash is not installed")
@pytest.mark.parametrize(
    ("way", "code"),
    [("joins", 0), ("does not join", 1), ("another CA", 1), ("a word before it", 1), ("damaged package", 1)],
)
def test_install_sh_hands_its_token_to_the_join_alone(tmp_path, caplog, way, code):
    """Neither to a command line or an environment, nor into a file, also none that is gone at its end; nor aloud."""
    caplog.set_level("DEBUG")
    site, board = site_with_package(tmp_path), bare_board(tmp_path / "board")
    (board / "tmp").mkdir()
    for tool in [*(board / "bin").iterdir()]:
        body = f'exec {sys.executable} "$@"\n' if tool.name == "python3" else tool.read_text().partition("\n")[2]
        tool.unlink()
        copies = 'cp -r "$TMPDIR" "$CALLS.work"\n' if tool.name == "apt-get" else ""
        tool.write_text(f"{WITNESS}{copies}{body}")
        tool.chmod(0o755)
    if way == "damaged package":
        [package] = (site.path / PACKAGES).glob("*.deb")
        package.write_bytes(package.read_bytes()[::-1])
    canaries = Canaries({}, {board / "calls"})

    def handed_in(line: str) -> str:
        token = parse_token(line)
        canaries.add("token", b64decode(token.secret + "==", b"-_"))
        canaries.forms |= {token.secret.encode(): "token", token.secret[:16].encode(): "token"}
        if way == "another CA":
            return format_token(replace(token, root=bytes(32)))
        return f"is{line}" if way == "a word before it" else line

    joins = {"AGENT_CODE": "1"} if way == "does not join" else {}
    _, (ended, said, done) = run(site, board, change=handed_in, TMPDIR=str(board / "tmp"), **joins)
    assert ended == code, said
    is_told = [word for word in done if canaries.found_in(word.encode())]
    assert [word.partition(" ")[0] for word in is_told] == ["token"] * (way in ("joins", "does not join"))
    assert canaries.found_in(said.encode()) | canaries.found_in(caplog.text.encode()) == set()
    assert canaries.found_below(tmp_path) == []
    assert "python3 -I" in (board / "calls.seen").read_text()
    assert (board / "calls.work").exists() == (way in ("joins", "does not join"))


def test_a_secret_that_is_let_out_is_found(tmp_path):
    """In whichever form: so that the test above can find something."""
    canaries, raw = Canaries(), secrets.token_bytes(16)
    canaries.add("word", raw)
    for number, leak in enumerate((raw, raw.hex().encode(), b64encode(b"x" + raw), b64encode(b"xy" + raw + b"z"))):
        (tmp_path / f"log-{number}").write_bytes(b"2026 " + leak + b"\n")
    (tmp_path / "log-9").write_bytes(secrets.token_bytes(64))
    assert canaries.found_below(tmp_path) == [f"log-{number}: word" for number in range(4)]
    canaries.homes |= {tmp_path / f"log-{number}" for number in range(4)}
    assert canaries.found_below(tmp_path) == []
