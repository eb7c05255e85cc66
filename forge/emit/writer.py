"""Indentation-safe source writer and the spelling of dims shared by every kernel text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from esper_ir.types import Dim, FloorDiv


class Writer:
    """Lines with a current depth."""

    def __init__(self, unit: str = "    ") -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.unit = unit

    def line(self, text: str = "") -> None:
        self.lines.append(self.unit * self.depth + text if text else "")

    @contextmanager
    def block(self, head: str, tail: str = "") -> Iterator[None]:
        """Everything written inside stands one level deeper; `tail` closes it (a brace in C)."""
        self.line(head)
        self.depth += 1
        yield
        self.depth -= 1
        if tail:
            self.line(tail)

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def size_name(symbol: str) -> str:
    """The parameter of a size: a name that no value, position or word of the language has."""
    return f"n_{symbol}"


def dim_text(dim: Dim) -> str:
    """Integer expression of a dim in Python-like syntax, in parentheses unless it is one word."""
    if not dim.terms:
        return "0"
    parts = []
    for monomial, coefficient in dim.terms:
        atoms = [size_name(a) if isinstance(a, str) else _floordiv(a) for a in monomial]
        factors = ([str(coefficient)] if coefficient != 1 or not atoms else []) + atoms
        parts.append(" * ".join(factors))
    return parts[0] if len(parts) == 1 and " " not in parts[0] else "(" + " + ".join(parts) + ")"


def _floordiv(atom: FloorDiv) -> str:
    return f"({dim_text(atom.numerator)} // {atom.divisor})"
