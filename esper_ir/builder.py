"""Ways to make graphs in Python: `Builder` for people (a blueprint), `GraphBuilder` for rules and passes
(typed).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint, Leaf, Node, Ref, value_name
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.infer import Inference
from esper_ir.opdef import Number
from esper_ir.registry import OPS, lookup
from esper_ir.text import NAME, SECTIONS, SYMBOL, dim_spec, freeze, initialiser
from esper_ir.types import Dim, DimSpec, DType, TensorType
from esper_ir.verify import typed

__all__ = ["Builder", "GraphBuilder", "Value"]

_HERE = str(Path(__file__))
Shape = Sequence[int | str | Dim]


def _caller() -> str:
    """File and line of the nearest frame outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == _HERE:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _plain(value: Any) -> Any:
    """An attribute as the text form holds it."""
    if isinstance(value, DType):
        return value.value
    if isinstance(value, Dim):
        return value.to_json()
    return tuple(_plain(v) for v in value) if isinstance(value, (tuple, list)) else value


class Value:
    """A value of a blueprint under construction; arithmetic, comparisons and indexing add nodes."""

    __iter__ = None  # indexing alone would make it a sequence without an end

    def __init__(self, builder: Builder, name: str, kind: TensorType) -> None:
        self.builder, self.name, self.type = builder, name, kind

    def __repr__(self) -> str:
        return f"<{self.name}: {self.type}>"

    def __add__(self, other: Value | Number) -> Value:
        return self.builder.op("add", self, other)

    def __radd__(self, other: Number) -> Value:
        return self.builder.op("add", other, self)

    def __sub__(self, other: Value | Number) -> Value:
        return self.builder.op("sub", self, other)

    def __rsub__(self, other: Number) -> Value:
        return self.builder.op("sub", other, self)

    def __mul__(self, other: Value | Number) -> Value:
        return self.builder.op("mul", self, other)

    def __rmul__(self, other: Number) -> Value:
        return self.builder.op("mul", other, self)

    def __truediv__(self, other: Value | Number) -> Value:
        return self.builder.op("div", self, other)

    def __rtruediv__(self, other: Number) -> Value:
        return self.builder.op("div", other, self)

    def __pow__(self, other: Value | Number) -> Value:
        return self.builder.op("pow", self, other)

    def __matmul__(self, other: Value) -> Value:
        return self.builder.op("matmul", self, other)

    def __rpow__(self, other: Number) -> Value:
        return self.builder.op("pow", other, self)

    def __neg__(self) -> Value:
        return self.builder.op("neg", self)

    def __lt__(self, other: Value | Number) -> Value:
        return self.builder.op("lt", self, other)

    def __le__(self, other: Value | Number) -> Value:
        return self.builder.op("le", self, other)

    def __gt__(self, other: Value | Number) -> Value:
        return self.builder.op("gt", self, other)

    def __ge__(self, other: Value | Number) -> Value:
        return self.builder.op("ge", self, other)

    def __getitem__(self, key: Any) -> Value:
        """Numbers, slices with positive steps, None and one `...`, as torch reads them."""
        keys = key if isinstance(key, tuple) else (key,)
        taken = sum(k is not None and k is not Ellipsis for k in keys)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = (*keys[:at], *[slice(None)] * (self.type.rank - taken), *keys[at + 1 :])
        value, axis = self, 0
        for part in keys:
            value = value._part(part, axis)
            axis += not isinstance(part, int)
        return value

    def _part(self, part: Any, axis: int) -> Value:
        if part is None:
            return self.builder.op("unsqueeze", self, dim=axis)
        if isinstance(part, int):
            return self.builder.op("select", self, dim=axis, index=part)
        if not isinstance(part, slice):
            raise EsperError("E0203", f"cannot index by {part!r}", hint=f"at {_caller()}; see index_select")
        if part == slice(None):
            return self
        start, step = part.start or 0, part.step or 1
        return self.builder.op("slice", self, dim=axis, start=start, end=part.stop, step=step)

    @property
    def T(self) -> Value:
        """The last two axes exchanged."""
        return self.builder.op("transpose", self, dim0=-2, dim1=-1)


class Builder:
    """Builds a blueprint: `b = Builder("mlp"); x = b.input("x", "bfloat16", ["rows", 64]); y = b.silu(x @
    w)`.

    Every operator of the language is a method; shapes are checked as nodes are added, and an error names the
    caller's line. `b.build(y)` gives the verified Blueprint.
    """

    def __init__(self, name: str, **metadata: Any) -> None:
        self.name = name
        self.metadata: dict[str, Any] = metadata
        self._dims: dict[str, DimSpec] = {}
        self._leaves: dict[str, Leaf] = {}
        self._nodes: list[Node] = []
        self._taken: set[str] = set()
        self._infer = Inference(self._dims)

    def dim(self, name: str, *, min: int = 1, max: int = 2**31 - 1, tune: Sequence[int] = (),
            multiple_of: int = 1) -> Dim:  # fmt: skip
        """Declare a symbolic size with its inclusive range and the sizes to tune for."""
        if not SYMBOL.fullmatch(name):
            raise EsperError("E0107", f"bad name {name!r} of a dim", hint=f"at {_caller()}")
        written = {"min": min, "max": max, "tune": list(tune), "multiple_of": multiple_of}
        self._dims[name] = dim_spec(written, name)
        return Dim.sym(name)

    def at_least(self, count: Dim, low: int) -> None:
        """Raise the least size of a dim that is this count, where smaller ones mean nothing."""
        for name in count.symbols():
            spec = self._dims[name]
            if count == Dim.sym(name) and spec.min < low:
                self._dims[name] = replace(spec, min=-(-low // spec.multiple_of) * spec.multiple_of)

    def input(self, name: str, dtype: str | DType, shape: Shape) -> Value:
        return self._leaf(Leaf(name, "input", TensorType.of(dtype, shape)))

    def param(self, name: str, dtype: str | DType, shape: Shape, init: Mapping[str, Any] | str | None = None,
              compute: str | DType | None = None) -> Value:  # fmt: skip
        """A parameter. `compute`: the dtype in which the graph reads it (mixed precision)."""
        given = None if init is None else initialiser(init, f"params.{name}.init")
        seen = DType.parse(compute) if isinstance(compute, str) else compute
        return self._leaf(Leaf(name, "param", TensorType.of(dtype, shape), given, seen))

    def buffer(
        self, name: str, dtype: str | DType, shape: Shape, init: Mapping[str, Any] | None = None
    ) -> Value:
        given = None if init is None else initialiser(init, f"buffers.{name}.init")
        return self._leaf(Leaf(name, "buffer", TensorType.of(dtype, shape), given))

    def constant(self, name: str, dtype: str | DType, shape: Shape, data: Any) -> Value:
        return self._leaf(Leaf(name, "constant", TensorType.of(dtype, shape), data=freeze(data, name)))

    def _leaf(self, leaf: Leaf) -> Value:
        self._claim(leaf.name)
        self._leaves[leaf.name] = leaf
        kind = leaf.type if leaf.compute is None else TensorType(leaf.compute, leaf.type.shape)
        return Value(self, leaf.name, kind)

    def is_free(self, name: str) -> bool:
        """Whether nothing is called `name` yet."""
        return name not in self._taken

    def _claim(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise EsperError("E0107", f"bad name {name!r}", hint=f"at {_caller()}")
        if name in self._taken:
            raise EsperError("E0304", f"the name {name!r} is used twice", node=name, hint=f"at {_caller()}")
        self._taken.add(name)

    def op(self, op: str, *operands: Value | Number, name: str | None = None, **attrs: Any) -> Value:
        """Add a node and give its first output."""
        return self.many(op, *operands, name=name, **attrs)[0]

    def many(
        self, op: str, *operands: Value | Number, name: str | None = None, **attrs: Any
    ) -> tuple[Value, ...]:
        """Add a node and give all its outputs; raises EsperError E0201-E0208, E0301, E0403 with the caller's
        line.
        """
        at = _caller()
        for operand in operands:
            if isinstance(operand, Value) and operand.builder is not self:
                raise EsperError(
                    "E0403", f"{operand!r} belongs to another builder", node=name or op, hint=f"at {at}"
                )
        given = {k: _plain(v) for k, v in attrs.items()}
        try:
            types = [o.type if isinstance(o, Value) else o for o in operands]
            _, outputs = self._infer(lookup(op), types, given)
        except EsperError as error:
            hint = f"at {at}" + (f"; {error.hint}" if error.hint else "")
            raise EsperError(error.code, error.message, node=name or op, hint=hint) from None
        node_id = name or self._fresh(op)
        self._claim(node_id)
        refs: tuple[Ref, ...] = tuple(o.name if isinstance(o, Value) else o for o in operands)
        frozen = tuple(sorted((k, freeze(v, k)) for k, v in given.items()))
        self._nodes.append(Node(node_id, op, refs, frozen))
        return tuple(Value(self, value_name(node_id, i), t) for i, t in enumerate(outputs))

    def _fresh(self, op: str) -> str:
        number = 0
        while (name := f"{op}_{number}" if number else op) in self._taken:
            number += 1
        return name

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_") or op not in OPS:
            raise AttributeError(op)
        return lambda *operands, name=None, **attrs: self.op(op, *operands, name=name, **attrs)

    def build(
        self,
        *outputs: Value,
        differentiable: Sequence[Value] | None = None,
        updates: Mapping[str, Value] | None = None,
        random: Sequence[Value] = (),
    ) -> Blueprint:
        """The blueprint with these outputs; raises EsperError with everything that `verify` finds.

        `updates`: next values of buffers by name, which become the last outputs; `random`: inputs that are
        drawn for every call.
        """
        nexts = updates or {}
        rank = {kind: i for i, kind in enumerate(SECTIONS.values())}
        bp = Blueprint(
            name=self.name,
            leaves=tuple(sorted(self._leaves.values(), key=lambda leaf: rank[leaf.kind])),
            nodes=tuple(self._nodes),
            outputs=tuple(v.name for v in (*outputs, *nexts.values())),
            dims=dict(self._dims),
            differentiable=None if differentiable is None else tuple(v.name for v in differentiable),
            metadata=dict(self.metadata),
            updates={name: value.name for name, value in nexts.items()},
            random=tuple(v.name for v in random),
        )
        typed(bp)
        return bp
