"""The page of the Python interface and its notebook run as printed, and name what there is."""

from __future__ import annotations

import json
import os
import re
import subprocess  # noqa: TID251 - the page's code is a program
import sys
from pathlib import Path

import pytest

from edge_server import api

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "deploy" / "docs" / "api.md"
NOTEBOOK = ROOT / "deploy" / "examples" / "api.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 600.0


def test_the_page_names_every_function_and_attribute():
    page = PAGE.read_text()
    functions = {name for name in api.__all__ if name[0].islower()}
    assert {name for name in functions if f"`api.{name}(" not in page} == set()
    members = {
        name for kind in (api.Run, api.Comparison, api.RunFigure) for name in vars(kind) if not name.startswith("_")
    }
    assert {name for name in members if not re.search(rf"\b{name}\b", page)} <= {"digest", "gap", "html"}


@pytest.mark.slow
@pytest.mark.broker
def test_the_code_of_the_page_runs(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 10
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "\nTrue\n" in done.stdout
    assert (tmp_path / "figure.html").exists()
    assert (tmp_path / "runs" / "longer").is_dir()


@pytest.mark.slow
@pytest.mark.broker
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert sum("<svg" in html for html in shown) >= 2
    assert any("final model: the same bits" in html for html in shown)
    assert any("5/5" in output.get("text", "") for output in outputs), "the bar"


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
