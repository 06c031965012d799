"""A trial on this machine whose data do not fit ends before it starts a process, or with the server's cause."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_server.rounds.check_data import MOST_VALUES
from tests.edge_server.processes import captured

PLAN = """
name = "misfit"
rounds = 1
local = 1
algorithm = {{ name = "fedavg" }}
model = {{ name = "mlp", options = {{ features = {features}, hidden = 4, classes = 2 }} }}
data = {{ source = "npz", path = "a.npz" }}
"""


@pytest.mark.slow
@pytest.mark.broker
def test_the_cause_is_printed_and_the_log_of_a_server_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are read in part before the trial; the server reads them all."""
    features = 1 << 10
    inputs, labels = np.zeros((MOST_VALUES // features + 1, features), dtype=np.float32), np.array([0, 1])
    labels = np.resize(labels, len(inputs))
    np.savez(tmp_path / "a.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=np.append(labels[:-1], 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIELDFLEET_DATA", str(tmp_path))
    (tmp_path / "plan.toml").write_text(PLAN.format(features=features - 1))
    ended = captured("trial", "run", "plan.toml")
    assert ended.code == 2
    assert f"({features},)" in ended.err
    assert not list(tmp_path.glob("runs/misfit-*"))

    (tmp_path / "plan.toml").write_text(PLAN.format(features=features))
    ended = captured("trial", "run", "plan.toml")
    assert ended.code == 1
    assert "labels up to 2" in ended.err
    assert len(list(tmp_path.glob("runs/misfit-*/local/edge-server.log"))) == 1
