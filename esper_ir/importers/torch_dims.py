"""Sizes that vary: what a user asks for, what torch.export is told, and torch's expressions as dims."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper_ir.diagnostics import EsperError
from esper_ir.text import SYMBOL
from esper_ir.types import Dim, DimSpec

LARGEST = 2**20
"""Upper end of a range that the user leaves open."""
ONLY = ""  # in place of a name: the only input
Axis = int | tuple[int, str] | tuple[int, str, DimSpec]
Dynamic = int | Sequence[int] | Mapping[int | str, Any] | None
"""What `dynamic` may be: an axis or several, of every input; or {input: axes}, by name or place, where
axes are an axis, several, or {axis: name} and {axis: (name, DimSpec)}.
"""


def _bad(message: str) -> EsperError:
    hint = "an axis, several, or {input: {axis: name}}; from the command line [input:]axis[=name[:min:max]]"
    return EsperError("E0407", message, hint=hint)


@dataclass
class Dims:
    """The symbols of one import. `specs`: declared dims by name, tuned for the size of the example unless
    told otherwise; `sizes`: of the example; `symbols`: torch's symbols by name.
    """

    specs: dict[str, DimSpec] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, Dim] = field(default_factory=dict)

    def declare(self, name: str, size: int, spec: DimSpec | None) -> str:
        """A dim of this name and size; one of another size gets a name of its own."""
        if not SYMBOL.fullmatch(name):
            raise _bad(f"bad name {name!r} of a dim")
        wanted, number = name, 1
        while self.sizes.get(name, size) != size:
            if spec is not None:
                raise _bad(f"{name} is {self.sizes[name]} in one input and {size} in another")
            number += 1
            name = f"{wanted}{number}"
        self.sizes[name] = size
        kept = self.specs.get(name)
        wide = spec or kept or DimSpec(1, max(LARGEST, size))
        self.specs[name] = (
            wide if wide.tune else replace(wide, tune=(size,) if wide.min <= size <= wide.max else ())
        )
        return name

    def of(self, size: Any) -> Dim:
        """torch's size (int or SymInt) as a dim; E0408 when its expression is none of the language's."""
        if isinstance(size, int):
            return Dim.of(size)
        return self.expression(size.node.expr)

    def maybe(self, size: Any) -> Dim | None:
        try:
            return self.of(size)
        except EsperError:
            return None

    def expression(self, expr: Any) -> Dim:
        """Sums, products and floor divisions by constants over the symbols."""
        kind = type(expr).__name__
        if expr.is_Integer:
            return Dim.of(int(expr))
        if expr.is_Symbol and str(expr) in self.symbols:
            return self.symbols[str(expr)]
        if kind == "Add":
            return sum((self.expression(a) for a in expr.args), Dim())
        if kind == "Mul":
            out = Dim.of(1)
            for part in expr.args:
                out = out * self.expression(part)
            return out
        if kind == "Pow" and expr.args[1].is_Integer and int(expr.args[1]) > 0:
            base, out = self.expression(expr.args[0]), Dim.of(1)
            for _ in range(int(expr.args[1])):
                out = out * base
            return out
        if kind in ("FloorDiv", "CleanDiv"):
            divisor = self.expression(expr.args[1]).static
            if divisor is not None and divisor > 0:
                return self.expression(expr.args[0]) // divisor
        hint = "sizes are sums, products and floor divisions by constants of dims"
        raise EsperError("E0408", f"the size {expr} has no counterpart", hint=hint)


def _axes(wanted: Any, rank: int) -> list[tuple[int, str | None, DimSpec | None]]:
    """(axis, name, range) of one input."""
    if wanted is None:
        return []
    if isinstance(wanted, int):
        wanted = (wanted,)
    rows: list[tuple[int, str | None, DimSpec | None]] = []
    items = wanted.items() if isinstance(wanted, Mapping) else ((a, None) for a in wanted)
    for axis, named in items:
        name, spec = named if isinstance(named, tuple) else (named, None)
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise _bad(f"{axis!r} is no axis")
        if not -rank <= axis < rank:
            raise _bad(f"axis {axis} of a tensor of rank {rank}")
        rows.append((axis % rank, name, spec))
    return rows


def _wanted(dynamic: Dynamic, name: str, position: int) -> Any:
    if not isinstance(dynamic, Mapping):
        return dynamic
    return dynamic.get(name, dynamic.get(position))


def _of_the_only(dynamic: Mapping[int | str, Any], names: Sequence[str]) -> Mapping[int | str, Any]:
    """Axes of no named input belong to the only one."""
    if len(names) != 1:
        axis = next(iter(dynamic[ONLY]))
        raise _bad(f"a dim of axis {axis} but of which input? {names[0]}:{axis}=..., of {', '.join(names)}")
    return {names[0]: {**dynamic.get(names[0], {}), **dynamic[ONLY]}}


def plan(dynamic: Dynamic, tensors: Sequence[tuple[str, Tensor]]) -> tuple[Dims, list[dict[int, str]]]:
    """Dims and, per tensor in order, the dim of every axis that varies. Raises EsperError E0407."""
    dims, rows = Dims(), []
    if isinstance(dynamic, Mapping) and ONLY in dynamic:
        dynamic = _of_the_only(dynamic, [n for n, _ in tensors])
    if isinstance(dynamic, Mapping):
        names = {n for n, _ in tensors}
        for key in dynamic:
            if key not in names and not (isinstance(key, int) and 0 <= key < len(tensors)):
                raise _bad(f"no input {key!r}; there are {', '.join(n for n, _ in tensors)}")
    for position, (name, tensor) in enumerate(tensors):
        row: dict[int, str] = {}
        asked = _wanted(dynamic, name, position)
        everywhere = not isinstance(dynamic, Mapping)
        if everywhere and asked is not None:
            several = (asked,) if isinstance(asked, int) else tuple(asked)
            asked = [a for a in several if -tensor.dim() <= a < tensor.dim()]
        for axis, label, spec in _axes(asked, tensor.dim()):
            default = "batch" if axis == 0 else f"size{axis}"
            row[axis] = dims.declare(label or default, int(tensor.shape[axis]), spec)
        rows.append(row)
    if dynamic is not None and not any(rows):
        raise _bad("no input has such an axis")
    return dims, rows


def widened(arguments: Any, rows: Sequence[dict[int, str]]) -> Any:
    """The example with every varying axis of size 1 twice as long: torch takes a 1 for a constant."""
    waiting = list(rows)

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for axis in waiting.pop(0):
            leaf = torch.cat((leaf, leaf), axis) if leaf.shape[axis] == 1 else leaf
        return leaf

    return pytree.tree_map(of, arguments)


def shapes_for_export(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dims: Dims,
    rows: Sequence[dict[int, str]],
    positional: str | None,
) -> Any:
    """`dynamic_shapes` of torch.export: the structure of the arguments with an axis map per tensor.
    `positional`: the name of `*args` of the callable, when it has one.
    """
    if not any(rows):
        return None
    made = {n: torch.export.Dim(n, min=s.min, max=s.max) for n, s in dims.specs.items()}
    waiting = list(rows)

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return {axis: made[name] for axis, name in waiting.pop(0).items()} or None

    shaped = [pytree.tree_map(of, a) for a in args]
    named = {k: pytree.tree_map(of, v) for k, v in kwargs.items()}
    if positional is None and not named:
        return tuple(shaped)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [n for n, p in inspect.signature(forward).parameters.items() if p.kind in kinds]
    out: dict[str, Any] = dict(zip(names, shaped, strict=False))
    if positional is not None:
        out[positional] = tuple(shaped[len(names) :])
    return {**out, **named}


def bind(dims: Dims, rows: Sequence[dict[int, str]], metas: Sequence[Any]) -> None:
    """Names torch's symbols: the size of every varying axis of the inputs in the graph is its dim."""
    for row, meta in zip(rows, metas, strict=True):
        for axis, name in row.items():
            size = meta.shape[axis]
            if isinstance(size, torch.SymInt):
                dims.symbols.setdefault(str(size.node.expr), Dim.sym(name))


_OPTION = re.compile(r"(?:([A-Za-z_]\w*):)?(-?\d+)(?:=([A-Za-z_]\w*)(?::(\d+):(\d+))?)?\Z", re.ASCII)


def from_options(options: Sequence[str]) -> Dynamic:
    """`--dynamic` options as the argument: "0", "x:0", "x:0=tokens", "x:0=tokens:1:4096", and without "x:" of
    the only input. Raises E0407."""
    everywhere: list[int] = []
    named: dict[int | str, dict[int, Any]] = {}
    for text in options:
        found = _OPTION.match(text)
        if found is None:
            raise _bad(f"cannot read --dynamic {text!r}")
        name, axis, label, low, high = found.groups()
        spec = DimSpec(int(low), int(high)) if low else None
        if name is None and label is None:
            everywhere.append(int(axis))
        else:
            named.setdefault(name or ONLY, {})[int(axis)] = label if spec is None else (label, spec)
    if everywhere and named:
        raise _bad("axes of every input and of one input do not go together")
    return named or (everywhere or None)
