"""What the command line says of mistakes: one sentence that ends with what to do."""

from __future__ import annotations

import pytest

from tests.edge_server.processes import captured
from tests.naming import names_all


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_source_that_cannot_be_replayed_is_named(tmp_path, monkeypatch, is_folder):
    monkeypatch.chdir(tmp_path)
    if is_folder:
        (tmp_path / "nothere").mkdir()
    code, _, said = captured("replay", "nothere")
    assert code == 2
    assert names_all(said, "nothere")
    assert ("edge-server runs" in said) != is_folder
    assert said.count("\n") == 1
