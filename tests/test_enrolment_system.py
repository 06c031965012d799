"""Enrolment by the documented commands, up to the agent's connection."""

from __future__ import annotations

import asyncio
import io
import os
import pwd
import sys
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from device_agent import __main__ as agent_command
from device_agent.commands import join as join_command
from device_agent.config import load
from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.renewal import Renewal, show_certificate
from edge_server import __main__ as server_command
from edge_server.gateway.enrolment.ledger import read_ledger
from edge_server.gateway.enrolment.registrar import MESSAGES
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.revocation.revoke import revoke
from shared.errors import ConfigError
from shared.protocol.enrolment import parse_token
from shared.protocol.topics import topic
from shared.runtime.clock import utc_seconds
from shared.transport.base import Presence
from shared.transport.mqtt import MqttTransport
from shared.transport.reach import find_refusal
from shared.transport.tls import ALERTS
from tests.edge_server.gateway.sites import LiveSite, make_site, now
from tests.machine import needs_mosquitto
from tests.naming import naming

GUARD_S = 300.0
DAY_S = 86_400.0
IN_USE = Path(credentials.FOLDER, credentials.CURRENT, credentials.CERTIFICATE)


def typed(main, *words, stdin="") -> tuple[int, str, str]:
    """Run a command in this process as a shell would; return its code and what it says."""
    out, err = io.StringIO(), io.StringIO()
    mask = os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["command", *map(str, words)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
    os.umask(mask)
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@asynccontextmanager
async def enrolling(site: LiveSite, utc_s=utc_seconds):
    """Run the enrolment service of a site on loopback; yields what makes tokens for it."""
    enrolment = EnrolmentSite(site.path, utc_s=utc_s)
    service = EnrolmentService(enrolment.registrar(), lambda: service_context(*enrolment.pair()))

    async with service.running("127.0.0.1", 0) as port:

        async def token(name: str, *more: str) -> str:
            words = ("enrol", name, "--folder", site.path, "--port", port, *more)
            code, said, why = await asyncio.to_thread(typed, server_command.main, *words)
            assert code == 0, why
            return said.strip()

        yield token


@asynccontextmanager
async def whole_site(folder: Path):
    """Run broker and enrolment service of a site that is reached as 127.0.0.1."""
    site = make_site(folder)
    initialise(site.folder, SiteSettings(addresses=("127.0.0.1",)), now())
    await site.start()
    try:
        async with asyncio.timeout(GUARD_S), enrolling(site) as token:
            yield site, token
    finally:
        assert site.process
        site.process.terminate()
        await site.process.wait()


def agent_file(folder: Path, text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "agent.toml"
    path.write_text(f'state_dir = "state"\n{text}[data]\nsource = "digits"\n')
    return path


async def join(path: Path, token: str, *more: object) -> tuple[int, str, str]:
    words = ("join", "-", "--config", path, *more)
    return await asyncio.to_thread(typed, agent_command.main, *words, stdin=f"{token}\n")


async def refusal(path: Path) -> str:
    """Return why the broker refuses what an agent's file says, if it does."""
    config = load(path)
    dates = BoardClock.of(Path(config.state_dir)).may_judge()
    own = topic(config.site, config.device, "report")
    return await find_refusal(config.broker, config.device, own, dates=dates)


@needs_mosquitto
@pytest.mark.broker
async def test_a_board_joins_by_a_token_is_shut_out_by_revocation_and_joins_again(tmp_path):
    async with whole_site(tmp_path) as (site, token):
        path = tmp_path / "board/agent.toml"  # which is made
        path.parent.mkdir()
        line = await token("pi-03")
        code, said, why = await join(path, line, "--data", tmp_path / "own.npz")
        assert code == 0, why
        assert parse_token(line).secret not in said + why
        config = load(path)
        assert (config.state_dir, path.stat().st_mode & 0o777) == (str(tmp_path / "board/state"), 0o644)
        assert (config.examples.source, config.examples.path) == ("npz", str(tmp_path / "own.npz"))
        assert (config.device, config.site, config.broker.port) == ("pi-03", "roof", site.door.port)
        assert await refusal(path) == ""
        other = agent_file(tmp_path / "other")
        code, said, why = await join(other, line)
        assert (code, MESSAGES["used"] in why) == (2, True)
        assert not (await revoke(site.folder, "pi-03", now())).faults
        assert await refusal(path)
        code, said, why = await join(path, await token("pi-03", "--readmit"))
        assert code == 0, why
        assert await refusal(path) == ""
        states = [one.state(0.0) for one in read_ledger(site.path).tokens.values()]
        assert states == ["closed", "closed"]


@needs_mosquitto
@pytest.mark.broker
async def test_a_certificate_is_renewed_and_shown_to_the_broker_before_it_is_used(tmp_path):
    """By a handshake that a running session of the board does not notice; a revoked one the broker does not take."""
    site = make_site(tmp_path)
    initialise(site.folder, SiteSettings(addresses=("127.0.0.1",)), now())
    ahead = [0.0]
    await site.start()
    try:
        async with asyncio.timeout(GUARD_S), enrolling(site, lambda: utc_seconds() + ahead[0]) as token:
            path = agent_file(tmp_path / "board")
            code, _, why = await join(path, await token("pi-03"))
            assert code == 0, why
            config = load(path)
            state, clock = Path(config.state_dir), BoardClock.of(Path(config.state_dir))
            renewal = Renewal(state, clock, partial(show_certificate, clock=clock), config.broker)
            before = (state / IN_USE).read_bytes()
            presence = Presence(topic("roof", "pi-03", "status"), b"", b"")
            async with MqttTransport(config.broker, "pi-03", lambda: presence, dates=clock.may_judge).running() as own:
                await own.connected.wait()
                assert not await renewal.look()
                ahead[0] = 260 * DAY_S
                assert await renewal.look()
                assert own.connections == 1
                assert own.connected.is_set()
            assert (state / IN_USE).read_bytes() != before
            assert await refusal(path) == ""
            assert await show_certificate(config.broker, clock) == ""
            await revoke(site.folder, "pi-03", now())
            said = await show_certificate(config.broker, clock)
            assert ALERTS["CERTIFICATE_REVOKED"].format(cert=config.broker.tls.cert) in said
    finally:
        assert site.process
        site.process.terminate()
        await site.process.wait()


@needs_mosquitto
@pytest.mark.broker
async def test_what_the_boards_file_says_of_itself_holds(tmp_path):
    async with whole_site(tmp_path) as (_, token):
        wrong = agent_file(tmp_path / "wrong", 'device = "pi-04"\n')
        line = await token("pi-03")
        code, _, why = await join(wrong, line)
        assert code == 2, why
        right = agent_file(tmp_path / "right", 'device = "pi-03"\nsite = "roof"\n[broker]\nkeepalive_s = 30\n')
        code, _, why = await join(right, line)  # it was not bound to the other board
        assert code == 0, why
        config = load(right)
        assert config.broker.keepalive_s == 30
        assert config.broker.tls == credentials.make_tls(
            Path(config.state_dir) / credentials.FOLDER / credentials.CURRENT
        )
        right.write_text(right.read_text().replace("roof", "barn"))
        with pytest.raises(ConfigError, match=naming("site", "'barn'")):
            load(right)
        right.write_text('state_dir = "state"\n[broker]\nhost = "192.0.2.1"\n[data]\nsource = "digits"\n')
        assert load(right).broker.host == "192.0.2.1"  # whoever names a broker means it


def test_a_token_is_read_from_where_no_process_list_shows_it(tmp_path):
    line = "ff1,gateway.local:8443,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA,aaaaaa,AAAAAAAAAAAAAAAAAAAAAA"
    file = tmp_path / "token"
    file.write_text(f"{line}\n")
    expected = parse_token(line)
    assert join_command.read_token("-", file) == expected
    assert join_command.read_token(line, None) == expected
    path = agent_file(tmp_path / "board")
    for token, code in (("ff1,nonsense", 2), (line.replace("gateway.local:8443", "127.0.0.1:1"), 5)):
        found, said, why = typed(agent_command.main, "join", "-", "--config", path, stdin=token)
        assert found == code
        assert "AAAAAAAAAA" not in said + why
    for place, code in (("none.toml", 5), ("none/agent.toml", 2)):  # no file but for a board that has joined
        assert typed(agent_command.main, "join", "-", "--config", tmp_path / place, stdin=line)[0] == code
        assert not (tmp_path / place).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is other users")
def test_root_joins_in_the_name_of_the_agents_user():
    with TemporaryDirectory() as name:
        folder, nobody = Path(name), pwd.getpwnam("nobody")
        folder.chmod(0o755)
        path = agent_file(folder / "board")
        (path.parent / "state").mkdir(mode=0o700)
        os.chown(path.parent / "state", nobody.pw_uid, nobody.pw_gid)
        line = "ff1,127.0.0.1:1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA,aaaaaa,AAAAAAAAAAAAAAAAAAAAAA"
        assert typed(agent_command.main, "join", "-", "--config", path, stdin=line)[0] == 5
        assert (os.geteuid(), os.getegid()) == (0, 0)
        made = list((path.parent / "state").rglob("*"))
        assert len(made) > 1
        assert {(one.stat().st_uid, one.stat().st_gid) for one in made} == {(nobody.pw_uid, nobody.pw_gid)}
