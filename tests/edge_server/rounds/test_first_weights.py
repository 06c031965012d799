"""Source of a run's initial weights: recorded, and kept in resumption and replay."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.trainer.task_files import read_state
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import Evaluated, RoundOpened, RunOpened
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.report.summarise import digest_run
from shared.models.build import DRAW, TORCHS, build_initial
from shared.tensors.tree import Tree
from tests.edge_server.fleets import RUN, Network, Site
from tests.edge_server.textbook import NAMES, make_plan, require_equal

UNTRAINED = "local_epochs = 0"


def plan_of(folder: Path, method: str) -> Plan:
    """Return a plan by which nothing is trained, so that every model stays as it began."""
    evaluation = "every = 1\non_device = true"
    return make_plan(folder, rounds=1, algorithm=f'name = "{method}"', hyper=UNTRAINED, evaluation=evaluation)


def begun(folder: Path, plan: Plan, draw: str) -> None:
    """Write the journal of a run that was cut before its first round; that of an old version says nothing of a draw."""
    store = SqliteStore(folder / RUN, durable=False)
    store.append(RunOpened(run=RUN, plan=plan, draw=draw))
    store.close()


def require_began(tree: Tree, plan: Plan, draw: str) -> None:
    """Compare with both draws, which differ; a mean of equal models may round them."""
    torch.testing.assert_close(tree, build_initial(plan.model, plan.seed, draw).tree(), rtol=1e-6, atol=0)
    other = build_initial(plan.model, plan.seed, TORCHS if draw == DRAW else DRAW).tree()
    assert not torch.equal(tree["1.weight"], other["1.weight"])


@pytest.mark.parametrize("draw", [DRAW, TORCHS])
@pytest.mark.parametrize("method", ["fedavg", "fedspu", "local_only", "fedselect"])
def test_a_run_goes_on_with_the_weights_that_it_began_with(tmp_path, method, draw):
    """The server's model, the personal models that its devices draw, and both in a replay of its trace."""
    plan = plan_of(tmp_path, method)
    begun(tmp_path, plan, draw)
    state, records = Site(Network(), plan, tmp_path).play()
    require_began(state.tree, plan, draw)
    if method in {"fedspu", "local_only"}:
        for name in NAMES:
            own = read_state(tmp_path / name / "state" / RUN)[0].tree
            require_equal(own, build_initial(plan.model, plan.seed, draw).tree())
    told = [one.values for record in records if isinstance(record, RoundOpened) for one in record.assignments.values()]
    assert {one.get("model_draw", TORCHS) for one in told} == {draw if method != "fedavg" else TORCHS}
    trace = trace_of(records)
    assert trace.header.draw == draw
    is_personal = method != "fedavg"
    assert (digest_run(records).personal, digest_run(to_records(trace)).personal) == (is_personal, is_personal)
    assert not any(one.personal for one in records if isinstance(one, RunOpened)), "as journals of before"
    unevaluated = [one for one in records if not isinstance(one, Evaluated)]
    assert digest_run(unevaluated).personal == is_personal
    again, replayed = replay_plan(plan, tmp_path / "again", trace=trace)
    require_began(again.tree, plan, draw)
    assert [one.draw for one in replayed if isinstance(one, RunOpened)] == [draw]


def test_a_new_run_names_its_draw_and_that_its_models_are_personal(tmp_path):
    plan = plan_of(tmp_path, "local_only")
    state, records = Site(Network(), plan, tmp_path).play()
    assert [(one.draw, one.personal) for one in records if isinstance(one, RunOpened)] == [(DRAW, True)]
    require_began(state.tree, plan, DRAW)
    require_began(replay_plan(plan, tmp_path / "replayed")[0].tree, plan, DRAW)


def test_a_record_of_before_is_read_as_torchs_draw(tmp_path):
    """Its line has no such field."""
    line = msgspec.to_builtins(RunOpened(run=RUN, plan=plan_of(tmp_path, "fedavg")))
    del line["draw"]
    assert msgspec.convert(line, RunOpened).draw == TORCHS
