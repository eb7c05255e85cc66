"""The second stage of reductions down the columns: all partial rows of a group to its results, in one kernel,
with the pointwise work that follows them.

Squares about a mean have three partial rows: the sum of a program's rows; `rest`, the mean of x - m, where m
is sum / rows rounded (what m leaves of it); and `squares`, the sum of squared differences from the mean.
The last two are about the name of the first. Here `squares` adds up those of all programs, about the names of
how many rows each had and of the two values that add up to their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from esper_ir.graph import Graph, Node
from esper_ir.opdef import Pointwise, Reduction
from esper_ir.registry import OPS
from esper_ir.scalar import Arg, Const, prim, substitute
from esper_ir.types import Dim, DType
from forge.body import Body, finish_reduction
from forge.groups import Group
from forge.lowered import Temp, ceildiv
from forge.plan import INDEX, Access, Compute, Load, Reduce, RowTile, Stmt, Store
from forge.views import ONE

ZERO = Dim()


@dataclass(frozen=True)
class Shares:
    """How many of `rows` a partial row has: those of every `programs`-th block of `block` rows, or of one
    block where `programs` is 0.
    """

    rows: Dim
    block: int
    programs: int

    @staticmethod
    def of(tile: RowTile, rows: Dim) -> Shares:
        return Shares(rows, tile.block_rows if tile.programs else tile.rows_per_program, tile.programs)

    @property
    def before(self) -> Dim:
        """Turns that every program has whole: all but the last."""
        return ceildiv(self.rows, self.block * self.programs) - ONE if self.programs else ZERO


def kind_of(graph: Graph, node: str) -> DType:
    """The type of the partial rows of a reduction."""
    return graph.types[graph.by_output[node].tensors[0]].dtype.compute


def workspaces(graph: Graph, body: Body, programs: Dim, cols: Dim) -> dict[str, Temp]:
    """The memory of all partial rows."""
    buffers = {buffer: node for node, pair in body.means.items() for buffer in pair}
    buffers |= {buffer: node for node, buffer in body.partials.items()}
    return {buffer: Temp(kind_of(graph, node), (programs, cols)) for buffer, node in buffers.items()}


@dataclass
class SecondStage:
    """Accesses over (parts, columns) and statements. Added up in float64 where `wider`."""

    graph: Graph
    group: Group
    body: Body
    cols: Dim
    wider: bool
    shares: Shares
    accesses: list[Access] = field(default_factory=list)
    stmts: list[Stmt] = field(default_factory=list)
    parts: dict[Access, str] = field(default_factory=dict)
    folds: dict[str, str] = field(default_factory=dict)
    counts: dict[DType, str] = field(default_factory=dict)

    def build(self, summed: Mapping[str, Access], stored: frozenset[str]) -> SecondStage:
        """What is `summed`, by reduction, is added up in the place of its partial rows; `stored`: values that
        are read outside of the group.
        """
        names: dict[str, str] = {}
        for node_id, buffer in self.body.partials.items():
            node, kind = self.graph.by_output[node_id], kind_of(self.graph, node_id)
            own = summed.get(node_id, Access(buffer, kind, (self.cols, ONE)))
            total = self.narrowed(self.fold(node_id, own), kind)
            names[node_id] = finish_reduction(node, self.graph, total, self.add, self.size)
        for node in self.group.nodes:
            if node.id in self.group.finishers:
                names[node.id] = self.add(partial(_finish, node, names))
        for node_id in (n for n in names if n in stored):
            self.accesses.append(Access(node_id, self.graph.types[node_id].dtype, (ZERO, ONE)))
            self.stmts.append(Store(len(self.accesses) - 1, names[node_id]))
        return self

    def add(self, make: Callable[[str], Stmt]) -> str:
        name = f"v{len(self.stmts)}"
        self.stmts.append(make(name))
        return name

    def load(self, access: Access) -> str:
        self.accesses.append(access)
        return self.add(partial(_load, len(self.accesses) - 1))

    def size(self, value: Dim, dtype: DType) -> str:
        loaded = self.load(Access(INDEX, DType.int64, (ZERO, ZERO), offset=value))
        return self.add(partial(_narrow, loaded, dtype))

    def fold(self, node_id: str, access: Access) -> str:
        """The partial rows of a reduction as one."""
        low, kind = OPS[self.graph.by_output[node_id].op].lowering, kind_of(self.graph, node_id)
        assert isinstance(low, Reduction)
        if low.combine != "squares":
            return self.folded(access, low.combine)
        if access.buffer in self.folds:
            return self.folds[access.buffer]
        sums, rests = (Access(buffer, kind, (self.cols, ONE)) for buffer in self.body.means[node_id])
        total, count = self.part(sums), self.count(kind)
        quotient = prim("div", Arg(0), prim("maximum", Arg(1), Const(1.0)))
        mean = self.add(partial(Compute, expr=quotient, args=(total, count), dtype=kind))
        parts = (self.wide(mean, kind), self.wide(self.part(rests), kind))
        square, wide = self.wide(self.part(access), kind), self.wide(count, kind)
        made = self.add(lambda n: Reduce(n, square, "squares", "col", (wide, *parts)))
        return self.folds.setdefault(access.buffer, made)

    def folded(self, access: Access, combine: str) -> str:
        loaded = self.parts[access] = self.load(access)
        loaded = self.wide(loaded, access.dtype)
        return self.add(lambda n: Reduce(n, loaded, combine, "col"))

    def part(self, access: Access) -> str:
        """A partial row, loaded once."""
        if access not in self.parts:
            self.parts[access] = self.load(access)
        return self.parts[access]

    def widens(self, kind: DType) -> bool:
        return self.wider and kind.is_floating

    def wide(self, name: str, kind: DType) -> str:
        return self.add(partial(_narrow, name, DType.float64)) if self.widens(kind) else name

    def narrowed(self, name: str, kind: DType) -> str:
        return self.add(partial(_narrow, name, kind)) if self.widens(kind) else name

    def count(self, kind: DType) -> str:
        """Elements that a partial row was made from."""
        if kind in self.counts:
            return self.counts[kind]
        shares = self.shares
        part = self.load(Access(INDEX, DType.int64, (ONE, ZERO)))
        turn = shares.block * shares.programs
        rest = self.size(shares.rows - shares.before * turn, DType.int64)
        left = prim("sub", Arg(1), prim("mul", Arg(0), Const(shares.block)))
        own = prim("minimum", prim("maximum", left, Const(0)), Const(shares.block))
        rows = self.add(lambda n: Compute(n, own, (part, rest), DType.int64))
        if shares.before != ZERO:
            before = self.size(shares.before * shares.block, DType.int64)
            last = rows
            rows = self.add(lambda n: Compute(n, prim("add", Arg(0), Arg(1)), (last, before), DType.int64))
        self.counts[kind] = self.add(partial(_narrow, rows, kind))
        return self.counts[kind]


def _load(access: int, name: str) -> Stmt:
    return Load(name, access)


def _narrow(arg: str, dtype: DType, name: str) -> Stmt:
    return Compute(name, Arg(0), (arg,), dtype)


def _finish(node: Node, names: dict[str, str], name: str) -> Stmt:
    """A pointwise finisher: every tensor operand is a column result."""
    low = OPS[node.op].lowering
    assert isinstance(low, Pointwise)
    args = [names[r] for r in node.inputs if isinstance(r, str)]
    order = iter(range(len(args)))
    operands = [Arg(next(order)) if isinstance(r, str) else Const(r) for r in node.inputs]
    return Compute(name, substitute(low.body(dict(node.attrs)), operands), tuple(args), node.types[0].dtype)
