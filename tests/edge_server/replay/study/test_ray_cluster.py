"""Study on a Ray cluster: same bytes as locally; without Ray, the remedy."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from edge_server.journal.runs import read_versions
from edge_server.replay.study.cell import run_cell, run_remote_cell
from edge_server.replay.study.pool import Tell
from edge_server.replay.study.ray_cluster import run_on_ray
from edge_server.replay.study.result import Order, make_order, read_result
from edge_server.replay.study.run import complete_study
from shared.errors import ConfigError
from tests.edge_server.fleets import HEAD, TWO_SEEDS, grid_of
from tests.naming import naming

CLUSTER = os.environ.get("RAY_ADDRESS", "")
RAY = importlib.util.find_spec("ray") is not None


def on_ray(orders: Sequence[Order], _: Path, tell: Tell) -> None:
    """Run cells on the cluster."""
    asyncio.run(run_on_ray(CLUSTER, orders, 0, tell))


@pytest.mark.skipif(not RAY, reason="Ray is not installed: pip install ray")
@pytest.mark.skipif(
    not CLUSTER, reason="RAY_ADDRESS names no cluster: ray start --head, then RAY_ADDRESS=127.0.0.1:6379"
)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_cluster_gives_the_same_bytes(tmp_path):
    """Journals and models come back; a cell that cannot be run fails alone and says why; once done is done."""
    study, cells = grid_of(tmp_path, f"{HEAD}{TWO_SEEDS}")
    data = msgspec.structs.replace(cells[0].plan.data, path="/nowhere.npz")
    dataless = msgspec.structs.replace(
        cells[0], name="dataless", plan=msgspec.structs.replace(cells[0].plan, data=data)
    )
    summary = complete_study(study, {}, [*cells, dataless], tmp_path / "away", on_ray, lambda news: None)
    assert [row.state for row in summary.rows] == ["finished", "finished", "failed"]
    assert "ConfigError" in summary.rows[2].cause
    assert "/nowhere.npz" in summary.rows[2].cause
    for cell in cells:
        here, away = run_cell(make_order(cell, tmp_path)), tmp_path / "away" / cell.name
        assert read_result(cell, away)
        for name in ("journal.jsonl", "checkpoints/round-000002.safetensors"):
            assert (here / name).read_bytes() == (away / name).read_bytes()


@pytest.mark.skipif(RAY, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install(tmp_path):
    """Once, before any cell is begun, and nothing but the extra is missing."""
    with pytest.raises(ConfigError, match=naming("pip install", "[ray]")):
        asyncio.run(run_on_ray("auto", [], 0, lambda news: None))


def test_an_old_ray_is_refused(tmp_path, monkeypatch):
    """Its name for things may be another."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.9.3"))
    with pytest.raises(ConfigError, match=naming("2.9.3", "2.40")):
        asyncio.run(run_on_ray("auto", [], 0, lambda news: None))


def test_a_cluster_that_is_none_is_told_of(tmp_path, monkeypatch):
    """Ray raises what it likes; the operator reads one line with the address."""

    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running\nRay instance")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.60.0", init=init))
    with pytest.raises(ConfigError, match=naming("--ray", "auto", "Could not find any running Ray instance")):
        asyncio.run(run_on_ray("auto", [], 0, lambda news: None))


def test_a_node_with_other_versions_is_refused(tmp_path):
    """Other versions may give other bits, and nobody would see it."""
    [cell, _] = grid_of(tmp_path, f"{HEAD}{TWO_SEEDS}")[1]
    order = msgspec.json.encode(make_order(cell, tmp_path))
    with pytest.raises(ConfigError, match=naming("torch", "1.0")):
        run_remote_cell(order, {**read_versions(), "torch": "1.0"})


def test_what_comes_back_is_the_whole_folder(tmp_path):
    """So that a run done elsewhere is a run as any other."""
    [cell, _] = grid_of(tmp_path, f"{HEAD}{TWO_SEEDS}")[1]
    files = run_remote_cell(msgspec.json.encode(make_order(cell, tmp_path)), read_versions())
    folder = tmp_path / cell.name
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    assert read_result(cell, folder)
    assert {"journal.jsonl", "journal.sqlite", "cell.json", "checkpoints/round-000001.safetensors"} <= files.keys()
