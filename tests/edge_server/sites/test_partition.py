"""Network partition between two sites with real brokers; needs root.

Each decides round after round, `python -m tests.edge_server.sites.test_partition SITE HOST PORT HOST PORT FOLDER`.
"""

from __future__ import annotations

import asyncio
import subprocess  # noqa: TID251 - a partition is between processes
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.hcef_budget import Place
from edge_server.fleet import broker
from edge_server.journal.decision import Coordinated, Decision, DeviceDecision, Granted, Pledged, TermBegan
from edge_server.journal.records import AnyRecord
from edge_server.sites.cases import ROUND_JOULES
from edge_server.sites.coordinate import Coordination
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links, SitePresence
from edge_server.sites.site_energy import SiteEnergy
from shared.protocol.measurements import Cost
from shared.runtime.executor import inline
from shared.transfer.receiver import Policy
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.benchmarks import netns
from tests.machine import free_port, needs_mosquitto

ROOT, MODULE = Path(__file__).parents[3], "tests.edge_server.sites.test_partition"
ORDER, ALLOWANCE, ROUNDS, KEEPALIVE_S, DEADLINE_S, PAUSE_S = ("north", "south"), 100.0, 1000, 1, 2.0, 0.2
STOP, HANGS_S = "stop", 600


def decide(case: Case) -> Decision:
    """Give every device the same part of the joules; it will need half of that."""
    each = case.limits[ROUND_JOULES] / len(case.names)
    return Decision(devices=dict.fromkeys(case.names, DeviceDecision(predicted=Cost(compute_joules=each / 2))))


async def main(site: str, ours: Broker, theirs: Broker, folder: Path) -> None:
    """Decide one round after the other until told to stop; journal as a line each."""
    peer = next(one for one in ORDER if one != site)
    births, journal = SitePresence(site, peer, f"run-{site}", site, b"{}"), (folder / f"{site}.jsonl").open("ab", 0)

    async def keep(record: AnyRecord) -> None:
        journal.write(msgspec.json.encode(record) + b"\n")

    home, away = MqttTransport(ours, f"{site}._peers"), MqttTransport(theirs, f"{peer}._peer-{site}", births.presence)
    links, clock = Links(site, home, {peer: away}, b"{}"), asyncio.get_running_loop().time
    us = SiteIdentity(site, ORDER, births.run, folder, DEADLINE_S)
    services = SiteServices(keep, decide, Policy(4, 1.0, 1 << 20), clock, inline)
    place = lambda number: Place(number - 1, ROUNDS)  # noqa: E731 - one line
    energy = SiteEnergy(us, services, place, ALLOWANCE, ALLOWANCE * len(ORDER))
    coordination = Coordination(us, links, services, energy, {one: (f"{one}-1",) for one in ORDER})
    async with home.running(), away.running(), links.listening():
        for number in range(1, ROUNDS + 1):
            case = Case((f"{site}-1",), {ROUND_JOULES: 1.0, "spent_joules": 0.0})
            await coordination.decide(case, number)
            await asyncio.sleep(PAUSE_S)
            if (folder / STOP).exists():
                return


def records(folder: Path, site: str) -> list[AnyRecord]:
    """Return what a site has journaled."""
    path = folder / f"{site}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=AnyRecord) for line in lines]


def decided_by(folder: Path, *sites: str, after: int = 0) -> int:
    """Return how many decisions there are, by either site, for the devices of just these."""
    both = [one for site in ORDER for one in records(folder, site)]
    return sum(isinstance(one, Coordinated) and set(one.sites) == set(sites) for one in both) - after


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something to be so; it is sooner or later, since who is behind catches up."""
    for _ in range(HANGS_S * 20):
        if condition():
            return
        time.sleep(0.05)  # noqa: TID251 - waits for other processes
    raise TimeoutError(what)


@pytest.mark.broker
@needs_mosquitto
def test_two_halves_of_a_real_partition_spend_no_joule_twice(tmp_path):
    """Together, cut off, together again: by both journals no more than both allowances is given away."""
    with ExitStack() as stack:
        try:
            link = stack.enter_context(netns.slow_link("100mbit"))
        except OSError as error:
            pytest.skip(f"no network namespace: {error}")
        there = link.address.rpartition(".")[0] + f".{int(link.address.rpartition('.')[2]) + 1}"
        places = {"north": (link.address, ()), "south": (there, link.prefix)}
        ports = {site: free_port() for site in ORDER}
        for site, (address, prefix) in places.items():
            settings = tmp_path / f"{site}.conf"
            settings.write_text(f"listener {ports[site]} {address}\nallow_anonymous true\nuser root\n")
            stack.callback(end, subprocess.Popen([*prefix, str(broker.find_mosquitto()), "-c", str(settings)]))  # noqa: S603
        for site, (address, prefix) in places.items():
            other = next(one for one in ORDER if one != site)
            told = [site, address, ports[site], places[other][0], ports[other], tmp_path]
            command = [*prefix, sys.executable, "-m", MODULE, *map(str, told)]
            stack.callback(end, subprocess.Popen(command, cwd=ROOT))  # noqa: S603
        until(lambda: decided_by(tmp_path, *ORDER), "a decision for both")
        alone = {site: decided_by(tmp_path, site) for site in ORDER}
        link.set("down")
        until(lambda: all(decided_by(tmp_path, site, after=alone[site]) > 0 for site in ORDER), "each half alone")
        link.set("up")
        before = decided_by(tmp_path, *ORDER)
        until(lambda: decided_by(tmp_path, *ORDER, after=before) > 0, "both again")
        (tmp_path / STOP).touch()
    rights = 0.0
    for site in ORDER:
        said = records(tmp_path, site)
        rights += ALLOWANCE - sum(one.joules for one in said if isinstance(one, Pledged))
        rights += sum(one.joules for one in said if isinstance(one, Granted))
        terms = [one.term for one in said if isinstance(one, TermBegan)]
        assert terms == sorted(terms)
    assert rights <= 2 * ALLOWANCE * (1 + 1e-9)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    site_, *rest = sys.argv[1:]
    ours_, theirs_ = (
        Broker(host=host, port=int(port), keepalive_s=KEEPALIVE_S)
        for host, port in ((rest[0], rest[1]), (rest[2], rest[3]))
    )
    asyncio.run(main(site_, ours_, theirs_, Path(rest[4])))
