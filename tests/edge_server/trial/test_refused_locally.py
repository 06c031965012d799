"""A trial on this machine that the server refuses before round 1 names the cause, and its logs stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge_server.processes import captured

PLAN = """
name = "misfit"
rounds = 1
local = 1
algorithm = { name = "fedavg" }
model = { name = "mlp", options = { features = 9, hidden = 4, classes = 10 } }
data = { source = "digits" }
"""


@pytest.mark.slow
@pytest.mark.broker
def test_the_cause_is_printed_and_the_log_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    ended = captured("trial", "run", "plan.toml")
    assert ended.code == 1
    assert "(1, 8, 8)" in ended.err
    assert len(list(tmp_path.glob("runs/misfit-*/local/edge-server.log"))) == 1
