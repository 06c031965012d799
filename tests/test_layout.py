"""The rules of CONTRIBUTING.md that no linter can state: each test lists all that break its rule."""

from __future__ import annotations

import ast
import re
import subprocess  # noqa: TID251 - asks git which files are the project's
import symtable
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "device_agent", "edge_server", "firmware_profiles")
TOP = {".github", *PACKAGES, "tests", "deploy", ".ci"}
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
FUNCTION_LINES = 50
NAMES_OF_NOTHING = re.compile(r"(.*_)?(helpers?|utils?|managers?|misc|common|stuff)\.py")
ALGORITHM = re.compile(r"shared/algorithms/(?:[a-z]+/)?(?!_|base)[a-z_]+\.py")
ERRORS = "shared/errors.py"
PRIVATE = re.compile(r"\b_\w+")
LIBRARIES_OWN = {"_state"}
"""Names of libraries' own that are ours too: of a client of paho, whether it is connected."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return every source parsed; not before it is asked for, since each process of the tests loads this file."""
    return {name: ast.parse(text) for name, text in SOURCES.items()}


@cache
def nodes(name: str) -> list[ast.AST]:
    """Return what a source's tree is of."""
    return list(ast.walk(trees()[name]))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with the file that it is in."""
    for name in SOURCES:
        for node in nodes(name):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def breaks_in_imports() -> Iterator[str]:
    if found := circle(imports_of_files()):
        yield f"imports in a circle: {' -> '.join(found)}"


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return files that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_of_files() -> dict[str, set[str]]:
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in SOURCES}
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for module, name in modules.items():
        for node in nodes(name):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{one.name}" for one in node.names} & modules.keys()
                imports[module] |= whole or ({node.module} & modules.keys())
    return imports


def breaks_in_files() -> Iterator[str]:
    for name in SOURCES:
        if not ast.get_docstring(trees()[name]):
            yield f"{name}: say in a docstring what this file holds"
        if NAMES_OF_NOTHING.fullmatch(Path(name).name):
            yield f"{name}: name it by what is in it"
        if ALGORITHM.fullmatch(name) and "https://" not in (ast.get_docstring(trees()[name]) or ""):
            yield f"{name}: name the paper and its URL in the first docstring"


def breaks_in_functions() -> Iterator[str]:
    for name, node in functions():
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines >= FUNCTION_LINES:
            yield f"{name}: {node.name} has {lines} lines, {FUNCTION_LINES} or more"


def hidden_calls(text: str, tree: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield calls of a module's function in a scope where a local of its name hides it, which linters miss."""
    calls = {
        (node.func.id, node.lineno) for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    module = symtable.symtable(text, "", "exec")
    ours = {one.get_name() for one in module.get_symbols() if one.is_imported() or one.is_namespace()}
    for node in tree:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
        yield from ((line, name) for name, line in calls if name in stored & ours and line in lines)


def breaks_in_locals() -> Iterator[str]:
    for name, text in SOURCES.items():
        yield from (
            f"{name}:{line}: a local hides {what}(), which is called" for line, what in hidden_calls(text, nodes(name))
        )


def test_a_local_that_hides_a_called_function_is_found():
    text = "from clock import wait_s\ndef f(until):\n    wait_s = {1: wait_s(until)}\n    return wait_s\n"
    assert list(hidden_calls(text, list(ast.walk(ast.parse(text))))) == [(3, "wait_s")]


def breaks_in_classes() -> Iterator[str]:
    homes: dict[tuple[str, str], list[str]] = defaultdict(list)
    errors = {node.name for node in nodes(ERRORS) if isinstance(node, ast.ClassDef)}
    for name in SOURCES:
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                homes[name.partition("/")[0], node.name].append(name)
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if name != ERRORS and errors & bases:
                    yield f"{name}: {node.name} is an error; they all stand in {ERRORS}"
                # Python 3.13 gave Thread a `_handle`, which a method of ours had hidden: no task was ever trained.
                if {"Thread", "Timer"} & bases:
                    yield f"{name}: {node.name} inherits from Thread; give it an attribute that is a Thread"
    yield from (f"class {name} in {', '.join(files)}" for (_, name), files in homes.items() if len(files) > 1)


def test_the_sources_are_found():
    """So that no other test here passes for want of a file, and a circle would be found."""
    assert {f"{package}/__init__.py" for package in PACKAGES} <= SOURCES.keys()
    assert sum(1 for _ in functions()) > len(SOURCES)
    imports = imports_of_files()
    assert "shared.errors" in imports["shared.config"]
    assert circle(imports | {"shared.errors": {"shared.config"}})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(tree: list[ast.AST]) -> Iterator[str]:
    """Yield what a file gives a name to: functions, classes, variables, attributes."""
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def private_names(tree: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the private names of others that a file uses, with their lines: read, set, imported or patched."""
    for node in tree:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, one.name) for one in names)
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def breaks_in_tests() -> Iterator[str]:
    """What the packages keep to themselves; a test's own names, and those of libraries, are left out."""
    ours = {one for name in SOURCES for one in defined_names(nodes(name)) if is_private(one)} - LIBRARIES_OWN
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if ours.isdisjoint(PRIVATE.findall(text)):
            continue
        tree = list(ast.walk(ast.parse(text)))
        forbidden = ours - set(defined_names(tree))
        for line, name in private_names(tree):
            if name in forbidden:
                yield f"{path.relative_to(ROOT)}:{line}: {name} is private: go by a public name, or make it one"


@pytest.mark.parametrize(
    "breaks",
    [breaks_in_imports, breaks_in_files, breaks_in_functions, breaks_in_locals, breaks_in_classes, breaks_in_tests],
)
def test_the_layout_keeps_its_rules(breaks):
    found = sorted(breaks())
    assert not found, "\n".join(found)


def test_the_project_is_described_once():
    """No folder at the top but the fixed ones (git says which are ours); the version is written in one place."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    assert [name for name, text in SOURCES.items() if re.search(r"^__version__\b", text, re.MULTILINE)] == []
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing tells the project's files from others")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert {top for top, slash, _ in (name.partition("/") for name in done.stdout.split("\0")) if slash} <= TOP


def test_no_property_bounds_real_time():
    """Else it fails on a machine that has something else to do."""
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
