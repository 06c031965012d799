"""Downloads for boards over real TLS: ranges, limits, fairness to enrolment."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime

import msgspec
import pytest

from edge_server.gateway.enrolment.registrar import Request
from edge_server.gateway.enrolment.service import EnrolmentService
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.download import (
    Download,
    DownloadSlots,
    PackageCatalogue,
    find_range,
    install_script,
    open_file,
)
from edge_server.gateway.packages.store import PACKAGES, add_packages, add_wheels, read_index, remove_packages
from edge_server.gateway.site_folder import SiteFolder
from shared.errors import Unreachable
from shared.protocol.enrolment import parse_head
from shared.runtime.support.fetch import download_wheels
from shared.runtime.support.table import Wheel
from tests.edge_server.gateway.enrolments import Gateway, authorities, new_key, request_of, server_context
from tests.edge_server.gateway.sites import put_deb

GUARD_S = 300.0
NOW = datetime(2026, 11, 23, tzinfo=UTC)
TORCH = "torch-2.10.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl"
BIG = 96 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site with a package and two wheels."""
    place = tmp_path_factory.mktemp("gateway")
    folder = SiteFolder(place / "site")
    initialise(folder, SiteSettings("roof", ("gateway.local",)), NOW)
    add_packages(folder, [put_deb(place, filling=bytes(range(256)) * 40)])
    (place / "wheels").mkdir()
    (place / "wheels" / TORCH).write_bytes(b"torch" * 1000)
    (place / "wheels" / "typing_extensions-4-py3-none-any.whl").write_bytes(b"typing")
    add_wheels(folder, place / "wheels")
    return folder


@pytest.fixture(scope="module")
def name(site):
    return read_index(site.path).manifests()[0].builds[0].file


@asynccontextmanager
async def running(gateway, tmp_path, site, **terms):
    service = EnrolmentService(
        gateway.registrar,
        lambda: server_context(tmp_path),
        GUARD_S,
        packages=PackageCatalogue(site.path),
        downloads=DownloadSlots(**terms),
    )
    async with asyncio.timeout(GUARD_S), service.running("127.0.0.1", 0) as port:
        yield service, port


def trusting():
    return ssl.create_default_context(cadata=authorities()[1].decode())


async def hang_up(writer):
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def ask(port, path, *headers):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    try:
        writer.write("\r\n".join([f"GET {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        await hang_up(writer)
    first, found = parse_head(head + b"\r\n\r\n")
    return int(first.split()[1]), found, body


def fetch(tmp_path, site, *requests):
    async def go():
        async with running(Gateway(), tmp_path, site) as (_, port):
            return [await ask(port, *one) for one in requests]

    return asyncio.run(go())


def test_the_index_its_files_and_parts_of_them(tmp_path, site, name):
    whole = (site.path / PACKAGES / name).read_bytes()
    index, package, rest, last, beyond, several = fetch(
        *(tmp_path, site, ("/packages/index.json",), (f"/packages/{name}",)),
        (f"/packages/{name}", "Range: bytes=100-"),
        (f"/packages/{name}", "Range: bytes=-7"),
        (f"/packages/{name}", f"Range: bytes={len(whole)}-"),
        (f"/packages/{name}", "Range: bytes=0-1,5-6"),
    )
    assert index[0] == 200
    assert json.loads(index[2])["releases"][0]["certificates"].count("BEGIN CERTIFICATE") == 2
    assert (package[0], package[2]) == (200, whole)
    assert package[1]["etag"].strip('"') == hashlib.sha256(whole).hexdigest()
    assert (rest[0], rest[2]) == (206, whole[100:])
    assert rest[1]["content-range"] == f"bytes 100-{len(whole) - 1}/{len(whole)}"
    assert (last[0], last[2]) == (206, whole[-7:])
    assert beyond[0] == 416
    assert (several[0], several[2]) == (200, whole)


def test_nothing_but_what_the_index_names_is_there(tmp_path, site, name):
    (site.path / PACKAGES / "secret.deb").write_bytes(b"not in the index")
    paths = [
        *("/packages/", "/packages/secret.deb", "/packages/../state.json", "/packages/%2e%2e/ca/site.key"),
        *("/packages/wheels/../index.json", "/packages/wheels/", "/packages/wheels/nothing/", "/packages//etc/passwd"),
        *(f"/packages/./{name}", f"/packages/wheels/{name}", "/packages/%00", "/packages/" + "a" * 4000),
        *("/packages/wheels/" + "%" * 99 + "/", "/packages/wheels/Torch/", "/install.sh/", "/packages/.packages.lock"),
    ]
    for path, (status, _, body) in zip(paths, fetch(tmp_path, site, *((one,) for one in paths)), strict=True):
        assert status == 404, path
        assert json.loads(body)["reason"] == "malformed"


@pytest.mark.parametrize("what", ["a link", "a pipe", "a folder"])
def test_what_has_become_no_plain_file_is_not_there(tmp_path, site, name, what):
    """Neither when it is looked for, nor if it becomes that before it is opened."""
    path = site.path / PACKAGES / name
    whole = path.read_bytes()
    find = PackageCatalogue(site.path).find
    assert isinstance(find(Request("GET", f"/packages/{name}")), Download)
    (tmp_path / "key").write_bytes(b"a key")
    path.unlink()
    try:
        {
            "a link": lambda: path.symlink_to(tmp_path / "key"),
            "a pipe": lambda: os.mkfifo(path),
            "a folder": path.mkdir,
        }[what]()
        assert find(Request("GET", f"/packages/{name}")).status == 404
        with pytest.raises((OSError, Unreachable)):
            open_file(path)
    finally:
        path.rmdir() if what == "a folder" else path.unlink()
        path.write_bytes(whole)


def test_what_is_taken_away_is_gone_at_once(tmp_path):
    folder = SiteFolder(tmp_path / "site")
    initialise(folder, SiteSettings("roof", ("gateway.local",)), NOW)
    shelf = PackageCatalogue(folder.path)
    assert json.loads(shelf.find(Request("GET", "/packages/index.json")).body)["releases"] == []
    [manifest] = add_packages(folder, [put_deb(tmp_path)])
    path = f"/packages/{manifest.builds[0].file}"
    assert isinstance(shelf.find(Request("GET", path)), Download)
    remove_packages(folder, "0.4.0")
    assert shelf.find(Request("GET", path)).status == 404


def test_other_paths_and_methods_are_not_its_own(site):
    shelf = PackageCatalogue(site.path)
    assert shelf.find(Request("GET", "/ca.pem")) is None
    assert shelf.find(Request("POST", "/packages/index.json")) is None
    assert shelf.find(Request("GET", "/install.sh")).body == install_script()


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("", (0, 10)),
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 3)),
        ("bytes=3-99", (3, 7)),
        ("bytes=9-9", (9, 1)),
        ("bytes=10-", None),
        ("bytes=-3", (7, 3)),
        ("bytes=-99", (0, 10)),
        ("bytes=-0", None),
        ("bytes=5-3", (0, 10)),
        ("bytes=-", (0, 10)),
        ("bytes=a-", (0, 10)),
        ("bytes=0-1,3-4", (0, 10)),
        ("lines=0-1", (0, 10)),
        ("bytes=" + "9" * 99 + "-", (0, 10)),
    ],
)
def test_a_range_is_as_http_has_it(header, part):
    assert find_range(header, 10) == part


def test_a_part_of_a_file_is_always_within_it():
    for whole in range(1, 12):
        for begin in range(-1, 14):
            for end in range(-1, 14):
                text = f"bytes={begin if begin >= 0 else ''}-{end if end >= 0 else ''}"
                if part := find_range(text, whole):
                    assert 0 <= part[0] < part[0] + part[1] <= whole


async def test_setup_takes_its_wheels_from_the_gateway_and_goes_on_where_it_was(tmp_path, site, monkeypatch):
    """By the very code of `device-agent setup`, with the site's CA; a half file is completed by its rest alone."""
    body = b"torch" * 1000
    wheel = Wheel(file=TORCH, bytes=len(body), unpacked=1, sha256=hashlib.sha256(body).hexdigest())
    into = tmp_path / "came"
    into.mkdir()
    (into / f"{TORCH}.part").write_bytes(body[:1234])
    (tmp_path / "root.pem").write_bytes(authorities()[1])
    said = []
    async with running(Gateway(), tmp_path, site) as (service, port):
        index = f"https://127.0.0.1:{port}/packages/wheels"
        await asyncio.to_thread(download_wheels, [wheel], into, [index], said.append, str(tmp_path / "root.pem"))
        assert service.downloads.sent == len(body) - 1234
    assert (into / TORCH).read_bytes() == body


def test_readers_that_read_nothing_hold_up_nobody(tmp_path, site, name):
    """As many as there is room for ask for a large file and do not read: they get what buffers hold, no more of them
    are served, and a board joins beside them."""
    path = site.path / PACKAGES / name
    before = path.read_bytes()
    os.truncate(path, BIG)  # its size counts here alone
    gateway = Gateway()
    token = gateway.token()
    body = msgspec.json.encode({"token": token.id, "secret": token.secret, "request": request_of(new_key()).decode()})

    async def stuck(stack, port):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=trusting(), server_hostname="127.0.0.1", limit=8 << 10
        )
        stack.push_async_callback(hang_up, writer)
        writer.write(f"GET /packages/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        return await reader.readuntil(b"\r\n\r\n"), reader  # who forgets the reader hangs up

    async def go():
        async with running(gateway, tmp_path, site, most=6, most_each=6) as (service, port), AsyncExitStack() as stack:
            heads = [await stuck(stack, port) for _ in range(6)]
            refused = await ask(port, f"/packages/{name}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
            writer.write(b"POST /join HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            joined = await reader.read()
            await hang_up(writer)
            return heads, refused, joined, service.downloads.sent

    try:
        heads, refused, joined, sent = asyncio.run(go())
    finally:
        path.write_bytes(before)
    assert all(head.startswith(b"HTTP/1.1 200 OK") for head, _ in heads)
    assert (refused[0], json.loads(refused[2])["reason"]) == (503, "busy")
    assert int(refused[1]["retry-after"]) > 0
    assert joined.startswith(b"HTTP/1.1 200 OK")
    assert sent < 6 * BIG / 2


def test_who_reads_too_slowly_is_hung_up_on_and_makes_room(tmp_path, site, name):
    path = site.path / PACKAGES / name
    before = path.read_bytes()
    os.truncate(path, BIG)

    async def go():
        async with running(Gateway(), tmp_path, site, stall_s=0.2, most=1) as (service, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(), limit=1 << 10)
            writer.write(f"GET /packages/{name} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            while service.downloads.slots.slots:  # noqa: ASYNC110 - the service, in this loop, hangs up by itself
                await asyncio.sleep(0)
            await hang_up(writer)
            return (await ask(port, f"/packages/{name}", "Range: bytes=-9"))[0]

    try:
        assert asyncio.run(go()) == 206
    finally:
        path.write_bytes(before)


def test_a_page_of_a_project_is_as_pip_reads_it(site):
    page = PackageCatalogue(site.path).find(Request("GET", "/packages/wheels/torch/"))
    [file] = json.loads(page.body)["files"]
    assert file["filename"] == TORCH
    assert file["url"] == "../" + TORCH.replace("+", "%2B")
    assert re.fullmatch("[0-9a-f]{64}", file["hashes"]["sha256"])
    found = json.loads(PackageCatalogue(site.path).find(Request("GET", "/packages/wheels/typing-extensions/")).body)
    assert found["files"][0]["filename"].startswith("typing_extensions")
