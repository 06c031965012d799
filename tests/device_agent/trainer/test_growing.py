"""Examples of files that grow between two tasks."""

from __future__ import annotations

import os

import pytest

from device_agent.trainer.evaluation import read_examples
from device_agent.trainer.workspace import Workspace
from shared.data.spec import Data


def values(examples):
    return set(examples.inputs.flatten().tolist())


@pytest.mark.parametrize("growing", [True, False])
def test_new_rows_are_in_the_next_task_and_none_changes_its_side(tmp_path, growing):
    """A file that is not said to grow is read once."""
    path = tmp_path / "a.csv"
    path.write_text("v,y\n" + "".join(f"{at},0\n" for at in range(100)))
    keys = {"growing": True} if growing else {"holdout_by": "hash"}
    spec = Data(source="csv", path=str(path), target_columns=("y",), holdout=0.3, validation=0.2, **keys)
    workspace = Workspace()
    first = [values(part) for part in workspace.data(spec)]
    assert workspace.data(spec)[0] is workspace.data(spec)[0]
    with path.open("a") as file:
        file.write("".join(f"{at},0\n" for at in range(100, 200)) + "200,")
    second = [values(part) for part in workspace.data(spec)]
    assert len(set().union(*second)) == (200 if growing else 100)
    assert all(old <= new for old, new in zip(first, second, strict=True))
    if growing:
        assert set(read_examples(spec)[0].flatten().tolist()) == second[1]


def test_new_files_are_in_the_next_task(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    (tmp_path / "a").mkdir()
    workspace, spec = Workspace(), Data(source="folder", path=str(tmp_path), growing=True, holdout=0.3)
    for count in (10, 15):
        for number in range(count):
            image.new("L", (2, 2), number).save(tmp_path / "a" / f"{number}.png")
            os.utime(tmp_path / "a" / f"{number}.png", (number, number))
        train, held_out, _ = workspace.data(spec)
        assert len(train) + len(held_out) == count
