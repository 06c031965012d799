"""Test site with a real mosquitto, and raw MQTT clients as boards.

The packages hold next to nothing, and are made as `dpkg-deb` makes them, without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import pwd
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from edge_server.fleet.broker import find_mosquitto
from edge_server.gateway.authority import Role, Subject, make_key, public_key_of
from edge_server.gateway.broker_probe import BrokerEndpoint, ProbeConnection, open_probe
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.reload import broker_endpoint
from edge_server.gateway.site_folder import SiteFolder, make_broker_files, sign
from edge_server.gateway.state import lock_site, read_state, write_state
from shared.errors import Unreachable
from shared.runtime import malloc
from shared.runtime.clock import utc_seconds
from shared.runtime.processes import terminate
from shared.transport.base import Broker
from shared.transport.tls import TlsSettings
from tests.machine import free_port

GUARD_S = 300.0
"""What hangs is an error."""


def now() -> datetime:
    return datetime.fromtimestamp(utc_seconds(), UTC)


@dataclass
class LiveSite:
    """A site on loopback.

    Attributes:
        folder: Its folder; the broker runs as whoever runs the tests.
    """

    folder: SiteFolder
    process: asyncio.subprocess.Process | None = None

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def door(self) -> BrokerEndpoint:
        return broker_endpoint(self.folder, read_state(self.path))

    def enrol(self, name: str, role: Role = "device") -> Path:
        """Sign a certificate for a board, or a peer; return the path of its pair without the ending."""
        key = make_key()
        with lock_site(self.path):
            state = read_state(self.path)
            state, chain = sign(self.folder, state, Subject(name, role, state.site), public_key_of(key), now())
            write_state(self.path, state)
        pair = self.path.parent / f"{name}-{hashlib.sha256(key).hexdigest()[:8]}"
        pair.with_suffix(".key").write_bytes(key)
        pair.with_suffix(".key").chmod(0o600)
        pair.with_suffix(".crt").write_bytes(chain)
        return pair

    def at(self, pair: Path, port: int) -> Broker:
        """Return the site's broker for whoever has a pair."""
        tls = TlsSettings(ca=str(self.folder.ca("root.crt")), cert=f"{pair}.crt", key=f"{pair}.key")
        return Broker(host="127.0.0.1", port=port, tls=tls)

    def for_board(self, name: str, role: Role = "device") -> Broker:
        """Return the broker for a board that is enrolled now, or for another site's server."""
        return self.at(self.enrol(name, role), read_state(self.path).port)

    def for_server(self) -> Broker:
        """Return the broker for this site's server."""
        return self.at(self.folder.gateway("own-server"), read_state(self.path).servers_port)

    def renew_files(self) -> None:
        """Write what the broker reads, as who is enrolled now wants it."""
        with lock_site(self.path):
            make_broker_files(self.folder, read_state(self.path))

    def tell_refusals(self) -> None:
        """Have the broker log, from its next start, what it does not take."""
        with (self.path / "mosquitto.conf").open("a") as file:
            file.write("log_type debug\n")

    def refusals(self) -> list[str]:
        """Return what of anybody's words the broker did not take."""
        return [line for line in self.log().splitlines() if "Denied" in line]

    async def start(self) -> None:
        """Start the broker; return when it serves."""
        with (self.path.parent / "broker.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(str(find_mosquitto()), "-c", str(self.path / "mosquitto.conf")),
                stdout=log,
                stderr=log,
                env={**os.environ, **malloc.ENVIRONMENT},  # as the private broker has: benchmarks compare the two
            )
        while self.process.returncode is None:
            if await self.lets_in(self.folder.gateway("probe")):  # it listens before it has read its files
                return
            await asyncio.sleep(0.02)
        raise Unreachable(self.log())

    async def stop(self) -> None:
        """End the broker."""
        assert self.process
        await terminate(self.process)

    def log(self) -> str:
        """Return what the broker has logged."""
        return (self.path.parent / "broker.log").read_text()

    async def lets_in(self, pair: Path | None) -> bool:
        """Tell whether the broker accepts who comes with a pair."""
        try:
            async with open_probe(self.door, pair):
                return True
        except Unreachable:
            return False

    async def shuts_out(self, pair: Path) -> None:
        """Return when the broker accepts who comes with a pair no more."""
        while await self.lets_in(pair):  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)

    async def is_open(self) -> bool:
        """Tell whether the broker lets the probe do what the access list does not."""
        async with open_probe(self.door, self.folder.gateway("probe")) as probe:
            return await speaks(probe, "fieldfleet/v1/roof/_probe/forbidden")

    async def listens(self) -> bool:
        """Tell whether anybody listens at the site's port."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.door.port)
        except OSError:
            return False
        writer.close()
        return True


def make_site(
    path: Path, name: str = "roof", *, address: str = "gateway.local", at: datetime | None = None
) -> LiveSite:
    """Make the folder of a site on a free port of loopback.

    Args:
        path: In which it is made.
        address: Under which boards reach it, beside those of this machine.
        at: What its gateway's clock reads; None for this machine's.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    folder = SiteFolder(path / "site", user, user)
    initialise(folder, SiteSettings(name, (address,), free_port(), "127.0.0.1", free_port()), at or now())
    return LiveSite(folder)


@asynccontextmanager
async def live_site(path: Path) -> AsyncIterator[LiveSite]:
    """Run a site's broker while the block lasts."""
    site = make_site(path)
    await site.start()
    try:
        yield site
    finally:
        await site.stop()


async def speaks(caller: ProbeConnection, topic: str) -> bool:
    """Tell whether the broker takes a publication."""
    return not await caller.publish(topic)


FORMATS = 'FORMATS: Mapping[str, int] = {"journal": 1, "releases": 2}\n'
CONTROL = """Package: {name}
Version: {version}+deb12
Architecture: {arch}
Depends: python3 (>= {python}~), adduser
Description: an agent
 Architecture: of a line that goes on
"""


def packed(members: dict[str, str | bytes], links: dict[str, str] | None = None, kind: str = "xz") -> bytes:
    """Return a tar archive of files and symbolic links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{kind}") as tar:
        for name, text in members.items():
            data = text.encode() if isinstance(text, str) else text
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
        for name, target in (links or {}).items():
            about = tarfile.TarInfo(name)
            about.type, about.linkname = tarfile.SYMTYPE, target
            tar.addfile(about)
    return out.getvalue()


def archive(parts: dict[str, bytes]) -> bytes:
    """Return an ar archive."""
    found = b"!<arch>\n"
    for name, data in parts.items():
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}".encode() + b"`\n" + data
        found += b"\n" * (len(data) % 2)
    return found


def deb(
    version: str = "0.4.0",
    arch: str = "arm64",
    python: str = "3.11",
    *,
    name: str = "fieldfleet-agent",
    filling: bytes = b"",
    formats: str | bytes = FORMATS,
) -> bytes:
    """Return a package."""
    home = f"./opt/fieldfleet/{version}"
    files: dict[str, str | bytes] = {f"{home}/lib/filling": filling}
    if formats:
        files[f"{home}/lib/common/device_agent/upgrade/state_formats.py"] = formats
    control = CONTROL.format(name=name, version=version, arch=arch, python=python)
    return archive(
        {
            "debian-binary": b"2.0\n",
            "control.tar.xz": packed({"./control": control}),
            "data.tar.xz": packed(files, {"./opt/fieldfleet/current": version}),
        }
    )


def put_deb(folder: Path, version: str = "0.4.0", arch: str = "arm64", python: str = "3.11", **more: object) -> Path:
    """Write a package into a folder, under the name that `make deb` gives it; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fieldfleet-agent_{version}+deb12_{arch}.deb"
    path.write_bytes(deb(version, arch, python, **more))  # type: ignore[arg-type]
    return path
