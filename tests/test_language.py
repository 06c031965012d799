"""Ceilings on wording and size that keep the code readable: `python -m tests.test_language` lists every place.

The counts follow the rules of CONTRIBUTING.md. They point to text that a reader has to translate first; rewrite it for
the reader, and lower the ceiling.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "device_agent", "edge_server")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TITLE_WORDS = 14
FILLER_WORDS = 3
CLASS_METHODS, CLASS_FIELDS = 15, 12
VAGUE = set(
    """
    afforded among apart asked away bench came caller cast decided desk door found given gone heard held here kept
    known left lent made meant mixed moved muster one ones opened ours ourselves owed own placed rest said seen
    settled shelf shown sight sort spent stage standing surroundings taken theirs there thing things told us waiting
    wanted went whole witness word words
    """.split()  # noqa: SIM905 - readable
)
"""Names that say what happened to a value, or nothing, in place of what it is."""

PARTICIPLE = re.compile(r"(?!scaffold$)[a-z]+(?:ed|en|wn|ld|id)")
CLAUSE = re.compile(r"(?:What|Whether|Whom?|Whose|How|Where|Which|From|Of|As|The (?:ones?|same))\b")
INDIRECT = re.compile(
    r"Return (?:what|whether|how|who|which|where|as)\b|(?:Tell|Say) (?:whether|what|how|who)\b|Have \w+ "
)
RHETORIC = re.compile(
    r"\b(?:whoever|whatever|(?:is|are) none|is no [a-z]+ (?:that|of)|of before|as which|in vain|anew|likewise|"
    r"(?:it is|are|was) told|says so|one too many|by itself|nobody)\b",
    re.IGNORECASE,
)
ENTRY = re.compile(r" {4,}\*{0,2}\w+(?: \([^)]*\))?: (?P<text>.*)")
SECTION = re.compile(r"(?P<title>[A-Z]\w+):")

VARIADIC = {"Path", "create_subprocess_exec", "gather", "max", "min", "print", "to_thread", "zip"}
"""Functions of the standard library that are called with lists of arguments."""

Place = tuple[int, str]
"""Line and text of what a rule counts."""


def find_vague_variables(tree: ast.Module) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id


def find_vague_definitions(tree: ast.Module) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = node.name.strip("_")
            is_participle = isinstance(node, FUNCTIONS) and PARTICIPLE.fullmatch(name) and node.name[:2] != "__"
            if name.lower() in VAGUE or is_participle:
                yield node.lineno, node.name


def find_titles(tree: ast.Module) -> Iterator[Place]:
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    if CLAUSE.match(title) or len(title.split()) > TITLE_WORDS:
        yield 1, title


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and docstring of each function and class."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield node.lineno, text


def find_openings(tree: ast.Module) -> Iterator[Place]:
    for line, text in documented(tree):
        first = text.partition("\n")[0]
        if CLAUSE.match(first) or INDIRECT.match(first):
            yield line, first


def section_entries(docstring: str) -> Iterator[str]:
    """Yield the text of each entry of the sections `Args` and `Attributes`."""
    section, entry = "", None
    for line in [*docstring.splitlines(), ""]:
        title = SECTION.fullmatch(line)
        start = ENTRY.fullmatch(line) if section in {"Args", "Attributes"} else None
        if entry is not None and (title or start or not line.strip()):
            yield entry
            entry = None
        if title:
            section = title["title"]
        elif start:
            entry = start["text"]
        elif entry is not None:
            entry += f" {line.strip()}"


def find_filler(tree: ast.Module) -> Iterator[Place]:
    for line, text in documented(tree):
        yield from ((line, entry) for entry in section_entries(text) if len(entry.split()) <= FILLER_WORDS)


def find_late_constants(tree: ast.Module) -> Iterator[Place]:
    kinds = [isinstance(node, (*FUNCTIONS, ast.ClassDef)) for node in tree.body]
    for node in tree.body[kinds.index(True) :] if True in kinds else []:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from ((node.lineno, name) for name in names if name.isupper() or name in {"log", "logger"})


@cache
def variadic_functions() -> set[str]:
    """Return the names of functions that take any number of positional arguments: ours, and those that we call."""
    ours = {
        node.name
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.args.vararg
    }
    return ours | VARIADIC


def find_unpacked_tuples(tree: ast.Module) -> Iterator[Place]:
    """Yield calls that unpack a named tuple into positional parameters; lists for variadic functions are none."""
    variadic = variadic_functions()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            starred = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
            if name not in variadic and any(isinstance(value, ast.Name | ast.Attribute) for value in starred):
                yield node.lineno, ast.unparse(node)[:80]


def find_rhetoric(tree: ast.Module) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            text = " ".join(part for part in parts if isinstance(part, str))
            if RHETORIC.search(text):
                yield node.lineno, text


Rule = Callable[[ast.Module], Iterator[Place]]
CEILINGS: dict[Rule, int] = {
    find_vague_variables: 60,
    find_vague_definitions: 40,
    find_titles: 20,
    find_openings: 5,
    find_filler: 50,
    find_late_constants: 19,
    find_unpacked_tuples: 2,
    find_rhetoric: 0,
}

LARGE_CLASSES = {
    "device_agent.Agent",
    "device_agent.Connection",
    "device_agent.Download",
    "device_agent.InferenceProcess",
    "device_agent.PowerLog",
    "device_agent.RemoteTop",
    "device_agent.Reporter",
    "device_agent._Session",
    "edge_server.Barrier",
    "edge_server.DeviceSession",
    "edge_server.Digest",
    "edge_server.Gather",
    "edge_server.HcefColumns",
    "edge_server.Links",
    "edge_server.Outgoing",
    "edge_server.Plan",
    "edge_server.RecordedDevice",
    "edge_server.RolloutPlan",
    "edge_server.RolloutState",
    "edge_server.SplitRound",
    "edge_server.StepPayloads",
    "edge_server.VirtualSite",
    "shared.BoundedClient",
    "shared.Connection",
    "shared.Data",
    "shared.FedslSettings",
    "shared.MqttTransport",
    "shared.Pace",
    "shared.ReleaseManifest",
    "shared.SemisflSettings",
    "shared.UpdateRecord",
}
"""Classes with more methods or fields than the ceilings; none may be added."""


@cache
def sources() -> dict[str, ast.Module]:
    paths = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def find(rule: Rule) -> list[str]:
    """Return every place that a rule counts, as `path:line: text`."""
    return [f"{name}:{line}: {text}" for name, tree in sources().items() for line, text in rule(tree)]


def class_size(node: ast.ClassDef) -> tuple[int, int]:
    """Return the number of methods of a class, and of fields: those that it declares and those that methods set."""
    methods = [part for part in node.body if isinstance(part, FUNCTIONS)]
    fields = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for method in methods:
        for part in ast.walk(method):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            ):
                fields.add(part.attr)
    return len(methods), len(fields)


def large_classes() -> set[str]:
    """Return the classes that are too large; records without behaviour may have any number of fields."""
    large = set()
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods, fields = class_size(node)
                if methods > CLASS_METHODS or (fields > CLASS_FIELDS and methods > 1):
                    large.add(f"{name.partition('/')[0]}.{node.name}")
    return large


@pytest.mark.parametrize("rule", CEILINGS, ids=lambda rule: rule.__name__.removeprefix("find_"))
def test_the_count_stays_below_its_ceiling(rule):
    places = find(rule)
    assert len(places) <= CEILINGS[rule], "\n".join(places)


def test_no_more_classes_are_large():
    """A class that became small leaves the list."""
    assert large_classes() == LARGE_CLASSES


SAMPLE = '''"""What the sample is."""
def told(one, given):
    """Return what was told.

    Args:
        one: It.
        given: Pascals of pressure at sea level.
    """
    found = one
    raise ValueError(f"{found} is none that we know")
LATE = told(*rest, 1)
'''


@pytest.mark.parametrize("rule", CEILINGS, ids=lambda rule: rule.__name__.removeprefix("find_"))
def test_each_rule_finds_its_fault(rule):
    counts = {find_vague_variables: 3}
    assert len(list(rule(ast.parse(SAMPLE)))) == counts.get(rule, 1)


if __name__ == "__main__":
    for each, ceiling in CEILINGS.items():
        sys.stdout.write("\n".join([f"{each.__name__}: {len(find(each))} of {ceiling}", *find(each), "", ""]))
    sys.stdout.write("\n".join(["large classes:", *sorted(large_classes()), ""]))
