"""`install.sh` with a faulty gateway, disk or network: it ends with the remedy.

The gateway here is a false one with a true certificate, which answers what a test wants, byte by byte.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import sys
from base64 import b64encode
from contextlib import asynccontextmanager, suppress

import pytest

from edge_server.gateway.enrolment.service import service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.packages.store import PACKAGES, read_index
from shared.protocol.enrolment import MOST_HEAD, format_token
from tests.edge_server.gateway.installing import (
    GUARD_S,
    SCRIPT,
    bare_board,
    install,
    run,
    site_with_package,
    token_of,
)
from tests.naming import names_all

INDEX, ENDLESS = "/packages/index.json", b"\0never"

pytestmark = pytest.mark.skipif(not shutil.which("dash"), reason="dash is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return site_with_package(tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def board(tmp_path):
    return bare_board(tmp_path)


def reply(body=b"", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


def hasty(board, attempts=2):
    """Return a copy of the script that gives up sooner, and waits a hundredth between its attempts."""
    text = SCRIPT.read_text()
    for before, after in (
        ("ATTEMPTS = 30 ", f"ATTEMPTS = {attempts} "),
        ("TIMEOUT_S = 60 ", "TIMEOUT_S = 1 "),
        ("time.sleep(pause_s)", "time.sleep(pause_s / 100)"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    path = board / "hasty.sh"
    path.write_text(text)
    return path


@asynccontextmanager
async def false_gateway(site, answers):
    """Answer as told, by path; what is not told, as the true one would. A list is used up, but for its last."""
    folder, asked = EnrolmentSite(site.path), []
    index = read_index(site.path)
    [build] = index.manifests()[0].builds
    true = {
        "/ca.pem": reply(folder.facts().chain),
        INDEX: reply((site.path / PACKAGES / "index.json").read_bytes()),
        f"/packages/{build.file}": reply((site.path / PACKAGES / build.file).read_bytes()),
    }
    told = {f"/packages/{build.file}" if path == "deb" else path: list(found) for path, found in answers.items()}

    async def answer(reader, writer):
        with suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
            asked.append(path)
            left = told.get(path) or [true[path]]
            said = left.pop(0) if len(left) > 1 else left[0]
            writer.write(said.removesuffix(ENDLESS))
            while said.endswith(ENDLESS):
                writer.write(b"\0")
                await writer.drain()
                await asyncio.sleep(0.05)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(
        answer, "127.0.0.1", 0, ssl=service_context(*folder.pair()), limit=MOST_HEAD, ssl_shutdown_timeout=1
    )
    async with asyncio.timeout(GUARD_S), server:
        yield server.sockets[0].getsockname()[1], asked


def attack(site, board, answers, script=None, **more):
    async def go():
        async with false_gateway(site, answers) as (port, asked):
            line = format_token(token_of(site, port))
            code, said, done = await install(board, line, script=script or hasty(board), **more)
            assert line not in said
            return code, said, done, asked

    code, said, done, asked = asyncio.run(go())
    assert "Traceback" not in said, said
    return code, said, done, asked


def refused(site, board, answers, *named, **more):
    """Check that a message names the values, and that nothing was installed; return the paths that were fetched."""
    code, said, done, asked = attack(site, board, answers, **more)
    assert (code, names_all(said, *named)) == (1, True), said
    assert not any(one.startswith(("apt-get", "device-agent")) for one in done)
    assert "\x1b" not in said
    return asked


def signed_index(site, **change):
    """Return the site's index, with its first package said to be another."""
    found = read_index(site.path)
    manifest = json.loads(found.releases[0].manifest)
    manifest["builds"][0] |= {name: value for name, value in change.items() if name != "version"}
    manifest |= {name: value for name, value in change.items() if name == "version"}
    released = [{"manifest": b64encode(json.dumps(manifest).encode()).decode(), "signature": "", "certificates": ""}]
    return reply(json.dumps({"format": 1, "next_serial": 2, "releases": released, "wheels": []}).encode())


GARBAGE = {
    "nothing": b"",
    "no HTTP": b"\x16\x03\x01 no HTTP at all\r\n\r\n",
    "no status": b"HTTP/1.1 2000 \x1b[2J\r\n\r\n",
    "cut off": b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\nshort",
    "a chunk cut off": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nshort",
    "a chunk of no length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
    "500 headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    "a long line": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "elsewhere": b"HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "nowhere": b"HTTP/1.1 302 Found\r\nLocation: http://[bad\r\nContent-Length: 0\r\n\r\n",
    "until a date": b"HTTP/1.1 503 Busy\r\nRetry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n",
    "before now": b"HTTP/1.1 503 Busy\r\nRetry-After: -5\r\nContent-Length: 0\r\n\r\n",
    "colours": b"HTTP/1.1 429 \x1b[31mred\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n",
    "without end": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n" + ENDLESS,
}


@pytest.mark.parametrize("path", ["/ca.pem", INDEX])
@pytest.mark.parametrize("what", ["no HTTP", "cut off", "a chunk cut off", "elsewhere", "colours", "without end"])
def test_garbage_for_an_answer_is_told_in_a_line(site, board, path, what):
    assert refused(site, board, {path: [GARBAGE[what]]})[-1] == path


def test_a_package_comes_after_all_kinds_of_garbage(site, board):
    """One after the other for the package, and then the package itself."""
    true = site.path / PACKAGES / read_index(site.path).manifests()[0].builds[0].file
    answers = {"deb": [*GARBAGE.values(), reply(true.read_bytes())]}
    code, said, _, asked = attack(site, board, answers, script=hasty(board, attempts=30))
    assert code == 0, said
    assert len(asked) == 2 + len(GARBAGE) + 1
    assert (board / "calls.deb").read_bytes() == true.read_bytes()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"releases":[{"manifest":"ey4="}],"wheels":[]}',
        b'{"releases":3,"wheels":1}',
    ],
    ids=lambda body: str(body[:30]),
)
def test_an_index_that_is_none_is_told_in_a_line(site, board, body):
    assert refused(site, board, {INDEX: [reply(body)]})[-1] == INDEX, "no package was fetched"


@pytest.mark.parametrize(
    ("change", "named", "is_fetched"),
    [
        ({"size": 1 << 40}, 1 << 40, False),
        ({"size": "many"}, "many", False),
        ({"size": 1e300}, int(1e300), False),
        ({"file": "../../etc/passwd"}, "../../etc/passwd", False),
        ({"version": "1\n2"}, ".deb", False),
        ({"sha256": "0" * 64}, ".deb", True),
        ({"size": 100}, ".deb", True),
    ],
    ids=str,
)
def test_an_index_that_names_what_is_no_package_is_not_followed(site, board, change, named, is_fetched):
    asked = refused(site, board, {INDEX: [signed_index(site, **change)]}, named)
    assert (asked[-1] != INDEX) == is_fetched


def test_a_package_comes_through_all_that_ends_before_it(site, board):
    """Cut off again and again, more often than it may bring nothing: each piece counts."""
    [build] = read_index(site.path).manifests()[0].builds
    whole = (site.path / PACKAGES / build.file).read_bytes()
    step = len(whole) // 4 + 1
    pieces = [
        reply(whole[at : at + step], "206 Partial Content" if at else "200 OK", Retry_After="x")
        for at in range(0, len(whole), step)
    ]
    code, said, _, asked = attack(site, board, {"deb": pieces}, script=hasty(board, attempts=1))
    assert code == 0, said
    assert (board / "calls.deb").read_bytes() == whole
    assert hashlib.sha256(whole).hexdigest() == build.sha256
    assert len(asked) == 2 + len(pieces)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS"])
def test_a_disk_that_takes_nothing_is_told_at_once(site, board, error):
    """A limit on what a process may write stands in for a full disk, a folder that is not there for a read-only one."""
    if error == "EROFS":
        refused(site, board, {}, "TMPDIR", TMPDIR=str(board / "not there"))
        return
    limited = board / "limited.sh"
    limited.write_text(f"#!/bin/sh\nulimit -f 100\ntrap '' XFSZ\n{hasty(board).read_text()}")
    refused(site, board, {}, os.strerror(errno.EFBIG), script=limited)


def test_a_folder_of_settings_that_cannot_be_written_is_told(site, board):
    (board / "etc").write_text("a file")
    _, (code, said, done) = run(site, board)
    assert (code, names_all(said, board / "etc")) == (1, True), said
    assert not any(one.startswith("device-agent") for one in done)
    (board / "etc").unlink()
    _, (code, said, _) = run(site, board)
    assert code == 0, said


@pytest.mark.parametrize("address", ["a b:8443", "127.0.0.1/x:8443", "me@127.0.0.1:1", "127.0.0.1:8_443", "[::1:1"])
def test_a_token_with_no_address_is_none(board, address):
    code, said, _ = asyncio.run(install(board, f"ff1,{address},{'A' * 43},aaaaaa,{'A' * 22}"))
    assert (code, names_all(said, "ff1")) == (1, True), said
    assert address not in said, "nothing was asked there"


def test_python_that_comes_first_does_not_eat_the_token(site, board):
    tools = board / "bin"
    (tools / "python3").unlink()
    for name in ("cat", "chmod", "cmp", "cp", "dash", "dirname", "ln", "mkdir", "mktemp", "mv", "rm", "sh"):
        (tools / name).symlink_to(shutil.which(name))
    apt = (tools / "apt-get").read_text()
    came = f'case "$*" in *python3) cat >/dev/null; ln -s {sys.executable} {tools}/python3; exit ;; esac'
    (tools / "apt-get").write_text(apt.replace("\n", f"\n{came}\n", 1))
    _, (code, said, done) = run(site, board, PATH=str(tools))
    assert code == 0, said
    assert any(one.startswith("token ff1,") for one in done)
