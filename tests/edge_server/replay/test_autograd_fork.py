"""Workers of a replay are forked before this process runs autograd, as CUDA builds of torch demand."""

from __future__ import annotations

import subprocess  # noqa: TID251 - torch's check must see a process of its own
import sys
from pathlib import Path

import pytest

CHECK = """
import os, sys
import torch.autograd as autograd, torch.autograd.graph as graph
real, state = graph._engine_run_backward, {"ran": False, "bad": False}
def run(*args, **kwargs):
    if state["bad"]:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
    state["ran"] = True
    return real(*args, **kwargs)
graph._engine_run_backward = autograd._engine_run_backward = run
os.register_at_fork(after_in_child=lambda: state.update(bad=state["ran"]))
from edge_server.__main__ import main
program, *plans, folder = sys.argv
for plan in plans:
    state["ran"] = False
    sys.argv = [program, "replay", plan, "--data-dir", folder, "--workers", "2"]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0
"""

PLANS = Path(__file__).parents[3] / "deploy" / "plans"


@pytest.mark.slow
def test_workers_train_where_torch_refuses_autograd_after_a_fork(tmp_path):
    """Also where a budget is compared with what the plan takes at the least."""
    plans = [tmp_path / f"{name}.toml" for name in ("free", "budget")]
    for path, budget in zip(plans, ("", "\n[budget]\ntime_s = 1e6\n"), strict=True):
        path.write_text((PLANS / "demo.toml").read_text().replace("rounds = 10", "rounds = 2") + budget)
    command = [sys.executable, "-c", CHECK, *map(str, plans), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    assert "autograd" not in done.stdout + done.stderr
    assert len(list((tmp_path / "runs").glob("*/journal.jsonl"))) == 2
