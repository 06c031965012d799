"""TLS errors with a real broker: remedy named, corrected files reloaded."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import Unreachable, Untrusted
from shared.transport.base import Broker, resolve_broker_paths
from shared.transport.mqtt import MqttTransport
from shared.transport.mqtt_connection import Connection, Incoming
from shared.transport.refusals import WANTS_TLS
from shared.transport.tcp_info import Traffic
from shared.transport.tls import EXPIRED, HUNG_UP, NO_TLS, NOT_YET_VALID, TlsSettings, build_context
from tests.edge_server.gateway.enrolments import Authority
from tests.machine import configured
from tests.naming import names_all, naming

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a site's CA with a device, one that is revoked, and one whose certificate is of the past."""
    made = Authority(tmp_path_factory.mktemp("site"))
    for name in ("pi-03", "thief"):
        made.issue(name)
    made.issue("drawer", days=(-300, -100))
    made.revoke("thief")
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return another site's CA, with a device of the same name."""
    made = Authority(tmp_path_factory.mktemp("other"), name="other site")
    made.issue("pi-03")
    return made


@pytest.fixture(scope="module")
def ports(here: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Run brokers with a good certificate, with those of other times, and one without TLS; return their ports."""
    here.issue("broker", file="past", names=["localhost"], days=(-300, -100))
    here.issue("broker", file="future", names=["localhost"], days=(100, 300))
    kinds = {name: here.lines(name) for name in ("broker", "past", "future")} | {"plain": ["allow_anonymous true"]}
    with asyncio.Runner() as runner:
        stack, found = AsyncExitStack(), {}
        for kind, lines in kinds.items():
            started = configured(tmp_path_factory.mktemp(kind), *lines)
            found[kind] = runner.run(stack.enter_async_context(started)).port
        yield found
        runner.run(stack.aclose())


async def connect(broker: Broker, *, dates: bool = True, patience_s: float = PATIENCE_S) -> None:
    """Connect once, and leave."""
    connection = Connection(broker, "pi-03", None, Incoming(lambda *_: None, Traffic()), dates=dates)
    try:
        await connection.open(patience_s)
    finally:
        connection.close()


def refusal(broker: Broker, kind: type[Unreachable] = Untrusted, **options: Any) -> str:
    """Return why a connection fails."""
    with pytest.raises(Unreachable) as caught:
        asyncio.run(connect(broker, **options))
    assert type(caught.value) is kind
    return str(caught.value)


pytestmark = pytest.mark.broker


@pytest.mark.parametrize("version", [5, 3])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_who_has_a_certificate_of_the_site_is_let_in(here, ports, version, host) -> None:
    asyncio.run(connect(Broker(host=host, port=ports["broker"], version=version, tls=here.known_as("pi-03"))))


def test_files_with_a_byte_order_mark_are_read(tmp_path, here, other, ports) -> None:
    """As Notepad saves them; also of several CAs the first, whose block begins behind the mark."""
    known, mark = here.known_as("pi-03"), b"\xef\xbb\xbf"
    paths = {}
    for name in ("ca", "cert", "key"):
        paths[name] = tmp_path / name
        paths[name].write_bytes(mark + Path(getattr(known, name)).read_bytes())
        paths[name].chmod(0o600)
    tls = msgspec.structs.replace(known, **{name: str(path) for name, path in paths.items()})
    asyncio.run(connect(Broker(host="localhost", port=ports["broker"], tls=tls)))
    both = mark + Path(known.ca).read_bytes() + mark + Path(other.known_as("pi-03").ca).read_bytes()
    paths["ca"].write_bytes(both)
    asyncio.run(connect(Broker(host="localhost", port=ports["broker"], tls=tls)))


@pytest.mark.parametrize(("kind", "code"), [("past", EXPIRED), ("future", NOT_YET_VALID)])
def test_dates_are_judged_where_the_clock_may_judge_them(here, ports, kind, code) -> None:
    """Without dates, the chain and the name are still checked."""
    broker = Broker(host="localhost", port=ports[kind], tls=here.known_as("pi-03"))
    with pytest.raises(Untrusted, match=r"20\d\d-\d\d-\d\d") as caught:
        asyncio.run(connect(broker))
    assert caught.value.__cause__.verify_code == code
    asyncio.run(connect(broker, dates=False))
    assert names_all(refusal(msgspec.structs.replace(broker, host="127.0.0.1"), dates=False), "127.0.0.1")


@pytest.mark.parametrize("dates", [True, False])
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("other ca", ["CA", "ca.crt"]),
        ("system's ca", ["CA"]),
        ("other name", ["gateway.local", "`host`", "`server_name`"]),
        ("no certificate", ["`cert`", "`key`"]),
        ("other site's certificate", ["CA", "pi-03.crt"]),
        ("expired", ["drawer.crt"]),
        ("revoked", ["thief.crt"]),
    ],
)
def test_whoever_is_not_trusted_is_told_what_to_mend(here, other, ports, name, named, dates) -> None:
    ours, theirs = here.known_as("pi-03"), other.known_as("pi-03")
    replace = msgspec.structs.replace
    tls = {
        "other ca": replace(ours, ca=theirs.ca),
        "system's ca": replace(ours, ca=""),
        "other name": replace(ours, server_name="gateway.local"),
        "no certificate": replace(ours, cert="", key=""),
        "other site's certificate": replace(theirs, ca=ours.ca),
        "expired": here.known_as("drawer"),
        "revoked": here.known_as("thief"),
    }[name]
    assert names_all(refusal(Broker(host="localhost", port=ports["broker"], tls=tls), dates=dates), *named)


def test_a_name_may_be_another_than_the_address(here, ports) -> None:
    tls = msgspec.structs.replace(here.known_as("pi-03"), server_name="localhost")
    asyncio.run(connect(Broker(host="127.0.0.1", port=ports["broker"], tls=tls)))


def test_tls_where_there_is_none_and_none_where_there_is(here, ports) -> None:
    """What a broker of either kind does at the other's first bytes is its own affair; both ways there is a remedy."""
    plain = Broker(host="localhost", port=ports["plain"], tls=here.known_as("pi-03"))
    with pytest.raises(Unreachable, match=naming("TLS", "port")):
        asyncio.run(connect(plain))
    assert WANTS_TLS in refusal(Broker(host="localhost", port=ports["broker"]), Unreachable)


@asynccontextmanager
async def listening(answer: str) -> AsyncIterator[int]:
    """Listen as something that is no broker; hang up at the first bytes, say something else, or nothing."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer == "silence":
            await reader.read()
        elif answer == "nonsense":
            writer.write(b"220 mail.example ESMTP\r\n" * 10)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("answer", "told"), [("end", HUNG_UP), ("nonsense", NO_TLS), ("silence", "timed out")])
async def test_whatever_happens_in_a_handshake_it_ends_and_says_so(here, answer, told) -> None:
    async with listening(answer) as port:
        with pytest.raises(Unreachable) as caught:
            await connect(Broker(port=port, tls=here.known_as("pi-03")), patience_s=0.5)
        assert told in str(caught.value)


def _spoil_key(folder: Path, other: TlsSettings) -> None:
    shutil.copy(other.key, folder / "own.key")


def _open_key(folder: Path, _other: TlsSettings) -> None:
    (folder / "own.key").chmod(0o644)


def _encrypt_key(folder: Path, _other: TlsSettings) -> None:
    Authority(folder / "else").issue("own", file="own", password="secret")  # noqa: S106
    shutil.copy(folder / "else/own.key", folder / "own.key")


def _remove_key(folder: Path, _other: TlsSettings) -> None:
    (folder / "own.key").unlink()


def _remove_authority(folder: Path, _other: TlsSettings) -> None:
    (folder / "ca.crt").unlink()


def _damage_authority(folder: Path, _other: TlsSettings) -> None:
    (folder / "ca.crt").write_text("no certificate")


def _damage_certificate(folder: Path, _other: TlsSettings) -> None:
    (folder / "own.crt").write_text("no certificate")


def _make_folder(folder: Path, _other: TlsSettings) -> None:
    (folder / "own.crt").unlink()
    (folder / "own.crt").mkdir()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_spoil_key, ["tls.key", "own.key", "own.crt"]),
        (_open_key, ["tls.key", "own.key", "0644", "chmod 600"]),
        (_encrypt_key, ["tls.key"]),
        (_remove_key, ["tls.key", "own.key", "No such file or directory"]),
        (_remove_authority, ["tls.ca", "ca.crt", "No such file or directory"]),
        (_damage_authority, ["tls.ca", "ca.crt"]),
        (_damage_certificate, ["tls.cert", "tls.key", "own.crt", "own.key"]),
        (_make_folder, ["tls.cert", "own.crt", "Is a directory"]),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, other, spoil, named) -> None:
    own = Authority(tmp_path).issue("own")
    build_context(own, dates=True)
    spoil(tmp_path, other.known_as("pi-03"))
    with pytest.raises(Untrusted, match=naming(*named)):
        build_context(own, dates=True)


def test_a_mended_pair_is_taken_without_a_restart(tmp_path, here, other, ports, real, caplog) -> None:
    """Of another site at first: refused, and told of once; then the right one lies there, and later it is renewed."""
    for name in ("crt", "key"):
        shutil.copy(other.folder / f"pi-03.{name}", tmp_path / f"own.{name}")
    ours = TlsSettings(ca=str(here.folder / "ca.crt"), cert=str(tmp_path / "own.crt"), key=str(tmp_path / "own.key"))

    async def story() -> None:
        device = MqttTransport(Broker(host="localhost", port=ports["broker"], tls=ours), "lab.pi-03", steady_s=0.0)
        async with device.running():
            while not any("own.crt" in one for one in caplog.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for name in ("crt", "key"):
                shutil.copy(here.folder / f"pi-03.{name}", tmp_path / f"own.{name}")
            await device.connected.wait()
            here.issue("pi-03", file="renewed")
            for name in ("crt", "key"):
                shutil.copy(here.folder / f"renewed.{name}", tmp_path / f"own.{name}")
            device.connection.client.socket().shutdown(socket.SHUT_RDWR)
            await device.connection.lost
            await device.connected.wait()

    with caplog.at_level(logging.ERROR):
        real(story())
    assert len([one for one in caplog.messages if names_all(one, f"localhost:{ports['broker']}")]) == 1


def test_paths_start_at_the_folder_of_their_file(tmp_path) -> None:
    tls = TlsSettings(ca="ca.crt", cert="own/pi.crt", key="/run/keys/pi.key")
    placed = resolve_broker_paths(Broker(user="pi", password_file="own/word", tls=tls), tmp_path)  # noqa: S106 - a path
    assert placed.password_file == f"{tmp_path}/own/word"
    assert placed.tls == TlsSettings(ca=f"{tmp_path}/ca.crt", cert=f"{tmp_path}/own/pi.crt", key="/run/keys/pi.key")
    assert resolve_broker_paths(Broker(), tmp_path) == Broker()


@pytest.mark.parametrize("half", ["cert", "key"])
def test_half_a_pair_is_refused(half) -> None:
    with pytest.raises(ValueError, match=naming("cert", "key")):
        TlsSettings(**{half: "own.pem"})
