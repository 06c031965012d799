"""What the command line says of mistakes: one sentence that ends with what to do."""

from __future__ import annotations

import sys

import pytest

from edge_server.__main__ import main


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (False, "nothere: no plan, no trace and no run in runs has this name; give the path of a plan's file or"),
        (True, "nothere: a folder without a trace or a run in it; name one that has, or a plan's file"),
    ],
)
def test_what_cannot_be_replayed_is_named_with_what_can(tmp_path, monkeypatch, capsys, make, cause):
    monkeypatch.chdir(tmp_path)
    if make:
        (tmp_path / "nothere").mkdir()
    monkeypatch.setattr(sys, "argv", ["edge-server", "replay", "nothere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"edge-server: {cause}")
    assert said.count("\n") == 1
