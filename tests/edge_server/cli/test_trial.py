"""What the command line says of mistakes: one sentence that ends with what to do."""

from __future__ import annotations

import sys

import pytest

from edge_server.__main__ import main
from tests.naming import names_all


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_source_that_cannot_be_replayed_is_named(tmp_path, monkeypatch, capsys, is_folder):
    monkeypatch.chdir(tmp_path)
    if is_folder:
        (tmp_path / "nothere").mkdir()
    monkeypatch.setattr(sys, "argv", ["edge-server", "replay", "nothere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert names_all(said, "nothere")
    assert ("edge-server runs" in said) != is_folder
    assert said.count("\n") == 1
