"""From the nodes of a group to the accesses and statements of a kernel plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import esper_ir.opdef as opdef
from esper_ir.graph import Graph, Node, Ref
from esper_ir.opdef import Pointwise, Reduction, compute_dtype
from esper_ir.registry import OPS
from esper_ir.scalar import Arg, Cast, Const, Expr, prim, substitute
from esper_ir.types import Dim, DType, TensorType
from forge.groups import Group, Placement, lowering_kind
from forge.plan import INDEX, Access, Compute, Load, Reduce, Scan, Stmt, Store
from forge.views import ONE, View, dense_strides

ZERO = Dim()


@dataclass
class Body:
    """Accesses (strides over the group's space) and statements, plus what is left for a second stage.

    `partials`: column reduction node -> name of its workspace buffer; `means`: for squares about a mean,
    those of the sums and of what the rounded means leave.
    """

    accesses: list[Access] = field(default_factory=list)
    stmts: list[Stmt] = field(default_factory=list)
    partials: dict[str, str] = field(default_factory=dict)
    means: dict[str, tuple[str, str]] = field(default_factory=dict)


class BodyBuilder:
    """Lowers one group. `stored` are the values of the group that someone outside reads."""

    def __init__(self, graph: Graph, group: Group, views: Mapping[str, View], stored: set[str]) -> None:
        self.graph = graph
        self.group = group
        self.views = views
        self.stored = stored
        self.body = Body()
        self.names: dict[str, str] = {}
        self.loaded: dict[Access, str] = {}
        self.added: dict[tuple[str, str], tuple[str, str]] = {}
        self.producers = {n.id: n for n in graph}

    def build(self) -> Body:
        for node in self.group.nodes:
            if node.id in self.group.finishers:
                continue
            if node is self.group.contraction:
                self._contraction(node, "acc")
            elif node is self.group.second:
                self._contraction(node, "acc2")
            elif lowering_kind(node) == "movement":
                self._movement(node)
            elif lowering_kind(node) == "reduction":
                self._reduction(node)
            elif lowering_kind(node) == "scan":
                self._scan(node)
            elif lowering_kind(node) == "lookup":
                self._lookup(node)
            else:
                self._pointwise(node)
            if node.id in self.stored and node.id not in self.group.columns:
                self.store(node.id)
        return self.body

    def fresh(self) -> str:
        return f"v{len(self.body.stmts)}"

    def add(self, make: Callable[[str], Stmt]) -> str:
        name = self.fresh()
        self.body.stmts.append(make(name))
        return name

    # Statements -----------------------------------------------------------------------------------

    def _contraction(self, node: Node, sum_of: str) -> None:
        dtype = node.types[0].dtype
        self.names[node.id] = self.add(lambda n: Compute(n, Arg(0), (sum_of,), dtype))

    def _movement(self, node: Node) -> None:
        source = node.tensors[0]
        inside = source in self.names
        self.names[node.id] = (
            self.names[source] if inside else self.load(node.id, self.group.placements[node.id])
        )

    def _pointwise(self, node: Node) -> None:
        low = OPS[node.op].lowering
        assert isinstance(low, Pointwise)
        args: list[str] = []
        operands: list[Expr] = []
        for position, ref in enumerate(node.inputs):
            constant = self.constant(ref)
            if constant is not None:
                operands.append(Const(constant))
                continue
            operands.append(self.widened(node, position, Arg(len(args))))
            args.append(self.operand(node, position))
        expr = substitute(low.body(dict(node.attrs)), operands)
        dtype = node.types[0].dtype
        self.names[node.id] = self.add(lambda n: Compute(n, expr, tuple(args), dtype))

    def widened(self, node: Node, position: int, arg: Expr) -> Expr:
        """An integer operand in the type that the node computes in: narrow ones would wrap."""
        types = [self.graph.types[r] if isinstance(r, str) else r for r in node.inputs]
        own, kind = types[position], compute_dtype(types, node.types)
        assert isinstance(own, TensorType)
        plain = node.op == "cast" or own.dtype is DType.bool or own.dtype.is_floating or kind.is_floating
        return arg if plain or own.dtype is kind else Cast(arg, kind)

    def _reduction(self, node: Node) -> None:
        low = OPS[node.op].lowering
        assert isinstance(low, Reduction)
        column = node.id in self.group.columns
        source = self.source(node)
        if not column:
            name = self.add(lambda n: Reduce(n, source, low.combine, "row"))
            self.names[node.id] = finish_reduction(node, self.graph, name, self.add, self.size)
            return
        kind = self.graph.types[node.tensors[0]].dtype.compute
        if low.combine != "squares":
            self.body.partials[node.id] = self._column(source, low.combine, f"{node.id}:partial", kind)[1]
            return
        total, sums = self._column(source, "sum", f"{node.id}:sums", kind, again=False)
        rests = self._column(source, "rest", f"{node.id}:rests", kind, total, again=False)[1]
        self.body.means[node.id] = sums, rests
        squares = self._column(source, "squares", f"{node.id}:partial", kind, total, again=False)
        self.body.partials[node.id] = squares[1]

    def _column(
        self, source: str, combine: str, buffer: str, kind: DType, total: str = "", again: bool = True
    ) -> tuple[str, str]:
        """A reduction down the columns and its partial rows: (its name, the buffer). Without `again` those
        that are there already.
        """
        if again or (source, combine) not in self.added:
            name = self.add(lambda n: Reduce(n, source, combine, "col", (total,) if total else ()))
            strides = (ZERO,) * (len(self.group.space) - 1) + (ONE,)
            self.body.accesses.append(Access(buffer, kind, strides, partial=True))
            self.body.stmts.append(Store(len(self.body.accesses) - 1, name))
            self.added.setdefault((source, combine), (name, buffer))
            return name, buffer
        return self.added[source, combine]

    def _scan(self, node: Node) -> None:
        low = OPS[node.op].lowering
        assert isinstance(low, opdef.Scan)
        args = tuple(self.operand(node, at) for at in range(len(node.inputs)))
        reverse = bool(node.attr("reverse"))
        self.names[node.id] = self.add(lambda n: Scan(n, args, low.combine, reverse))

    def _lookup(self, node: Node) -> None:
        """Rows of a table by numbers that are loaded, or computed, before."""
        numbers, table = node.tensors
        out = self.group.placements[node.id]
        row = self.names.get(numbers) or self.load(numbers, out[:-1])
        view = self.views[table]
        strides = self.strides(out[-1:], view.strides[1:])
        rows = (view.strides[0], view.shape[0])
        kind = self.graph.types[table].dtype
        self.body.accesses.append(Access(view.base, kind, strides, offset=view.offset, table=rows))
        at = len(self.body.accesses) - 1
        self.names[node.id] = self.add(lambda n: Load(n, at, row))

    def source(self, node: Node) -> str:
        operand = node.tensors[0]
        if operand in self.names:
            return self.names[operand]
        placed = self.group.placements.get(operand)
        lead = len(self.group.space) - len(self.graph.types[operand].shape)
        shape = self.graph.types[operand].shape
        right = tuple(None if size == ONE else lead + axis for axis, size in enumerate(shape))
        return self.load(operand, placed or right)

    # Operands -------------------------------------------------------------------------------------

    def constant(self, ref: Ref) -> float | int | bool | None:
        """The number an operand is: a literal, or a `full` of one (through views)."""
        if not isinstance(ref, str):
            return ref
        node = self.producers.get(self.views[ref].base)
        if node is None or node.op != "full":
            return None
        value = node.attr("value")
        return value.static if isinstance(value, Dim) else value

    def operand(self, node: Node, position: int) -> str:
        ref = node.inputs[position]
        assert isinstance(ref, str)
        if ref in self.names:
            return self.names[ref]
        out = self.group.placements[node.id]
        rank, lead = len(self.graph.types[ref].shape), len(node.types[0].shape)
        sizes = self.graph.types[ref].shape
        placement = tuple(None if sizes[i] == ONE else out[lead - rank + i] for i in range(rank))
        return self.load(ref, placement)

    def strides(self, placement: Placement, strides: tuple[Dim, ...]) -> tuple[Dim, ...]:
        out = [ZERO] * len(self.group.space)
        for axis, stride in zip(placement, strides, strict=True):
            if axis is not None:
                out[axis] = stride
        return tuple(out)

    def load(self, value: str, placement: Placement) -> str:
        view = self.views[value]
        strides = self.strides(placement, view.strides)
        maker, dtype = self.producers.get(view.base), self.graph.types[view.base].dtype
        if maker is not None and maker.op == "full":
            return self.size(Dim.of(maker.attr("value")), dtype)
        if maker is not None and maker.op == "arange":
            return self.rounded(self.read(Access(INDEX, DType.int64, strides, offset=view.offset)), dtype)
        windows = tuple(replace(w, axis=_placed(placement, w.axis)) for w in view.windows)
        return self.read(
            Access(view.base, dtype, strides, offset=view.offset, windows=windows, fill=view.fill)
        )

    def read(self, access: Access) -> str:
        """The value behind an access, read once."""
        if access not in self.loaded:
            self.body.accesses.append(access)
            at = len(self.body.accesses) - 1
            self.loaded[access] = self.add(lambda n: Load(n, at))
        return self.loaded[access]

    def size(self, value: Dim, dtype: DType) -> str:
        """A symbolic size as a value of the body."""
        strides = (ZERO,) * len(self.group.space)
        return self.rounded(self.read(Access(INDEX, DType.int64, strides, offset=value)), dtype)

    def rounded(self, name: str, dtype: DType) -> str:
        """An integer in another type."""
        if dtype is DType.int64:
            return name
        key = f"{name}:{dtype.value}"
        if key not in self.names:
            self.names[key] = self.add(lambda n: Compute(n, Arg(0), (name,), dtype))
        return self.names[key]

    def store(self, value: str) -> None:
        kind = self.graph.types[value]
        strides = self.strides(self.group.placements[value], dense_strides(kind.shape))
        self.body.accesses.append(Access(value, kind.dtype, strides))
        self.body.stmts.append(Store(len(self.body.accesses) - 1, self.names[value]))


def _placed(placement: Placement, axis: int) -> int:
    """Axis of the space of an axis that is longer than 1."""
    at = placement[axis]
    assert at is not None
    return at


def finish_reduction(
    node: Node, graph: Graph, name: str, add: Callable[[Callable[[str], Stmt]], str],
    size: Callable[[Dim, DType], str],
) -> str:  # fmt: skip
    """Divide by the count for a mean and round to the node's dtype; `size` gives a symbolic size as a
    value.
    """
    low = OPS[node.op].lowering
    assert isinstance(low, Reduction)
    dtype = node.types[0].dtype
    source = graph.types[node.tensors[0]]
    expr: Expr = Arg(0)
    if low.mean:
        count = ONE
        for axis in node.attr("dims"):
            count = count * source.shape[axis]
        if count.static is None:
            divisor = size(count, source.dtype.compute)
            return add(lambda n: Compute(n, prim("div", Arg(0), Arg(1)), (name, divisor), dtype))
        expr = prim("div", Arg(0), count.static)
    if isinstance(expr, Arg) and dtype is source.dtype.compute:
        return name
    return add(lambda n: Compute(n, expr, (name,), dtype))


def collapse(
    space: tuple[Dim, ...], accesses: list[Access], *barriers: int | None
) -> tuple[tuple[Dim, ...], list[Access]]:
    """Merge adjacent axes that every access walks as one; never across a barrier (the row/column split)."""
    axes = [[i] for i in range(len(space)) if space[i] != ONE]
    merged: list[list[int]] = []
    for axis in axes:
        previous = merged[-1] if merged else None
        if (
            previous is not None
            and not any(b is not None and previous[-1] < b <= axis[0] for b in barriers)
            and all(_joins(a, previous[-1], axis[0], space) for a in accesses)
        ):
            previous.append(axis[0])
        else:
            merged.append(list(axis))
    sizes = []
    for group in merged:
        size = ONE
        for axis in group:
            size = size * space[axis]
        sizes.append(size)
    places = {axis: at for at, group in enumerate(merged) for axis in group}
    out = [
        replace(
            a, strides=tuple(a.strides[g[-1]] for g in merged),
            windows=tuple(replace(w, axis=places[w.axis]) for w in a.windows),
        )
        for a in accesses
    ]  # fmt: skip
    return tuple(sizes), out


def folded(
    space: tuple[Dim, ...], accesses: list[Access], split: int
) -> tuple[tuple[Dim, ...], list[Access]] | None:
    """The axes from `split` on as one. Accesses that do not walk them as one run keep their parts. None where
    windows move along several, or where memory does not run along the innermost one of several.
    """
    if len(space) - split == 1:
        return space, accesses
    if any(w.axis >= split for a in accesses for w in a.windows):
        return None
    sizes, width, out = space[split:], ONE, list[Access]()
    for size in sizes:
        width = width * size
    for a in accesses:
        steps = a.strides[split:]
        if a.buffer != INDEX and steps[-1] not in (ZERO, ONE, -ONE):
            return None
        run = a.partial or all(steps[i] == steps[i + 1] * sizes[i + 1] for i in range(len(sizes) - 1))
        parts = () if run else tuple(zip(sizes, steps, strict=True))
        out.append(replace(a, strides=(*a.strides[:split], steps[-1]), parts=parts))
    return (*space[:split], width), out


def _joins(access: Access, outer: int, inner: int, space: tuple[Dim, ...]) -> bool:
    if access.partial:
        return True
    if any(w.axis in (outer, inner) for w in access.windows):
        return False
    return access.strides[outer] == access.strides[inner] * space[inner]
