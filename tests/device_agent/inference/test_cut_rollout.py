"""Rollout of split releases: both halves serve them, the lower half tries them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file, save

from device_agent.commands.run import serve
from device_agent.config import load
from device_agent.inference.candidate import GateVerdict
from device_agent.inference.gates import judgement
from device_agent.inference.gates.process import GateJob
from device_agent.inference.settings import CutSettings, InferenceSettings
from device_agent.inference.store import BoardStore
from edge_server.fleet.view import watch_site
from edge_server.journal.rollouts.file import RolloutPlan
from edge_server.journal.rollouts.state import RolloutState
from edge_server.plan.server_config import ServerConfig
from edge_server.release.rollout.drive import drive
from edge_server.release.rollout.orders import begin_rollout, give_order, open_rollout
from edge_server.release.store import StoredRelease
from shared.protocol.inference.release import ReleasePart, sha256_of, write_manifest
from shared.protocol.update import UpdateTerms, take_offer
from shared.runtime.executor import background
from tests.device_agent.inference.releases import offer_of
from tests.device_agent.inference.test_collaborative import OK, SITE, Board, serving_tops
from tests.edge_server.gateway.sites import make_site
from tests.edge_server.release.runs import release_with_halves
from tests.machine import needs_mosquitto

TERMS = RolloutPlan(deployment="", release="", sha256="", soak_s=0.2, max_latency_ms=1e5)
SETTINGS = InferenceSettings(port=0, socket="", memory_bytes=2 << 30, cut=CutSettings())


@pytest.mark.broker
@needs_mosquitto
async def test_what_a_rollout_brings_is_served_by_both_halves(tmp_path):
    """And so is the version before it, when that one is taken back; by a site's certificates and access list."""
    runs, site = tmp_path / "runs", make_site(tmp_path, SITE)
    site.tell_refusals()
    broker = site.for_server()
    released = [release_with_halves(runs, "lenet", cut=1, seed=seed) for seed in (1, 2)]
    board = Board(tmp_path / "agent.json", {})
    told = {"device": "pi", "site": SITE, "state_dir": str(tmp_path / "state"), "report_s": 1.0}
    told |= {"broker": site.for_board("pi"), "serve": {"port": 0, "split": "cut"}}
    board.config.write_bytes(msgspec.json.encode(told))
    config = ServerConfig(plan="none.toml", site=SITE, data_dir=str(runs), broker=broker)

    async def answers(stored: StoredRelease) -> None:
        board.probes = load_file(stored.path(stored.manifest.probes.sha256))
        await board.infer_by_both()
        status, told = await board.ask("GET", "models/digits")
        assert (status, told["versions"]) == (OK, [str(stored.manifest.version)])

    async def roll_out(stored: StoredRelease) -> RolloutState:
        return await drive(config, lambda: begin_rollout(runs, stored, TERMS))

    async def rolled_out_and_back() -> None:
        async with background(serve(load(board.config))), serving_tops(broker, runs, 1):
            async with watch_site(broker, SITE) as look:
                while "pi" not in look.models:  # noqa: ASYNC110 - what boards say comes from the broker
                    await asyncio.sleep(0.05)
            for stored in released:
                state = await roll_out(stored)
                assert state.outcome == "finished", state.failures
                await answers(stored)
            known = open_rollout(runs)
            give_order(known, "back")
            assert (await drive(config, lambda: known)).outcome == "taken-back"
            await answers(released[0])

    await site.start()
    try:
        await rolled_out_and_back()
    finally:
        await site.stop()
    assert site.refusals() == []


def judged(folder: Path, stored: StoredRelease, cut: CutSettings, **parts: bytes) -> GateVerdict:
    """Return what becomes of a release on a board that cuts networks, with other probes where they are given."""
    manifest, probes = stored.manifest, parts.get("probes")
    if probes is not None:
        manifest = msgspec.structs.replace(manifest, probes=ReleasePart(sha256=sha256_of(probes), size=len(probes)))
    store = BoardStore(folder, reserve_bytes=0)
    store.write(take_offer(store.record(manifest.name), offer_of(manifest), 0.0), write_manifest(manifest))
    for part in manifest.parts.values():
        is_new = probes is not None and part == manifest.probes
        store.parts.add(part.sha256, probes if is_new and probes else stored.path(part.sha256).read_bytes())
    job = GateJob(
        state_dir=str(folder),
        name=manifest.name,
        candidate=manifest.version,
        committed=0,
        terms=UpdateTerms(),
        settings=msgspec.structs.replace(SETTINGS, cut=cut),
    )
    return judgement.run_gates(job, lambda _: None, lambda: None)


def test_the_lower_half_is_what_the_gates_try_out_and_the_whole_where_it_is_loaded(tmp_path):
    """Features are compared with those of the release; outputs only where the board computes them."""
    stored = release_with_halves(tmp_path / "runs", "lenet", cut=1)
    probes = load_file(stored.path(stored.manifest.probes.sha256))
    wrong = {name: save({**probes, name: probes[name] + 1}) for name in ("features", "outputs")}
    for number, (whole, changed, cause) in enumerate(
        (
            (False, None, ""),
            (True, None, ""),
            (False, "features", "probes: "),
            (True, "outputs", "probes: "),
            (False, "outputs", ""),
        )
    ):
        parts = {"probes": wrong[changed]} if changed else {}
        found = judged(tmp_path / str(number), stored, CutSettings(whole=whole), **parts)
        assert found.reason.startswith(cause), (whole, changed, found.reason)
        assert bool(found.reason) == bool(cause), found.reason
