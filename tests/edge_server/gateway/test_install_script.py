"""`install.sh` in dash against a real enrolment service: trust, installation, errors.

Root's commands (apt, dpkg, systemctl) are small stand-ins that write down what they were asked; on fresh
systems `make fresh` runs the real ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess  # noqa: TID251 - runs a linter
import tomllib
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from edge_server.__main__ import build_parser
from edge_server.cli.gateway.enrol import enrol
from edge_server.gateway.authority import Subject, issue, make_key, make_root, make_site, public_key_of
from edge_server.gateway.certificate_files import newest_root
from edge_server.gateway.enrolment.registrar import SiteInfo
from edge_server.gateway.packages.download import DownloadSlots, install_script
from edge_server.gateway.packages.store import PACKAGES, add_wheels, read_index
from edge_server.gateway.rotation.root import rotate_root
from shared.protocol.enrolment import format_token
from shared.runtime.clock import utc_seconds
from tests.edge_server.gateway.enrolments import NOW, Gateway, authorities, server_context
from tests.edge_server.gateway.enrolments import serving as answering
from tests.edge_server.gateway.installing import (
    HERE,
    SCRIPT,
    bare_board,
    install,
    run,
    serving,
    site_with_package,
    token_of,
)
from tests.machine import find_pythons
from tests.naming import names_all

pytestmark = pytest.mark.skipif(not shutil.which("dash"), reason="dash is not installed")


@pytest.fixture
def site(tmp_path):
    return site_with_package(tmp_path)


@pytest.fixture
def board(tmp_path):
    return bare_board(tmp_path)


def test_a_bare_board_becomes_a_device(site, board):
    line, (code, said, done) = run(site, board, "--data", "/srv/my examples")
    assert code == 0, said
    [build] = read_index(site.path).manifests()[0].builds
    assert (board / "calls.deb").read_bytes() == (site.path / PACKAGES / build.file).read_bytes()
    assert (board / "etc/upgrades.pem").read_bytes() == (site.path / "ca/root.crt").read_bytes()
    ours = [one for one in done if one.startswith(("apt-get", "device-agent", "token"))]
    assert ours[0].startswith("apt-get install -y")
    assert ours[1:] == [
        f"device-agent join --config {board / 'etc/agent.toml'} --data /srv/my examples -",
        f"token {line}",
        "device-agent setup train",
    ]
    assert not any(line in one for one in done if not one.startswith("token"))  # of no command line


def test_the_same_again_is_no_harm_and_an_edited_file_stays(site, board):
    run(site, board)
    (board / "etc/agent.toml").write_text("mine = 1\n")
    (board / "etc/upgrades.pem").write_text("of another site\n")
    _, (code, said, done) = run(site, board, "--no-setup")
    assert code == 0, said
    assert (board / "etc/agent.toml").read_text() == "mine = 1\n"
    assert (board / "etc/upgrades.pem").read_bytes() == (site.path / "ca/root.crt").read_bytes()
    assert names_all(said, board / "etc/upgrades.pem")
    assert not any(one.startswith(("apt-get", "device-agent setup")) for one in done)


def test_setup_takes_the_gateways_wheels_where_it_has_them(site, board):
    (board / "wheels").mkdir()
    (board / "wheels" / "numpy-2-py3-none-any.whl").write_bytes(b"numpy")
    add_wheels(site, board / "wheels")
    _, (code, said, done) = run(site, board, "--infer")
    assert code == 0, said
    [setup] = [one for one in done if one.startswith("device-agent setup")]
    assert setup.startswith("device-agent setup infer --index https://127.0.0.1:")
    assert setup.endswith(f"/packages/wheels --ca {board / 'etc/upgrades.pem'}")
    written = tomllib.loads((board / "etc/agent.toml").read_text())
    assert written == {"state_dir": str(board / "state"), "serve": {}}


def test_another_ca_than_the_tokens_is_believed_nothing(site, board):
    async def go():
        async with serving(site) as port:
            return await install(board, format_token(token_of(site, port, root=hashlib.sha256(b"other").digest())))

    code, said, done = asyncio.run(go())
    assert code == 1
    assert names_all(said, "https://127.0.0.1", "edge-server site check")
    assert all(one.startswith(("id", "dpkg --print")) for one in done)
    assert not (board / "etc").exists()


def test_a_package_that_is_not_what_was_signed_is_not_installed(site, board):
    [path] = (site.path / PACKAGES).glob("*.deb")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    _, (code, said, done) = run(site, board)
    assert code == 1
    assert names_all(said, path.name, "edge-server site check")
    assert not any(one.startswith("apt-get") for one in done)


def test_a_download_that_is_cut_off_goes_on_where_it_was(site, board):
    class Cut(DownloadSlots):
        """Hangs up in the middle of its first download."""

        async def send(self, writer, download):
            begun.append(download.begin)
            if len(begun) == 1:
                with download.path.open("rb") as file:
                    writer.write(file.read(100_000))
                await writer.drain()
                raise ConnectionError("cut off")
            await super().send(writer, download)

    begun: list[int] = []
    _, (code, said, _) = run(site, board, streams=Cut())
    assert code == 0, said
    assert begun[0] == 0
    assert begun[-1] > 0


@pytest.mark.parametrize(
    ("options", "change", "named"),
    [
        ((), lambda line: line[:-30], "ff1"),
        ((), lambda line: line[:-2], "ff1"),
        ((), lambda line: line[:-7], "ff1"),
        ((), lambda line: line + "A" * 4, "ff1"),
        ((), lambda _: "nonsense", "ff1"),
        ((), lambda _: "", "ff1"),
        (("ff1,secret",), lambda line: line, "echo TOKEN"),
        (("--quick",), lambda line: line, "--quick"),
        (("--data",), lambda line: line, "--data"),
    ],
)
def test_a_wrong_token_or_option_is_refused(site, board, options, change, named):
    _, (code, said, done) = run(site, board, *options, change=change)
    assert code == 1
    assert names_all(said, named)
    assert not any(one.startswith(("apt-get", "device-agent")) for one in done)


def test_a_gateway_without_a_package_for_this_board_says_which_it_has(site, board):
    (board / "bin" / "dpkg").write_text("#!/bin/sh\necho riscv64\n")
    _, (code, said, _) = run(site, board)
    assert code == 1
    assert names_all(said, "riscv64", HERE, "arm64", "edge-server packages add")


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_a_system_whose_python_is_too_old_is_told_of_the_container(site, board, version):
    """Such as JetPack 5's; the gateway may have packages enough."""
    old = next(iter(find_pythons(version)), None)
    if old is None:
        pytest.skip(f"there is no Python {version} on this machine")
    (board / "bin" / "python3").unlink()
    (board / "bin" / "python3").symlink_to(old)
    _, (code, said, done) = run(site, board)
    assert code == 1
    assert names_all(said, version, "deploy/container/README.md")
    assert not any(one.startswith(("apt-get", "device-agent")) for one in done)


def test_nobody_who_answers_and_a_join_that_fails_are_told(site, board):
    async def alone():
        async with serving(site) as port:
            line = format_token(token_of(site, port))
        return await install(board, line)

    code, said, _ = asyncio.run(alone())
    assert (code, names_all(said, "https://127.0.0.1", "fieldfleet-enrolment")) == (1, True)
    _, (code, said, done) = run(site, board, AGENT_CODE="5")
    assert code == 1
    assert done[-1].startswith("token"), "joining was the last step"
    assert not any(one.startswith(("device-agent setup", "systemctl")) for one in done)


def test_enrol_prints_the_line_that_does_it(site, board, capsys):
    """The very line, by a real shell and curl: nothing is run that is not the script of this gateway."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")

    async def go(spoil):
        async with serving(site) as port:
            enrol(
                options := build_parser().parse_args(
                    ["enrol", "pi-01", "--folder", str(site.path), "--install", "--port", str(port)]
                )
            )
            assert options.device == "pi-01"
            line = spoil(capsys.readouterr().out.strip().replace("sudo sh", "sh"))
            environment = {
                "PATH": f"{board / 'bin'}:{os.environ['PATH']}",
                "CALLS": str(board / "calls"),
                "FIELDFLEET_ETC": str(board / "etc"),
            }
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *("dash", "-c", line), stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=board
            )
            said, _ = await process.communicate()
            return process.returncode, said.decode()

    digest = hashlib.sha256(install_script()).hexdigest()
    code, said = asyncio.run(go(lambda line: line.replace(digest, digest[::-1])))
    assert code != 0, said
    assert not (board / "calls").exists()
    code, said = asyncio.run(go(lambda line: line))
    assert code == 0, said
    assert "device-agent setup train" in (board / "calls").read_text()


def test_no_linter_has_anything_against_it():
    assert install_script() == SCRIPT.read_bytes()
    linter = shutil.which("shellcheck")
    if not linter:
        pytest.skip("shellcheck is not installed")
    words = [linter, "--shell=dash", SCRIPT]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - a file of ours
    assert done.returncode == 0, done.stdout


def test_a_token_of_the_next_root_installs_while_the_gateway_shows_the_copy_by_the_one_before(site, board):
    asyncio.run(rotate_root(site, datetime.fromtimestamp(utc_seconds(), UTC)))
    _, (code, said, _) = run(site, board)
    assert code == 0, said
    assert (board / "etc/upgrades.pem").read_bytes() == newest_root(site.ca(""))


def test_an_authority_that_the_tokens_root_did_not_sign_is_not_believed(board, tmp_path):
    """Who stands between offers the site's own root, and with it a CA that another root signed."""
    gateway = Gateway()
    false_ca, pair = false_gateway()
    root = authorities()[1]
    gateway.registrar.site = lambda: SiteInfo("roof", false_ca + root, "127.0.0.1", 8883)

    async def go():
        async with answering(gateway, server_context(tmp_path / "gw", pair)) as port:
            token = replace(gateway.token(), port=port)
            return await install(board, format_token(token))

    code, said, done = asyncio.run(go())
    assert code == 1
    assert "verify failed" in said
    assert not any(one.startswith(("apt-get", "device-agent")) for one in done)


def false_gateway():
    """Return the certificate of a CA of nobody's, and the pair of a gateway that it signed."""
    at = datetime.fromtimestamp(NOW, UTC)
    root_key, root = make_root("roof", at, 10)
    key, ca = make_site(root_key, root, "roof", at, 10)
    own = make_key()
    subject = Subject("gateway", "gateway", "roof", ("127.0.0.1",))
    return ca, (own, issue(key, ca, public_key_of(own), subject, 300, at).certificate + ca)
