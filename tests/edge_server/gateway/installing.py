"""A bare board in a folder, with stand-ins for root's commands, and a gateway for `install.sh` to install from."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.enrolment.tokens import EnrolmentEndpoint, make_token
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.download import DownloadSlots, PackageCatalogue
from edge_server.gateway.packages.store import add_packages
from edge_server.gateway.site_folder import SiteFolder
from shared.protocol.enrolment import Token, format_token
from shared.runtime.clock import utc_seconds
from tests.edge_server.gateway.sites import put_deb

GUARD_S = 300.0
SCRIPT = Path(__file__).parents[3] / "edge_server/gateway/packages/install.sh"
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
STUBS = {
    "id": "echo 0",
    "dpkg": 'case $1 in --print-architecture) echo arm64 ;; --compare-versions) [ "$2" = "$4" ] ;; esac',
    "dpkg-query": '[ -f "$CALLS.installed" ] && cat "$CALLS.installed"',
    "dpkg-deb": "echo 0.4.0+deb12",
    "apt-get": 'for last; do :; done; cp "$last" "$CALLS.deb"; echo 0.4.0+deb12 >"$CALLS.installed"',
    "device-agent": 'case $1 in join) read -r line; echo "token $line" >>"$CALLS" ;; esac; exit "${AGENT_CODE:-0}"',
    "systemctl": ":",
}


def site_with_package(tmp_path: Path) -> SiteFolder:
    """Return a site whose gateway has a package for this machine's Python."""
    folder = SiteFolder(tmp_path / "site")
    initialise(folder, SiteSettings("roof", ("127.0.0.1",)), datetime.fromtimestamp(utc_seconds(), UTC))
    add_packages(folder, [put_deb(tmp_path / "debs", python=HERE, filling=os.urandom(300_000))])
    return folder


def bare_board(tmp_path: Path) -> Path:
    """Return a board's folder, with commands that note what they are asked."""
    tools = tmp_path / "bin"
    tools.mkdir(parents=True)
    for name, body in STUBS.items():
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"$CALLS"\n{body}\n')
        (tools / name).chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    return tmp_path


@asynccontextmanager
async def serving(site: SiteFolder, streams: DownloadSlots | None = None) -> AsyncIterator[int]:
    """Serve a site's boards while the block lasts; yields the port."""
    place = EnrolmentSite(site.path)
    service = EnrolmentService(
        place.registrar(),
        lambda: service_context(*place.pair()),
        packages=PackageCatalogue(site.path),
        downloads=streams or DownloadSlots(),
    )
    async with asyncio.timeout(GUARD_S), service.running("127.0.0.1", 0) as port:
        yield port


def token_of(site: SiteFolder, port: int, *, root: bytes = b"") -> Token:
    """Return a token for a port of this machine.

    Args:
        root: Digest of another root than the site's.
    """
    endpoint = EnrolmentEndpoint("127.0.0.1", port, root or EnrolmentSite(site.path).root_digest())
    made = make_token("pi-01", endpoint, 900.0, utc_seconds())[0]
    return Token(made.host, made.port, made.root, made.id, made.secret)


async def install(
    board: Path, token: str, *options: str, script: Path = SCRIPT, **more: str
) -> tuple[int, str, list[str]]:
    """Run the script; return its code, what it said, and what it had others do."""
    calls = board / "calls"
    calls.unlink(missing_ok=True)
    environment = {
        "PATH": f"{board / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "FIELDFLEET_ETC": str(board / "etc"),
        "FIELDFLEET_STATE": str(board / "state"),
        **more,
    }
    words = ("dash", str(script), *options)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    said, _ = await process.communicate(f"{token}\n".encode())
    done = calls.read_text().splitlines() if calls.exists() else []
    return process.returncode, said.decode(), done


def run(
    site: SiteFolder,
    board: Path,
    *options: str,
    streams: DownloadSlots | None = None,
    change: Callable[[str], str] = lambda line: line,
    **more: str,
) -> tuple[str, tuple[int, str, list[str]]]:
    """Run the script at the site's own service; return the token, and what `install` does.

    Args:
        board: Folder of the board.
        change: Returns what of the token is handed in.
    """

    async def go() -> tuple[str, tuple[int, str, list[str]]]:
        async with serving(site, streams) as port:
            line = format_token(token_of(site, port))
            return line, await install(board, change(line), *options, **more)

    return asyncio.run(go())
