"""Time and bytes of a collaborative inference request over a slow link; needs root.

VGG-16 cut behind its second block: an agent in a network namespace runs what lies below, `edge-server serve-tops` at
the other end what lies above, and one application asks over the Unix socket, one picture at a time, as soon as it was
answered. Compared are 128 x 8 x 8 features as they are, in half their bytes, and by 8 bits a magnitude. Of the link's
rate the payload gets 95.6 %, since a token bucket counts whole packets; BURST passes at once after a silence.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import netns
import numpy as np
from inference import alternate, released
from measure import Figure, NotRun, Row
from resume import Site

from device_agent.commands.bench_inference import encode_request, time_requests
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.session import open_model
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError
from shared.protocol.inference.release import read_manifest

NETWORK, CUT, MBIT, BURST = "vgg16", 4, 5, "4kb"
QUICK_NETWORK, QUICK_CUT = "lenet", 1
CODECS: dict[str, dict[str, object]] = {
    "dense": {"codec": "dense"},
    "float16": {"codec": "float16"},
    "8 bits": {"codec": "quantize", "bits": 8},
}
SPENT_S, QUICK_S, FIRST_S, PATIENCE_S = 8.0, 0.5, 0.05, 60.0
PARTS = {"on the device": "device_s", "on the link": "link_s", "at the server": "server_s"}


@dataclass
class Cut(Site):
    """A site whose one board runs the lower half of a release.

    Attributes:
        release: Its name, and its folder's in the site's.
        cut: How the upper half is asked, as `[serve.cut]` has it.
    """

    release: str = NETWORK
    cut: dict[str, object] = field(default_factory=dict)

    @property
    def socket(self) -> str:
        """Where applications on the board ask."""
        return str(self.folder / "a" / "serve.sock")

    def _server(self) -> list[str]:
        keys: dict[str, object] = {"plan": "none.toml", "site": "lab", "data_dir": str(self.folder / "runs")}
        *words, _run, option, path = self._ours("edge_server", "server", keys, self.port)
        return [*words, "serve-tops", option, path]

    def _agent(self, port: int) -> list[str]:
        cut = {"deadline_s": PATIENCE_S, **self.cut}
        serve = {"port": 0, "releases": [str(self.folder / self.release)], "split": "cut", "cut": cut}
        keys: dict[str, object] = {"device": "a", "site": "lab", "state_dir": str(self.folder / "a"), "serve": serve}
        return [*self.prefix, *self._ours("device_agent", "agent", keys, port)]


def statistics_of(path: str, name: str) -> dict[str, Any]:
    """Return what a model of an inference process says of its parts.

    Args:
        path: Of the Unix socket.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"GET /v2/models/{name}/stats HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    told_: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["model_stats"][0]["parameters"]["cut"]
    return told_


async def answered(site: Cut, request: bytes) -> None:
    """Wait until both halves answer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await asyncio.to_thread(time_requests, site.socket, request, FIRST_S)
            except (ConfigError, OSError):
                await asyncio.sleep(0.1)
            else:
                return


async def cut_over_link(
    folder: Path, files: ReleaseFiles, cut: dict[str, object], seconds: float
) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds of an application's requests, and what the board says of their parts.

    Args:
        folder: With the release, and the server's.
        cut: As `[serve.cut]` has it.
        seconds: For how long it is asked.
    """
    request = encode_request(files.name, read_manifest(files.manifest, "manifest").graph.input, 1)
    with netns.slow_link(f"{MBIT}mbit", burst=BURST) as link:
        port = 20_000 + os.getpid() % 20_000
        site = Cut(folder, port, link.address, link.prefix, release=files.name, cut=cut)
        try:
            for name in ("broker", "server", "agent"):
                await site.start(name, port)
            await answered(site, request)
            taken = await asyncio.to_thread(time_requests, site.socket, request, seconds)
            return taken, statistics_of(site.socket, files.name)
        finally:
            await site.close()


def alone(files: ReleaseFiles, seconds: float) -> float:
    """Return the median seconds of the whole network here, one picture at a time on one thread."""
    model = open_model(files.manifest, files.parts, InferenceSettings(port=0, socket="", memory_bytes=1 << 31))
    inputs = np.ones((1, *model.input.shape[1:]), model.input.dtype)
    [taken] = alternate((lambda: model.run(inputs),), seconds)
    return statistics.median(taken)


def run(*, quick: bool = False) -> list[Row]:
    """Measure, where a link can be shaped; quickly the smallest network and one codec."""
    if reason := netns.lack():
        return [NotRun("collaborative inference, over a slow link", reason)]
    network, cut, seconds = (QUICK_NETWORK, QUICK_CUT, QUICK_S) if quick else (NETWORK, CUT, SPENT_S)
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="cut-") as name:
        files, _ = released(network, Path(name), cut=cut)
        rows.append(Figure(f"{network} whole, one thread, p50", alone(files, seconds) * 1e3, "ms"))
        for codec in list(CODECS)[: 1 if quick else None]:
            taken, parts = asyncio.run(cut_over_link(Path(name), files, CODECS[codec], seconds))
            rows += figures(f"{network} cut, {MBIT} Mbit/s, {codec}", taken, parts)
    return rows


def figures(what: str, taken: list[float], parts: dict[str, Any]) -> list[Figure]:
    """Return the rows of one way.

    Args:
        what: The way, in words.
        taken: Seconds of requests, as the application saw them.
        parts: As the board tells them.
    """
    count = parts["answered"]["server"]
    up, down = parts["bytes_up"] / count, parts["bytes_down"] / count
    at_rate_s = (up + down) * 8 / (MBIT * 1e6 * netns.PAYLOAD_SHARE)
    return [
        Figure(f"{what}: a request, p50", statistics.median(taken) * 1e3, "ms"),
        *(Figure(f"{what}: {where}, p50", parts[key]["p50"] * 1e3, "ms") for where, key in PARTS.items()),
        Figure(f"{what}: bytes up", up / 1e3, "kB"),
        Figure(f"{what}: bytes down", down / 1e3, "kB"),
        Figure(f"{what}: these at the link's rate", at_rate_s * 1e3, "ms"),
    ]
