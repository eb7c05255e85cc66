"""Size budgets: files, functions, nesting and lines stay small, tests included."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.source import FOLDERS, ROOT, parse, python_files, relative

TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))
BUDGET: dict[str, int] = TABLE["budget"]
EXCEPTIONS: list[dict[str, Any]] = TABLE.get("exception", [])
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_elif(parent: ast.AST, child: ast.AST) -> bool:
    return isinstance(parent, ast.If) and isinstance(child, ast.If) and parent.orelse == [child]


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """Statements, handlers and cases directly below: expressions hold none of what is measured."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        held = getattr(node, name, None)
        yield from held if isinstance(held, list) else ()


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Depth of blocks inside a function; an `elif` counts once, a function inside starts anew."""
    deepest = depth
    for child in _below(node):
        if isinstance(child, FUNCTIONS):
            continue
        step = isinstance(child, BLOCKS) and not _is_elif(node, child)
        deepest = max(deepest, nesting(child, depth + step))
    return deepest


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in _below(tree):
        name = (
            f"{prefix}{child.name}" if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else prefix.rstrip(".")
        )
        if isinstance(child, FUNCTIONS):
            yield name, child
        yield from _functions(child, f"{name}." if name else "")


@cache
def measured() -> list[tuple[str, str, int]]:
    """(kind, where, size) of everything that has a budget."""
    return list(_measured())


def _measured() -> Iterator[tuple[str, str, int]]:
    for path in python_files(*FOLDERS):
        name, lines = relative(path), path.read_text(encoding="utf-8").splitlines()
        yield "file", name, len(lines)
        yield from (("line", f"{name}:{number}", len(line)) for number, line in enumerate(lines, 1))
        for function, node in _functions(parse(path)):
            yield "function", f"{name}:{function}", (node.end_lineno or node.lineno) - node.lineno + 1
            yield "nesting", f"{name}:{function}", nesting(node)


def _allowed(kind: str, where: str) -> int:
    raised = [row["size"] for row in EXCEPTIONS if row["kind"] == kind and row["where"] == where]
    return max([BUDGET[kind], *raised])


@pytest.mark.parametrize("kind", list(BUDGET))
def test_within_budget(kind: str) -> None:
    over = [
        f"{where}: {kind} {size} > {_allowed(kind, where)}"
        for found, where, size in measured()
        if found == kind and size > _allowed(kind, where)
    ]
    assert not over, "over budget (make it smaller; an exception needs a reason):\n" + "\n".join(over)


def test_exceptions_are_reasoned_and_needed() -> None:
    sizes = {(kind, where): size for kind, where, size in measured()}
    for row in EXCEPTIONS:
        assert len(row.get("reason", "")) > 20, f"{row['where']}: give the reason"
        size = sizes.get((row["kind"], row["where"]), 0)
        assert size > BUDGET[row["kind"]], f"{row['where']}: within the budget again, remove the exception"


NESTED = """
def f(a, b):
    if a:
        pass
    elif b:
        for x in a:
            with x:
                while b:
                    pass
"""


def test_the_measure_itself() -> None:
    tree = ast.parse(NESTED)
    assert [nesting(node) for _, node in _functions(tree)] == [4]
    assert [name for name, _ in _functions(ast.parse("class A:\n  def f(self):\n    def g(): pass"))] == [
        "A.f",
        "A.f.g",
    ]
