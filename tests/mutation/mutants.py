"""Mutants of a source file: operators, comparisons, constants, branches and statements changed one at a time.

A mutant is named by its function and the text of what it changes, and chosen by a digest of that name: the same seed
chooses the same mutants before and after a change elsewhere in the file, or in another file.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}
NOT_RUN = "log.", "assert "
"""What changes nothing that a test should see."""


@dataclass(frozen=True)
class Mutant:
    """One change of a source file.

    Attributes:
        name: Function, kind and text of the change; the same wherever the function lies.
        source: The whole file after it.
    """

    name: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a source file, in order of its place."""
    found, names = [], Counter[str]()
    places = sum(1 for _ in _places(ast.parse(source)))
    for number in range(places):
        module = ast.parse(source)
        function, statement, kind, change = next(one for i, one in enumerate(_places(module)) if i == number)
        before = ast.unparse(statement).splitlines()[0]
        change()
        name = f"{function}: {kind}: {before}"
        names[name] += 1
        found.append(Mutant(f"{name} #{names[name]}", ast.unparse(ast.fix_missing_locations(module))))
    return found


def chosen(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, the same for the same seed whatever else there is."""
    return sorted(every, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest())[:count]


def _places(module: ast.Module) -> Iterator[tuple[str, ast.stmt, str, object]]:
    """Yield (function, statement, kind, change) for all that can be changed inside of functions."""
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for holder in ast.walk(function):
                for body in (getattr(holder, name, None) for name in ("body", "orelse", "finalbody")):
                    if isinstance(body, list):
                        yield from _in_body(function.name, body)


def _in_body(function: str, body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt, str, object]]:
    for index, statement in enumerate(body):
        if ast.unparse(statement).startswith(NOT_RUN) or _is_text(statement):
            continue
        if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
            yield function, statement, "removed", lambda i=index: body.__setitem__(i, ast.Pass())
        if isinstance(statement, ast.If):
            yield function, statement, "swapped", lambda one=statement: setattr(one, "test", _negated(one.test))
        for node in _expressions(statement):
            yield from ((function, statement, kind, change) for kind, change in _in_expression(node))


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement itself, not of the statements below it."""
    waiting: list[ast.AST] = [one for one in ast.iter_child_nodes(statement) if not isinstance(one, ast.stmt)]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        waiting = []
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt | ast.JoinedStr))


def _in_expression(node: ast.AST) -> Iterator[tuple[str, object]]:
    match node:
        case ast.Compare(ops=ops):
            for i, one in enumerate(ops):
                other = COMPARISONS[type(one)]
                yield f"{type(one).__name__} to {other.__name__}", lambda i=i, to=other: ops.__setitem__(i, to())
        case ast.BinOp(op=op) if type(op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            to = OPERATORS[type(op)]
            yield f"{type(op).__name__} to {to.__name__}", lambda: setattr(node, "op", to())
        case ast.BoolOp(op=op):
            to = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} to {to.__name__}", lambda: setattr(node, "op", to())
        case ast.Constant(value=bool(value)):
            yield f"{value} to {not value}", lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield f"{value} to {value + 1}", lambda: setattr(node, "value", value + 1)
        case ast.IfExp():
            yield "swapped", lambda: setattr(node, "test", _negated(node.test))


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
