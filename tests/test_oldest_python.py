"""The agent runs on Python 3.10, which JetPack 6 has: nothing that it imports uses what came later.

`make pythons` runs it there; this test needs no such interpreter.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import edge_server
from tests.naming import naming

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("device_agent", "shared") for path in (ROOT / package).rglob("*.py"))
LATER = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "run", "timeout", "timeout_at", "wait_for"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping"},
    "math": {"cbrt", "exp2"},
    "sys": {"exception"},
    "typing": {
        "LiteralString",
        "Never",
        "NotRequired",
        "Required",
        "Unpack",
        "assert_never",
        "assert_type",
        "override",
    },
}
"""By module. 3.10 has `asyncio.run` and `wait_for` too, but backports need their own; errors differ."""


def uses(tree: ast.AST) -> set[str]:
    """Return what a module uses of `LATER`, and the later modules and built-in names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in LATER.get(node.value.id, ()):
                found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names if one.name in LATER.get(node.module or "", ())}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name == "tomllib"}
        elif isinstance(node, ast.Name) and node.id in ("BaseExceptionGroup", "ExceptionGroup"):
            found.add(node.id)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_the_agent_needs_a_later_python(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    assert uses(tree) == set() or path.name == "backports.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import asyncio\nasyncio.timeout(1)", "asyncio.timeout"),
        ("from datetime import UTC", "datetime.UTC"),
        ("import tomllib", "tomllib"),
        ("raise ExceptionGroup('', [])", "ExceptionGroup"),
    ],
)
def test_what_came_later_is_found(text, found):
    assert uses(ast.parse(text)) == {found}


def test_the_server_says_which_python_it_needs(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=naming("edge-server", "Python 3.11", sys.executable)):
        importlib.reload(edge_server)
