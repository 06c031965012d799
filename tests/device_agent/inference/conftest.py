"""Fixtures: releases created as by a server, in exported folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.inference.settings import InferenceSettings

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

MIB = 1 << 20


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of two versions of `tiny`, of other parameters, and of `lenet`; nobody changes them."""
    from edge_server.release.create import create_release  # noqa: PLC0415 - it imports torch
    from edge_server.release.run_model import read_model  # noqa: PLC0415
    from edge_server.release.store import export_release  # noqa: PLC0415
    from tests.edge_server.release.runs import leave_run  # noqa: PLC0415

    place = tmp_path_factory.mktemp("releases")
    found = {}
    runs = (("tiny-1", "mlp", "tiny", 1), ("tiny-2", "mlp", "tiny", 50), ("lenet", "lenet", "lenet", 1))
    for number, (key, model, name, seed) in enumerate(runs):
        run = leave_run(place / "runs", model, run=f"run-2026010{number + 1}T000000Z-aaaa", seed=seed)
        export_release(create_release(read_model(run), place / "runs", name), place / key)
        found[key] = place / key
    return found


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a folder of a release that a test may spoil."""

    def copy(key: str) -> Path:
        return Path(shutil.copytree(made[key], tmp_path / key))

    return copy


@pytest.fixture
def settings(tmp_path: Path) -> InferenceSettings:
    """Return settings with a Unix socket alone."""
    return InferenceSettings(
        port=0, socket=str(tmp_path / "s.sock"), memory_bytes=2048 * MIB, max_body_bytes=MIB, patience_s=5.0
    )
