"""Build the agent's image by its Dockerfile and run it, where there is no container engine: `make image [ARCH=arm64]`.

The image's root is a bare Debian 12 in which the Dockerfile's instructions are run one by one, on arm64 by an emulated
processor. The container joins a gateway, says what it hides of the board, and trains three rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.install.check import BOARD, Fleet, Operator, learn, serve
from tests.install.parts import (
    build_packages,
    chosen_wheels,
    fetch_wheels,
    hand,
    kind_of,
    make_release,
    write_examples,
)
from tests.install.roots import (
    GATEWAY,
    ROOT,
    System,
    fresh,
    in_own_mounts,
    make_base,
    require_tools,
    show_outside,
    without_network,
)

DOCKERFILE = ROOT / "deploy" / "container" / "agent.Dockerfile"


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile with what follows it."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def build(system: System, context: Path, told: dict[str, str]) -> tuple[str, list[str]]:
    """Run the instructions of the Dockerfile in a system; return the user and the command of its containers.

    Args:
        system: A bare one.
        context: The folder that COPY takes files from.
        told: Values of its arguments.
    """
    user, command, known = "", list[str](), dict[str, str]()
    for word, rest in instructions(DOCKERFILE):
        if word == "ARG":
            name, _, usual = rest.partition("=")
            known[name] = told.get(name, usual.strip('"'))
        elif word == "COPY":
            pattern, place = rest.replace("${TARGETARCH}", known["TARGETARCH"]).split()
            for source in context.glob(pattern):
                shutil.copy(source, system.root / place.lstrip("/"))
        elif word == "RUN":
            words = [f"{name}={value}" for name, value in known.items()]
            system.run("/usr/bin/env", *words, "sh", "-c", rest)
        elif word == "USER":
            user = rest
        elif word == "CMD":
            command = json.loads(rest)
    return user, command


@contextmanager
def index(wheels: Path) -> Iterator[str]:
    """Serve a folder of wheels as an index that pip could use, on loopback; yield its address."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            project = self.path.strip("/")
            if "/" in project or project.endswith(".whl"):
                super().do_GET()
                return
            names = [one.name for one in wheels.glob("*.whl") if _project(one.name) == project]
            body = "".join(f'<a href="/{name}">{name}</a>' for name in names).encode()
            self.send_response(200 if names else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(wheels))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _project(file: str) -> str:
    return file.split("-", maxsplit=1)[0].replace("_", "-").replace(".", "-").lower()


def check(arch: str) -> None:
    """Build and run the image for one kind of processor."""
    begun, server, kind = time.monotonic(), kind_of("amd64", "12"), kind_of(arch, "12")
    packages = {"server": build_packages("server", "amd64"), "agent": build_packages("agent", arch)}
    places = fetch_wheels(server, "server"), chosen_wheels(server, "server")
    wheels, release = fetch_wheels(kind, "train"), make_release()
    bases = make_base("amd64"), make_base(arch)
    gateway, board = fresh(bases[0], f"gateway-image-{arch}", "amd64"), fresh(bases[1], f"image-{arch}", arch)
    hand(gateway, packages["server"], places)
    shutil.copytree(release, board.share / "release")
    context = board.share / "context"
    (context / "build/deb").mkdir(parents=True)
    shutil.copy(packages["agent"][""], context / "build/deb")
    (board.root / "etc/apt/apt.conf.d/90root").write_text('APT::Sandbox::User "root";\n')
    (board.root / "etc/resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
    operator, begun = Operator(), time.monotonic()
    with index(wheels) as address:
        user, command = build(board, context, {"TARGETARCH": arch, "INDEX": address})
    (board.root / ".dockerenv").touch()
    operator.tells(f"the image for {arch} is built", begun)
    without_network()
    fleet = Fleet(gateway, board, packages, ExitStack())
    with fleet.services:
        for words in (
            ("apt-get", "-q", "-y", "install", f"/share/{packages['server'][''].name}", "mosquitto"),
            ("edge-server", "setup", "--from", "/share/wheels"),
            ("edge-server", "site", "init", "--name", "roof", "--address", GATEWAY),
        ):
            operator.types("gateway", gateway, *words)
        fleet.run_site()
        token = operator.types("gateway", gateway, "edge-server", "enrol", BOARD).strip()
        write_examples(board.root / "srv/examples.npz")
        show_outside(board, "/srv")
        operator.types("container", board, "device-agent", "join", token, "--data", "/srv/examples.npz")
        printed = board.run("device-agent", "doctor", "--format", "json")
        found = json.loads(printed[printed.index("[") : printed.rindex("]") + 1])
        told = [one for one in found if one["name"] in ("container", "torch")]
        operator.tells("; ".join(f"{one['name']}: {one['finding']}" for one in told), time.monotonic())
        assert {one["name"] for one in told} == {"container", "torch"}, found
        with board.running(*command, user=user, log=board.share / "agent.log"):
            learn(operator, fleet)
        serve(operator, fleet)
        operator.tells("the container trained three rounds and served", operator.began)


def main() -> None:
    """Check what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("amd64", "arm64"), default="amd64")
    options = parser.parse_args()
    require_tools(options.arch)
    in_own_mounts("tests.install.image")
    check(options.arch)


if __name__ == "__main__":
    sys.exit(main())
