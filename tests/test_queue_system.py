"""Queue of plans for one fleet, with a killed server in between."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from edge_server.journal.plan_queue import PlanQueue
from edge_server.journal.records import AnyRecord, RoundClosed, RoundOpened, RunClosed, RunOpened, UpdateAccepted
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.processes import PATIENCE_S, TINY, Fleet, captured, final, forked, until, waiting
from tests.edge_server.textbook import require_equal
from tests.naming import names_all

pytestmark = [pytest.mark.slow, pytest.mark.broker]

ROUNDS = 4
SLOW = "local_epochs = 150\nbatch_size = 8\nlearning_rate = 0.1"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with waiting(tmp_path_factory.mktemp("fleet")) as here:
        yield here


class Queue:
    """A folder with the server's file of a fleet's site, and plans for its devices."""

    def __init__(self, fleet: Fleet, folder: Path, **keys: object) -> None:
        self.folder, self.runs = folder, folder / "runs"
        places = {"data_dir": str(self.runs), "data_root": str(folder)}
        self.config = fleet.config(folder / "server.json", threads=1, **places, **keys)
        self.jobs = PlanQueue(self.runs, "lab")

    def plan(self, name: str, devices: str, rounds: int = ROUNDS, **sections: str) -> Path:
        """Write a plan for some of the devices a and b."""
        named = "\n".join(f'[[device]]\nname = "{device}"' for device in devices)
        usual = TINY | {"hyper": SLOW, "evaluation": "every = 1", "more": f"{TINY['more']}\n{named}"}
        usual |= {"cohort": f"min_devices = {len(devices)}"}
        path = write_plan(self.folder, rounds=rounds, **usual | sections).rename(self.folder / f"{name}.toml")
        path.write_text(path.read_text().replace('name = "tiny"', f'name = "{name}"'))
        return path

    def submit(self, path: Path, priority: int = 0) -> None:
        assert captured("submit", path, "--priority", priority, "--config", self.config).code == 0

    def states(self) -> dict[str, str]:
        """Return what `edge-server queue` says of each plan."""
        listed = json.loads(captured("queue", "--format", "json", "--config", self.config).out)
        return {job["plan"]: job["state"] for job in listed["jobs"]}

    def records(self, plan: str) -> list[AnyRecord]:
        """Return the records of the only run of a plan."""
        folders = [path.parent for path in self.runs.glob(f"{plan}-*/{JOURNAL}")]
        assert len(folders) <= 1, "a job has one run, whatever happens to its server"
        with suppress(FileNotFoundError):
            return read_records(folders[0]) if folders else []
        return []

    def rounds(self, plan: str) -> int:
        return sum(isinstance(record, RoundClosed) for record in self.records(plan))

    def require_whole(self, plan: str, devices: str) -> None:
        """Check that each round of a run has one update of each device, and the run one end."""
        records = self.records(plan)
        assert [type(one) for one in records if isinstance(one, RunOpened | RunClosed)] == [RunOpened, RunClosed]
        arrived = [(one.round, one.arrived) for one in records if isinstance(one, RoundClosed)]
        assert arrived == [(number, tuple(devices)) for number in range(1, ROUNDS + 1)]
        accepted = [(one.device, one.round) for one in records if isinstance(one, UpdateAccepted)]
        assert len(accepted) == len(set(accepted)) == ROUNDS * len(devices)


def spans(records: list[AnyRecord]) -> tuple[float, float]:
    """Return the server's seconds from the first opening of a round to the last end."""
    opened = [record.at for record in records if isinstance(record, RoundOpened)]
    closed = [record.at for record in records if isinstance(record, RoundClosed)]
    return min(opened), max(closed)


def test_a_queue_of_three_survives_a_kill_and_shares_the_fleet(fleet, tmp_path):
    """The first takes both devices; the others one each, and so take place at once.

    The server is killed in the second round of the first, and once more while the others run.
    """
    queue = Queue(fleet, tmp_path)
    for name, devices in (("both", "ab"), ("left", "a"), ("right", "b")):
        queue.submit(queue.plan(name, devices))
    assert queue.states() == dict.fromkeys(("both", "left", "right"), "waiting")
    log = tmp_path / "log"
    with forked("run", "--config", queue.config, log=log) as server:
        until(lambda: queue.rounds("both") >= 1, "the first round of the first job")
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
    assert queue.states() == {"both": "interrupted", "left": "waiting", "right": "waiting"}
    assert not queue.records("left")
    with forked("run", "--config", queue.config, log=log) as server:
        until(lambda: queue.rounds("left") and queue.rounds("right"), "the first rounds of the other jobs")
        queue.require_whole("both", "ab")
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
    with forked("run", "--config", queue.config, log=log) as server:
        assert server.wait(PATIENCE_S) == 0
    assert queue.states() == dict.fromkeys(("both", "left", "right"), "finished")
    for name, devices in (("both", "ab"), ("left", "a"), ("right", "b")):
        queue.require_whole(name, devices)
    (left_begin, left_end), (right_begin, right_end) = (spans(queue.records(name)) for name in ("left", "right"))
    assert max(left_begin, right_begin) < min(left_end, right_end), "at the same time"
    [folder] = queue.runs.glob("both-*")
    state, _ = replay_plan(load(tmp_path / "both.toml", tmp_path), tmp_path / "replayed", 2)
    require_equal(final(folder, ROUNDS), state.tree)


def test_jobs_wait_for_the_servers_own_plan_and_do_not_stop_each_other(fleet, tmp_path):
    """While it runs, the site is busy; a job that fails, and one that is removed, leave the next its turn."""
    queue = Queue(fleet, tmp_path, plan="own.toml")
    queue.plan("own", "a")
    model = 'name = "mlp"\noptions = { features = 8, hidden = 8, classes = 3 }'
    faulty = queue.plan("faulty", "ab", model=model, data=write_examples(tmp_path))
    log = tmp_path / "log"
    with forked("run", "--config", queue.config, log=log) as server:
        until(lambda: queue.rounds("own"), "the first round of the server's own plan")
        for words in (("run", "--config", queue.config), ("trial", "run", faulty, "--config", queue.config)):
            refused = captured(*words, *(["--data-dir", queue.runs] if words[0] == "trial" else []))
            assert refused.code == 3
            assert names_all(refused.err, "'lab'", "edge-server submit")
        queue.submit(faulty)
        (tmp_path / "examples.npz").unlink()
        queue.submit(queue.plan("endless", "ab", rounds=1000))
        queue.submit(queue.plan("last", "b"))
        queue.submit(queue.plan("urgent", "b"), priority=1)
        until(lambda: queue.states()["urgent"] == "finished", "the job that needs another device than the own plan")
        until(lambda: queue.rounds("endless"), "the job behind the failed one")
        assert queue.states() == {"faulty": "failed", "endless": "running", "last": "waiting", "urgent": "finished"}
        [endless] = [job.number for job in queue.jobs.list_jobs() if job.plan.name == "endless"]
        assert captured("queue", "rm", endless, "--config", queue.config).code == 0
        assert server.wait(PATIENCE_S) == 1, "one job has failed"
    for name, devices in (("own", "a"), ("urgent", "b"), ("last", "b")):
        queue.require_whole(name, devices)
    [failed] = [job for job in queue.jobs.list_jobs() if job.plan.name == "faulty"]
    assert names_all(failed.cause, "examples.npz")
    assert queue.states() == {"faulty": "failed", "last": "finished", "urgent": "finished"}
    again = captured("run", "--config", queue.config)
    assert (again.code, names_all(again.err, "own", "--again")) == (0, True)


def test_a_job_whose_device_is_offline_is_overtaken(fleet, tmp_path):
    """It begins no run; the job behind it begins after `wait_s`, and shows that it waits."""
    queue = Queue(fleet, tmp_path)
    queue.submit(queue.plan("absent", "ax", cohort="min_devices = 2\nwait_s = 3.0"))
    queue.submit(queue.plan("present", "a"))
    with forked("run", "--config", queue.config, log=tmp_path / "log") as server:
        until(lambda: queue.states()["present"] == "finished", "the job whose device is online")
        [absent] = [job for job in queue.jobs.list_jobs() if job.plan.name == "absent"]
        assert names_all(absent.cause, 1, 2, "may begin")
        assert captured("queue", "rm", absent.number, "--config", queue.config).code == 0
        assert server.wait(PATIENCE_S) == 0
    assert not queue.records("absent")
    queue.require_whole("present", "a")


def test_a_server_that_waits_takes_jobs_when_they_come(fleet, tmp_path):
    queue = Queue(fleet, tmp_path)
    with forked("run", "--wait", "--config", queue.config, log=tmp_path / "log") as server:
        until(queue.jobs.is_served, "the server")
        for name in ("one", "two"):
            queue.submit(queue.plan(name, "ab"))
            until(lambda: queue.states()[name] == "finished", name)  # noqa: B023 - called at once
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
