"""Sizes of the launch manifest: a closed grammar over dims, read strictly, evaluated, never run as code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EsperError

Size = int | str | tuple[Any, ...]
SIZE_OPS = ("add", "sub", "mul", "floordiv", "ceildiv", "mod", "min", "max")


def evaluate(size: Size, dims: Mapping[str, int]) -> int:
    """Value of a size with every dim bound."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return dims[size]
    op, a, b = size[0], evaluate(size[1], dims), evaluate(size[2], dims)
    return _OPS[op](a, b)


def _nonzero(b: int) -> int:
    if b <= 0:
        raise bad("size", f"division by {b}")
    return b


_OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // _nonzero(b),
    "ceildiv": lambda a, b: -(-a // _nonzero(b)),
    "mod": lambda a, b: a % _nonzero(b),
    "min": min,
    "max": max,
}


def bad(where: str, what: str) -> EsperError:
    """E0720."""
    return EsperError(
        "E0720",
        f"launch manifest: {what}",
        node=where,
        hint="the artifact is not usable; recompile it",
        exit_code=EXIT_INTEGRITY,
    )


def check_size(size: Any, dims: frozenset[str], where: str, depth: int = 0) -> Size:
    """A size from JSON, checked against the grammar and the declared dims."""
    if isinstance(size, bool) or depth > 16:
        raise bad(where, f"not a size: {size!r}")
    if isinstance(size, int):
        return size
    if isinstance(size, str) and size in dims:
        return size
    if isinstance(size, (list, tuple)) and len(size) == 3 and size[0] in SIZE_OPS:
        return (
            size[0],
            check_size(size[1], dims, where, depth + 1),
            check_size(size[2], dims, where, depth + 1),
        )
    raise bad(where, f"not a size: {size!r}")
