"""The queue of plans: its order, what survives a crash, and who may change it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_server.journal.plan_queue import MOST_ENDED, PlanQueue
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError, SiteBusy
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import captured
from tests.naming import log_messages, names_all, naming

SITE = "lab"


@pytest.fixture
def plan(tmp_path) -> Plan:
    return load(write_plan(tmp_path, rounds=1), tmp_path)


@pytest.fixture
def queue(tmp_path) -> PlanQueue:
    return PlanQueue(tmp_path / "runs", SITE)


def numbers(queue: PlanQueue, state: str = "waiting") -> list[int]:
    """Return the jobs as another process lists them."""
    return [job.number for job in PlanQueue(queue.folder.parents[1], SITE).list_jobs() if job.state == state]


def test_jobs_come_by_priority_and_then_in_the_order_of_submission(queue, plan):
    for priority in (0, 5, 0, 5, -1):
        queue.submit(plan, priority)
    assert numbers(queue) == [2, 4, 1, 3, 5]
    queue.set_priority(5, 5)
    queue.set_priority(3, None)
    assert numbers(queue) == [3, 2, 4, 5, 1]
    assert [job.plan for job in queue.list_jobs()] == [plan] * 5


def test_a_job_begins_ends_and_is_kept_for_the_list(queue, plan):
    queue.submit(plan), queue.submit(plan)
    begun = queue.begin(1, "tiny-1")
    assert begun
    assert (begun.state, begun.run, numbers(queue, "running"), numbers(queue)) == ("running", "tiny-1", [1], [2])
    queue.end(1, "stopped", "the budget is spent")
    [ended] = [job for job in queue.list_jobs() if job.state == "ended"]
    assert (ended.outcome, ended.cause) == ("stopped", "the budget is spent")
    assert queue.begin(1, "tiny-2") is None, "what has ended does not begin again"
    with pytest.raises(ConfigError, match=naming(1, "ended")):
        queue.set_priority(1, 3)


def test_a_removed_job_does_not_come_back(queue, plan):
    queue.submit(plan), queue.submit(plan)
    queue.remove([1])
    assert queue.begin(1, "tiny-1") is None
    queue.end(1, "finished")
    assert numbers(queue) == [2]
    with pytest.raises(ConfigError, match=naming(1, 2, SITE)):
        queue.remove([2, 1])
    assert numbers(queue) == [2]
    assert queue.submit(plan).number == 3


def test_ended_jobs_are_forgotten_in_the_end(queue, plan):
    for number in range(1, MOST_ENDED + 4):
        queue.submit(plan)
        queue.end(number, "finished")
    assert numbers(queue, "ended") == list(range(4, MOST_ENDED + 4))


def test_several_may_submit_at_once(queue, plan):
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda _: PlanQueue(queue.folder.parents[1], SITE).submit(plan), range(24)))
    assert sorted(job.number for job in jobs) == numbers(queue) == list(range(1, 25))


def test_a_damaged_or_half_written_file_is_no_job(queue, plan, caplog):
    """A crash leaves a part of a file beside the queue; a disk may damage one of it."""
    queue.submit(plan), queue.submit(plan)
    (queue.folder / ".job-000003.json.part").write_bytes(b'{"number": 3')
    (queue.folder / "job-000001.json").write_bytes(b'{"number": 1, "plan": {"name": 3}}')
    assert numbers(queue) == [2]
    assert log_messages(caplog, "job-000001.json")
    with pytest.raises(ConfigError, match=naming("priority", 10_000_000)):
        queue.submit(plan, 10_000_000)


def test_one_server_at_a_time_serves_a_site(queue, plan):
    assert not queue.is_served()
    other = PlanQueue(queue.folder.parents[1], SITE)
    with other.serving():
        assert queue.is_served()
        queue.submit(plan)
        with pytest.raises(SiteBusy, match=naming(SITE, "edge-server submit")), queue.serving():
            pass
        with PlanQueue(queue.folder.parents[1], "barn").serving():
            assert numbers(queue) == [1]
    assert not queue.is_served()
    with queue.serving():
        assert other.is_served()


def test_the_commands_submit_list_move_and_remove(tmp_path):
    path = write_plan(tmp_path, rounds=1)
    config = tmp_path / "server.toml"
    config.write_text(f'site = "{SITE}"\ndata_root = "."\n')

    def edge_server(*words: object) -> tuple[int, str, str]:
        return captured(*words, "--config", config)

    code, _, err = edge_server("run")
    assert (code, names_all(err, config, "plan")) == (2, True)
    for priority in (0, 3):
        code, out, _ = edge_server("submit", path, "--priority", priority)
        assert (code, names_all(out, "tiny", "edge-server run")) == (0, True)
    code, out, _ = edge_server("queue", "--format", "json")
    assert (code, names_all(out, '"state": "waiting"', '"priority": 3')) == (0, True)
    assert edge_server("queue", "move", 1, "--first")[0] == 0
    code, out, _ = edge_server("queue")
    assert code == 0
    rows = [line.split()[:3] for line in out.splitlines() if " tiny " in line]
    assert rows == [["1", "tiny", "4"], ["2", "tiny", "3"]]
    assert edge_server("queue", "rm", 1)[0] == 0
    code, _, err = edge_server("queue", "rm", 1)
    assert (code, names_all(err, 1, 2)) == (2, True)
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 0"))
    assert edge_server("submit", path)[0] == 2
