"""A study that goes wrong says so: what ended by itself, what stands still, what cannot be compared."""

from __future__ import annotations

import asyncio
import io
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_server.cli.chaos import (
    BUDGET_FACTOR,
    Outcome,
    mark_tables,
    require_possible,
    show,
    total,
    without_narrow_budgets,
)
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from edge_server.trial.chaos.kills import DECIDING, MARKS, MIXING, Kill
from edge_server.trial.chaos.mark import Mark
from edge_server.trial.chaos.site import Site, SiteProcess, running_trainer, sweep
from edge_server.trial.chaos.study import END_S, STALL_S, ChaosStudy
from edge_server.trial.chaos.verify import Account
from edge_server.trial.local import SERVER, Local
from edge_server.trial.local_sites import local_sites
from shared.errors import ConfigError, TaskFailed
from tests.edge_server.harness import write_plan
from tests.naming import names_all, naming

SLEEP = "import time; time.sleep(600)"


def part(program: str) -> SiteProcess:
    """Return a process that runs a line of Python."""

    @asynccontextmanager
    async def begin() -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    return SiteProcess(begin)


def study_of(folder: Path, seconds: list[float], **programs: str) -> ChaosStudy:
    """Return a study whose processes are other programs, on a clock that a test sets."""
    path = write_plan(folder, cohort="min_devices = 1", more='[[device]]\nname = "a"')
    site = Site(Local(path, load(path, folder), folder, folder / "runs", "r", 1), folder / "site")
    site.parts = {SERVER: part(programs.get("server", SLEEP)), "a": part(programs.get("agent", SLEEP))}
    return ChaosStudy([site], deque(), lambda _records: {}, lambda _news: None, clock=lambda: seconds[0])


@pytest.mark.parametrize(
    ("programs", "passed_s", "named"),
    [
        ({"agent": "raise SystemExit(3)"}, 0.0, ("a", 3, "a.log")),
        ({"server": "raise SystemExit(1)"}, END_S + 1, (1, "edge-server.log")),
        ({}, STALL_S + 1, ("r", "300 s", "edge-server.log")),
    ],
    ids=["agent", "server", "stall"],
)
async def test_what_ends_by_itself_or_stands_still_is_a_failure_with_its_log(tmp_path, programs, passed_s, named):
    """And before that, or as long as everything lives, it is none."""
    seconds = [0.0]
    study = study_of(tmp_path, seconds, **programs)
    for one in study.sites[0].parts.values():
        await one.start()
    try:
        if not programs:
            await study.pause(0.0)
        for name in programs:
            part = study.sites[0].parts[SERVER if name == "server" else "a"]
            while part.code is None:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.01)
        seconds[0] = passed_s
        with pytest.raises(TaskFailed, match=naming(*named)):
            await study.pause(0.0)
    finally:
        for one in study.sites[0].parts.values():
            await one.close()


async def test_a_part_is_killed_once_and_started_again(tmp_path):
    """`kill -9`; what is gone cannot be killed, what was started again can."""
    one = part(SLEEP)
    assert not await one.kill()
    for _ in range(2):
        await one.start()
        assert one.code is None
        assert await one.kill()
        assert one.code == -9
        assert not await one.kill()
    await one.close()


async def test_a_process_is_killed_in_the_phase_asked_for_and_lives_on_in_another(tmp_path):
    """Held still while its log is read, so that a phase of less than a millisecond can be hit."""
    say = "import time; open({!r}, 'a').write('{} DEBUG x phase {}\\n'); time.sleep(600)"
    log = tmp_path / "site" / f"{SERVER}.log"
    study = study_of(tmp_path, [0.0], server=say.format(str(log), "now", "storing"))
    log.parent.mkdir()
    await study.sites[0].parts[SERVER].start()
    try:
        async with asyncio.timeout(300):
            while not (log.exists() and log.read_text()):  # noqa: ASYNC110 - a process sets no event
                await asyncio.sleep(0.02)
        process = psutil.Process(study.sites[0].parts[SERVER].pid)
        assert not await study.sites[0].kill("server", SERVER, "closing")
        assert process.status() != psutil.STATUS_STOPPED
        assert await study.sites[0].kill("server", SERVER, "storing")
        assert study.sites[0].parts[SERVER].code == -9
    finally:
        await study.sites[0].parts[SERVER].close()


async def test_only_a_trainer_of_that_device_is_killed_by_its_number(tmp_path):
    """A process id may have gone to somebody else since it was written into the log; so may a path."""
    home = tmp_path / "site" / "a"
    ours = "-c", SLEEP, "-m", "device_agent.trainer.main", "--lock", f"{home}/trainer.lock"
    other = "-c", SLEEP, "-m", "device_agent.trainer.main", "--lock", f"{home}2/trainer.lock"
    reader = "-c", SLEEP, f"{home}/trainer.lock"
    processes = [await asyncio.create_subprocess_exec(sys.executable, *words) for words in (ours, other, reader)]
    try:
        async with asyncio.timeout(300):
            while not running_trainer(processes[0].pid, home):  # noqa: ASYNC110 - what a process does sets no event
                await asyncio.sleep(0.02)
        assert [running_trainer(one.pid, home) is not None for one in processes] == [True, False, False]
        assert running_trainer(0, home) is None
        assert sweep(home) == [processes[0].pid]
        assert await processes[0].wait() == -9
        assert [one.returncode for one in processes[1:]] == [None, None]
    finally:
        for one in processes[1:]:
            one.kill()
        await asyncio.gather(*(one.wait() for one in processes))


@pytest.mark.parametrize(
    "changes",
    [
        {"round": "quorum = 0.5"},
        {"cohort": "min_devices = 1"},
        {"cohort": "min_devices = 2\nsize = 2\nover_selection = 0.5"},
    ],
)
def test_a_plan_whose_model_depends_on_who_is_quick_is_refused(tmp_path, changes):
    plan = load(write_plan(tmp_path, round="deadline_s = 60.0"), tmp_path)
    require_possible(plan, 2, 0)
    with pytest.raises(ConfigError, match=naming("--kills", -1)):
        require_possible(plan, 2, -1)
    with pytest.raises(ConfigError, match=naming("tiny", "quorum", "over_selection", "min_devices")):
        require_possible(load(write_plan(tmp_path, **changes), tmp_path), 2, 1)


SPLIT = {"algorithm": 'name = "fedsl"\noptions = { cut = 1 }', "model": 'name = "cnn"\noptions = { side = 8 }'}


@pytest.mark.parametrize(
    ("sections", "rule", "refused"),
    [
        ({}, "deadline_s = 59.0", ("round.deadline_s", 59)),
        (SPLIT, "deadline_s = 60.0", ("round.step_deadline_s", 30, 60)),
        (SPLIT, "deadline_s = 60.0\nstep_deadline_s = 60.0", ()),
        ({}, "deadline_s = 60.0\nstep_deadline_s = 1.0", ()),
    ],
)
def test_a_deadline_that_a_killed_device_may_miss_is_refused(tmp_path, sections, rule, refused):
    """A step's too, where there are steps: what goes on without a device ends with another model."""
    plan = load(write_plan(tmp_path, round=rule, **sections), tmp_path)
    with pytest.raises(ConfigError, match=naming(*refused)) if refused else nullcontext():
        require_possible(plan, 2, 1)


TOWNS = """
[sites]
clusters = { north = ["a"], south = ["b"] }
[[device]]
name = "a"
[[device]]
name = "b"
"""


def towns(folder: Path, **sections: str) -> Plan:
    """Return a plan of two sites."""
    usual = {"cohort": "min_devices = 1", "round": "deadline_s = 60.0"}
    return load(write_plan(folder, more=TOWNS, **usual | sections), folder, several_sites=True)


def test_a_kill_is_meant_for_the_site_of_its_device_or_for_the_one_that_coordinates(tmp_path):
    """By the servers' own words; before there are any, it is the device's."""
    local = Local(tmp_path / "plan.toml", towns(tmp_path), tmp_path, tmp_path / "runs", "tiny", 2)
    north, south = [Site(one, tmp_path / name) for name, one in local_sites(local).items()]
    assert (north.devices, south.devices) == (["a"], ["b"])
    study = ChaosStudy([north, south], deque(), lambda _records: {}, lambda _news: None)
    at = {
        kind: [study.place_of(Kill(kind, device, None, 0.0, 0.0)) for device in (0, 1)]
        for kind in ("server", "coordinator")
    }
    assert at["server"] == at["coordinator"] == [(north, "a"), (south, "b")]
    for place in (north.place, south.place):
        place.mkdir()
    log = south.place / f"{SERVER}.log"
    log.write_text("now DEBUG edge_server.sites.coordinate phase leading run=r round=1\n")
    leading = study.news()
    assert [site for site, _ in leading] == [south]
    assert study.place_of(Kill("coordinator", 0, None, 0.0, 0.0))[0] is south
    assert study.is_mark(Kill("coordinator", 0, Mark("server", "leading"), 0.0, 0.0), *leading[0])
    assert not study.is_mark(Kill("server", 0, Mark("server", "leading"), 0.0, 0.0), *leading[0])
    assert study.is_mark(Kill("broker", 1, Mark("server", "leading"), 0.0, 0.0), *leading[0])


async def test_a_coordinator_that_is_starting_is_none_yet(tmp_path):
    """It is left alone, and the kill stays to be made; by its next word it is one."""
    study = study_of(tmp_path, [0.0])
    [site] = study.sites
    site.logs.began("server", SERVER)
    await site.parts[SERVER].start()
    study.kills.append(Kill("coordinator", 0, None, 0.0, 0.0))
    try:
        await study.strike(study.kills[0], marked=False)
        assert site.parts[SERVER].code is None
        assert len(study.kills) == 1
        site.place.mkdir(exist_ok=True)
        (site.place / f"{SERVER}.log").write_text("now DEBUG edge_server.sites.coordinate phase leading run=r\n")
        await study.strike(study.kills[0], marked=False)
        assert [(one.kind, one.phase) for one in study.struck] == [("coordinator", "leading")]
    finally:
        await site.parts[SERVER].close()


def test_a_plan_of_sites_waits_for_all_devices_and_neighbours(tmp_path):
    """A site's rounds for its own devices, a mixing for who was killed; and its devices are those that it names."""
    require_possible(towns(tmp_path), 2, 1)
    with pytest.raises(ConfigError, match=naming(2)):
        require_possible(towns(tmp_path), 3, 1)
    short = msgspec.structs.replace(towns(tmp_path).sites, deadline_s=30.0)
    with pytest.raises(ConfigError, match=naming("sites.deadline_s", 30)):
        require_possible(msgspec.structs.replace(towns(tmp_path), sites=short), 2, 1)


def test_budgets_of_sites_are_widened_and_their_seconds_are_the_rounds_own(tmp_path):
    """What kills cost would end the run. One site's plan, and one without budgets, stay what they are."""
    plan = towns(tmp_path, budget="time_s = 10.0\njoules = 3.0", optimizer='name = "hcef"', algorithm='name = "hcef"')
    wide = without_narrow_budgets(plan)
    assert wide.budget == BudgetPlan(time_s=10.0 * BUDGET_FACTOR, joules=3.0 * BUDGET_FACTOR)
    assert wide.optimizer.options == {"deadline_s": 10.0 / plan.rounds}
    assert without_narrow_budgets(towns(tmp_path)).budget == BudgetPlan()
    own = msgspec.structs.replace(plan, sites=msgspec.UNSET)
    assert without_narrow_budgets(own) is own
    assert mark_tables(own) == [MARKS]
    assert mark_tables(plan) == [MARKS, MIXING, DECIDING]
    assert mark_tables(towns(tmp_path)) == [MARKS, MIXING]


def test_a_study_that_was_cut_short_is_shown_as_a_failure():
    """Whatever its runs say: how far it came, why, and where the logs lie."""
    whole = Account(
        run="r",
        updates=4,
        accepted=4,
        counted_twice=0,
        duplicates=0,
        retrained=0,
        trained_twice=0,
        rounds_lost=0,
        difference=0.0,
    )
    text = io.StringIO()
    outcome = Outcome(
        record="runs/x", kills=7, struck=[], runs=[whole], total=total([whole]), problem="a ended", holds=False
    )
    show(outcome, text)
    assert names_all(text.getvalue(), 0, 7, "a ended", "runs/x", "runs/x/site")
