"""Agent and server of different versions complete every round over a real broker."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.compat.plans import FEDSPU, METHODS, Method
from tests.compat.sides import Side, Site

ROUNDS = 3
SHORT = {
    "fedavg": {
        "codec": 'name = "chain"\noptions = { quantize_bits = 8, quantize_scope = "tree" }',
        "hyper": "local_epochs = 2\nbatch_size = 16\nlearning_rate = 0.05",
    },
    "fedspu": {"hyper": "local_epochs = 2\nbatch_size = 16\nlearning_rate = 0.05"},
    "fedsl": {"codec": 'name = "masked"'},
}
"""Sections in place of the method's own: rounds that nobody has to cut, and codecs that the others do not use."""


def short(name: str) -> str:
    """Return a method's plan, on data that all methods share so that the agents need not be started again."""
    sections = {**METHODS[name].sections, **SHORT[name]}
    return Method(name, sections, data=FEDSPU.data, partition=FEDSPU.partition).plan(ROUNDS)


@pytest.fixture(scope="module", params=["before", "after"])
def mixed(request, old, new, make_site) -> tuple[Site, Side, Side]:
    """Return a site with agents of one side, that side, and the other one."""
    agents, server = (old, new) if request.param == "before" else (new, old)
    site = make_site(devices=FEDSPU.devices, data=FEDSPU.data, partition=FEDSPU.partition)
    site.start_agents(agents)
    return site, agents, server


@pytest.mark.parametrize("name", METHODS)
def test_every_round_counts_every_update(mixed, new, name):
    """Three rounds, all aggregated, nothing missed, failed or refused, and the server ends with code 0."""
    site, agents, server = mixed
    run = site.serve(server, short(name), name)
    [shown] = new.commands(["show", run, "--format", "json"])
    rounds = json.loads(shown)["rounds"]
    assert [(one["round"], one["outcome"], one["arrived"]) for one in rounds] == [
        (number, "aggregated", list(site.devices)) for number in range(1, ROUNDS + 1)
    ]
    assert [(one["failed"], one["refused"], one["missed"]) for one in rounds] == [({}, {}, {})] * ROUNDS
    for agent in site.agents.values():
        processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children()]
        assert [one.cmdline()[0] for one in processes] == [str(agents.python)] * 2  # the agent and its trainer


def test_agents_of_before_take_part_in_measuring_running_statistics(old, new, make_site):
    """They send undropped features and train nothing; what they do not measure themselves, the server's log says."""
    site = make_site(devices=FEDSPU.devices, data=FEDSPU.data, partition=FEDSPU.partition)
    site.start_agents(old)
    sections = {
        "algorithm": 'name = "fedsl"\noptions = { cut = 2, period = 4, sparsity = 0.3, drop = 0.5 }',
        "model": 'name = "vgg13"\noptions = { channels = 1, width = 0.1 }',
        "hyper": "batch_size = 16\nlearning_rate = 0.1",
        "evaluation": "every = 2\nstatistics_batches = 4",
        "codec": 'name = "masked"',
    }
    run = site.serve(new, Method("normed", sections, data=FEDSPU.data, partition=FEDSPU.partition).plan(ROUNDS), "bn")
    [shown] = new.commands(["show", run, "--format", "json"])
    rounds = json.loads(shown)["rounds"]
    assert [(one["statistics_batches"], one["failed"], one["refused"]) for one in rounds] == [
        (None, {}, {}),
        (4, {}, {}),
        (4, {}, {}),
    ]
    measures = any("STATISTICS_BATCHES" in path.read_text() for path in old.root.rglob("messages.py"))
    assert ("too old to measure" in (site.folder / "server-bn.log").read_text()) != measures
