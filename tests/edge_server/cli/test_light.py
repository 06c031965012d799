"""What only reads a run loads no torch: asked of fresh interpreters, for in this one everything is loaded."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.edge_server.replay.trace.test_round_trip import export_field_run

HEAVY = {"torch", "numpy", "safetensors"}
PROGRAM = """
import sys
from edge_server.__main__ import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def loaded_by(*words: object) -> set[str]:
    """Return the top-level names of all that a new interpreter has loaded once it has run a command."""

    async def ask() -> bytes:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, *map(str, words)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await child.communicate()
        assert child.returncode == 0, said
        return said

    first, *names = asyncio.run(ask()).decode().splitlines()[-1].split()
    assert first == "loaded"
    return set(names)


@pytest.mark.parametrize("form", ["table", "json"])
def test_runs_and_their_rounds_are_shown_without_torch(tmp_path, form):
    export_field_run(tmp_path)
    for words in (("runs",), ("show", "field-1"), ("release", "list")):
        loaded = loaded_by(*words, "--data-dir", tmp_path / "runs", "--format", form)
        assert "msgspec" in loaded
        assert loaded & HEAVY == set()


def test_a_run_is_exported_and_reported_without_torch(tmp_path):
    export_field_run(tmp_path)
    runs = ("--data-dir", tmp_path / "runs")
    assert loaded_by("trace", "export", "field-1", *runs, "--out", tmp_path / "out") & HEAVY == set()
    assert loaded_by("report", "field-1", *runs, "--out", tmp_path / "page.html") & HEAVY == set()
