"""The rules of CONTRIBUTING.md that no linter can state."""

from __future__ import annotations

import ast
import re
import subprocess  # noqa: TID251 - asks git which files are the project's
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "device_agent", "edge_server", "firmware_profiles")
SOURCES = {str(path.relative_to(ROOT)): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
FOLDERS = {*PACKAGES, "tests", "deploy", ".ci"}
FILE_LINES, FUNCTION_LINES = 400, 50


def tree(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def test_the_sources_are_found():
    """So that no other test here passes for want of a file."""
    assert {f"{package}/__init__.py" for package in PACKAGES} <= SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_is_one_idea(name):
    """It says in its first line what it is for, and it ends before the reader forgets."""
    assert ast.get_docstring(tree(name)), "say what this file is for"
    assert len(SOURCES[name].read_text().splitlines()) <= FILE_LINES, "split it where its summary would need an `and`"


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_fits_a_screen(name):
    functions = [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {function: count for function, count in lines.items() if count >= FUNCTION_LINES} == {}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SOURCES
        if re.fullmatch(r"shared/algorithms/(?!base).*\.py", name) and not name.endswith("__init__.py")
    ],
)
def test_an_algorithm_cites_its_paper(name):
    assert "https://" in (ast.get_docstring(tree(name)) or ""), "name the paper and its URL in the first docstring"


def test_every_error_of_ours_is_in_one_file():
    """Whoever catches errors can read all of them, each named by its remedy, in shared/errors.py."""
    home = "shared/errors.py"
    classes = {name: [node for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef)] for name in SOURCES}
    errors = {node.name for node in classes[home]}
    assert "FieldFleetError" in errors
    strays = [
        f"{name}: {node.name}"
        for name in SOURCES.keys() - {home}
        for node in classes[name]
        if errors & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]
    assert strays == []


def test_no_folder_was_added_at_the_top():
    """Asks git, so that what it ignores may lie about."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing tells the project's files from others")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    folders = {top for top, slash, _ in (name.partition("/") for name in done.stdout.split("\0")) if slash}
    assert folders <= FOLDERS


def test_the_version_is_written_once():
    """In pyproject.toml; the change log's newest entry is of it, and no module repeats it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    assert [name for name in SOURCES if re.search(r"^__version__\b", SOURCES[name].read_text(), re.MULTILINE)] == []
