"""A run of before that was cut before any device had trained: after draws the weights that before drew."""

from __future__ import annotations

from tests.compat.plans import FEDSPU
from tests.compat.sides import content, until

ROUNDS = 2


def test_a_run_cut_in_its_first_round_begins_with_the_weights_of_before(old, new, make_site):
    """No state is stored yet, neither the server's nor a personal model: both are drawn again from the plan's seed.
    The run ends at the bits of before's own replay."""
    site = make_site(devices=FEDSPU.devices, data=FEDSPU.data, partition=FEDSPU.partition)
    plan = FEDSPU.plan(ROUNDS)
    site.start_agents(old)
    server = site.start_server(old, plan, "cut")
    received = [site.folder / name / "params" for name in site.devices]
    until(lambda: all(path.exists() for path in received), "the model at the devices", server)
    server.kill()
    server.wait()
    site.kill_agents()
    assert [list((site.folder / name / "outbox").glob("[!.]*")) for name in site.devices] == [[], []]
    assert not site.has_checkpoint("cut", 1)
    site.start_agents(new)
    cut = site.serve(new, plan, "cut")
    places = ("--data-dir", site.folder / "replayed", "--data-root", site.folder, "--workers", 1)
    old.output("-m", "edge_server", "replay", site.folder / "cut.toml", *places)
    name = f"checkpoints/round-{ROUNDS:06d}.safetensors"
    assert content(cut / name) == content(site.run("replayed") / name)
