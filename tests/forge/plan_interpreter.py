"""A KernelPlan executed in plain torch, program by program: the second implementation of what a plan means.

`run_plan(plan, buffers, sizes)` reads and writes the tensors of `buffers` (dense memory, addressed by the
strides of the plan, so their shapes do not matter). It is slow and direct on purpose; the emitters are
tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, walk
from esper_ir.types import Dim, DType, promote
from forge.band import BandTile
from forge.plan import (
    INDEX,
    Access,
    ChainTile,
    Compute,
    GatherTile,
    JoinedTile,
    KernelPlan,
    Load,
    MatmulTile,
    PlaceTile,
    PointTile,
    Reduce,
    RowTile,
    Scan,
    ScanTile,
    Stmt,
    Store,
    SumTile,
)

Tensor = torch.Tensor
RowSum = Callable[[Tensor], Tensor]


def square_root(x: Tensor) -> Tensor:
    """Rounded correctly, which torch's own float32 square root (MKL's) is not everywhere."""
    return torch.sqrt(x.double()).to(x.dtype)


def reciprocal_root(x: Tensor) -> Tensor:
    return 1.0 / square_root(x)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sqrt": square_root,
    "rsqrt": reciprocal_root,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos,
    "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh,
    "acosh": torch.acosh, "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc,
    "sigmoid": torch.sigmoid, "isnan": torch.isnan,
}  # fmt: skip
ROUNDINGS = {"floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "pow": torch.pow, "fmod": torch.fmod,
    "atan2": torch.atan2, "maximum": torch.maximum, "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "quotient": lambda a, b: torch.where(b == 0, 0, a.div(torch.where(b == 0, 1, b), rounding_mode="trunc")),
}  # fmt: skip
LOGIC: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
}  # fmt: skip


def torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.value)


def run_plan(
    plan: KernelPlan,
    buffers: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    *,
    row_sum: RowSum | None = None,
    libraries: bool = True,
) -> None:
    """Execute every program of the plan in ascending order, writing into `buffers`.

    `row_sum` adds float values over the last axis in its own order (torch's when None). With `libraries`
    False the elementary functions are computed in float64 and rounded once."""
    run = _Run(plan, dict(buffers), dict(sizes), row_sum or (lambda x: x.sum(-1)), libraries)
    tiles = {RowTile: run.rows, PointTile: run.points, SumTile: run.sums, MatmulTile: run.products,
             ChainTile: run.chains, BandTile: run.bands, JoinedTile: run.joined,
             ScanTile: run.scans, PlaceTile: run.lists, GatherTile: run.gathers}  # fmt: skip
    tiles[type(plan.tile)]()


def interleaved_sum(lanes: int) -> RowSum:
    """The order of the C emitter: element j in lane j mod `lanes`, lanes added as a binary tree."""

    def add(x: Tensor) -> Tensor:
        width = -(-x.shape[-1] // lanes) * lanes
        padded = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        total = torch.zeros((*x.shape[:-1], lanes), dtype=x.dtype)
        for block in padded.split(lanes, -1):
            total = total + block
        while total.shape[-1] > 1:
            half = total.shape[-1] // 2
            total = total[..., :half] + total[..., half:]
        return total[..., 0]

    return add


@dataclass
class _Run:
    plan: KernelPlan
    buffers: dict[str, Tensor]
    sizes: dict[str, int]
    row_sum: RowSum
    libraries: bool
    dtypes: dict[str, DType] = field(init=False)

    def __post_init__(self) -> None:
        self.dtypes = self.plan.dtypes()
        self.space = [size.value(self.sizes) for size in self.plan.space]
        self.row_count, self.cols = math.prod(self.space[:-1]), self.space[-1]

    # Programs

    def rows(self) -> None:
        tile = self.plan.tile
        assert isinstance(tile, RowTile)
        for program, rows in enumerate(self.shares(tile)):
            self.one_row_program(program, rows, torch.arange(self.cols))

    def bands(self) -> None:
        """One part after the other; what is on chip only is memory that nobody else sees."""
        tile = self.plan.tile
        assert isinstance(tile, BandTile)
        memory = dict(self.buffers)
        for part in tile.parts:
            count = math.prod(size.value(self.sizes) for size in part.space[:-1])
            for access in part.accesses:
                if access.buffer in tile.inner and access.buffer not in memory:
                    whole = count if access.strides[-1] == Dim() else count * part.cols.value(self.sizes)
                    memory[access.buffer] = torch.full((whole,), math.nan, dtype=torch_dtype(access.dtype))
            run_plan(part, memory, self.sizes, row_sum=self.row_sum, libraries=self.libraries)

    def joined(self) -> None:
        """The parts in any order: the last one first."""
        tile = self.plan.tile
        assert isinstance(tile, JoinedTile)
        for part in tile.parts[::-1]:
            run_plan(part, self.buffers, self.sizes, row_sum=self.row_sum, libraries=self.libraries)

    def shares(self, tile: RowTile) -> list[Tensor]:
        """The rows of each program, in the order in which it takes them."""
        every = torch.arange(self.row_count)
        if not tile.programs:
            return list(every.split(tile.rows_per_program)) if self.row_count else []
        blocks = list(every.split(tile.block_rows))
        taken = [blocks[p :: tile.programs] for p in range(tile.programs)]
        order = [t[::-1] if tile.reverse else t for t in taken]
        return [torch.cat(t) if t else every[:0] for t in order]

    def one_row_program(self, program: int, rows: Tensor, cols: Tensor) -> None:
        values: dict[str, Tensor] = {}
        for stmt in self.plan.body:
            if isinstance(stmt, Reduce):
                values[stmt.name] = self.reduce(stmt, values[stmt.arg], len(rows), len(cols), values)
            else:
                self.step(stmt, values, rows[:, None], cols[None, :], program)

    def points(self) -> None:
        tile, total = self.plan.tile, self.row_count * self.cols
        assert isinstance(tile, PointTile)
        for first in range(0, total, tile.block):
            element = torch.arange(first, min(first + tile.block, total))
            values: dict[str, Tensor] = {}
            for stmt in self.plan.body:
                self.step(stmt, values, element // self.cols, element % self.cols, 0)

    def sums(self) -> None:
        tile = self.plan.tile
        assert isinstance(tile, SumTile)
        for first in range(0, self.cols, tile.block_cols):
            cols = torch.arange(first, min(first + tile.block_cols, self.cols))
            rows, values = torch.arange(self.row_count)[:, None], {}
            for stmt in self.plan.body:
                if isinstance(stmt, Reduce):
                    values[stmt.name] = self.reduce(stmt, values[stmt.arg], len(rows), len(cols), values)
                else:
                    self.step(stmt, values, rows, cols[None, :], 0)

    def scans(self) -> None:
        """All of the data at once, time step by time step in every running value."""
        values: dict[str, Tensor] = {}
        outer = math.prod(self.space[:-2])
        shape = (self.row_count, self.cols)
        for stmt in self.plan.body:
            if isinstance(stmt, Scan):
                args = [values[a].expand(shape).reshape(outer, -1, self.cols) for a in stmt.args]
                values[stmt.name] = running(stmt, args).reshape(shape)
            else:
                self.step(
                    stmt, values, torch.arange(self.row_count)[:, None], torch.arange(self.cols)[None], 0
                )

    def flat(self, access: Access, rows: int, cols: int) -> Tensor:
        """The memory of an access as [rows, cols]; a copy of it where a stride is negative."""
        strides = [s.value(self.sizes) for s in access.strides]
        memory, start = self.buffers[access.buffer].view(-1), access.offset.value(self.sizes)
        if min(strides) >= 0:
            return memory[start:].as_strided((rows, cols), strides)
        return memory[start + torch.arange(rows)[:, None] * strides[0] + torch.arange(cols) * strides[1]]

    def lists(self) -> None:
        """Positions by part of the table; a part keeps the order of its positions."""
        tile, (rows, count) = self.plan.tile, self.space
        assert isinstance(tile, PlaceTile)
        numbers, order, listed, starts = self.plan.accesses
        found = self.flat(numbers, 1, count)[0]
        at = 0
        for part, low in enumerate(range(0, rows, tile.rows)):
            mine = torch.nonzero((found >= low) & (found < min(low + tile.rows, rows)))[:, 0]
            self.buffers[starts.buffer][part] = at
            self.buffers[order.buffer][at : at + len(mine)] = mine.int()
            self.buffers[listed.buffer][at : at + len(mine)] = found[mine].int()
            at += len(mine)
            self.buffers[starts.buffer][part + 1] = at

    def gathers(self) -> None:
        tile, (rows, cols) = self.plan.tile, self.space
        assert isinstance(tile, GatherTile)
        values, order, listed, starts, out = self.plan.accesses
        count = len(self.buffers[order.buffer])
        given, table = self.flat(values, count, cols), self.flat(out, rows, cols)
        for row in range(rows):
            first, last = self.buffers[starts.buffer][row // tile.listed :][:2].tolist()
            total = torch.zeros(cols, dtype=torch_dtype(values.dtype.compute))
            for at in range(first, last):
                if int(self.buffers[listed.buffer][at]) == row:
                    total = total + given[int(self.buffers[order.buffer][at])]
            table[row] = total.to(table.dtype)

    def products(self) -> None:
        """The whole product at once; with a split, one float32 part per chunk of the contracted axis."""
        tile, spec = self.plan.tile, self.plan.matmul
        assert isinstance(tile, MatmulTile) and spec is not None
        m, n, k = *self.space, spec.k.value(self.sizes)
        a, *rights = (self.matrix(spec.a, (m, k)), *(self.matrix(b, (k, n)) for b in spec.operands[1:]))
        steps = -(-k // tile.block_k)
        chunk = -(-steps // tile.split_k) * tile.block_k
        starts = range(0, tile.split_k * chunk, chunk) if tile.split_k > 1 else (0,)
        for part, start in enumerate(starts):
            stop = min(start + chunk, k) if tile.split_k > 1 else k
            made = [a[:, start:stop] @ b[start:stop] if start < stop else torch.zeros(m, n, dtype=a.dtype)
                    for b in rights]  # fmt: skip
            if tile.split_k > 1:
                partial = next(x for x in self.plan.accesses if x.partial)
                self.buffers[partial.buffer].view(-1)[part * m * n : (part + 1) * m * n] = made[0].reshape(-1)
                continue
            values = dict(zip(self.plan.sums, made, strict=True))
            for stmt in self.plan.body:
                self.step(stmt, values, torch.arange(m)[:, None], torch.arange(n)[None, :], 0)

    def chains(self) -> None:
        """Both products whole, the first one's body between them."""
        chain = self.plan.chain
        assert chain is not None and chain.head.matmul is not None
        first = _Run(chain.head, self.buffers, self.sizes, self.row_sum, self.libraries)
        (m, r), spec = first.space, chain.head.matmul
        k = spec.k.value(self.sizes)
        values = {"acc": first.matrix(spec.a, (m, k)) @ first.matrix(spec.b, (k, r))}
        for stmt in chain.head.body:
            first.step(stmt, values, torch.arange(m)[:, None], torch.arange(r)[None, :], 0)
        link = values[chain.link].expand(m, r)
        values = {"acc": link @ self.matrix(chain.b, (r, self.cols))}
        for stmt in self.plan.body:
            self.step(stmt, values, torch.arange(m)[:, None], torch.arange(self.cols)[None, :], 0)

    def matrix(self, access: Access, shape: tuple[int, int]) -> Tensor:
        return self.flat(access, *shape).to(torch_dtype(access.dtype.compute))

    # Statements

    def step(self, stmt: Stmt, values: dict[str, Tensor], rows: Tensor, cols: Tensor, program: int) -> None:
        if isinstance(stmt, Load):
            access = self.plan.accesses[stmt.access]
            if access.buffer == INDEX:
                values[stmt.name] = self.place(access, rows, cols, program).to(torch_dtype(access.dtype))
                return
            flat = self.buffers[access.buffer].view(-1)
            if access.table is not None:
                values[stmt.name] = self.rows_of(access, values[stmt.row], rows, cols, program)
                return
            at, inside = self.place(access, rows, cols, program), self.inside(access, rows, cols)
            found = flat[at if inside is None else torch.where(inside, at, 0)]
            if inside is not None:
                found = torch.where(inside, found, torch.tensor(access.fill, dtype=found.dtype))
            values[stmt.name] = found.to(torch_dtype(access.dtype.compute))
        elif isinstance(stmt, Compute):
            args = [values[a] for a in stmt.args]
            values[stmt.name] = self.compute(stmt, args)
        elif isinstance(stmt, Store):
            access = self.plan.accesses[stmt.access]
            flat = self.buffers[access.buffer].view(-1)
            assert flat.dtype is torch_dtype(access.dtype), f"{access.buffer}: {flat.dtype}"
            at, value = torch.broadcast_tensors(self.place(access, rows, cols, program), values[stmt.value])
            inside = self.inside(access, rows, cols)
            if inside is not None:
                inside = inside.expand(at.shape)
                at, value = at[inside], value[inside]
            flat[at] = value.to(flat.dtype)

    def rows_of(self, access: Access, row: Tensor, rows: Tensor, cols: Tensor, program: int) -> Tensor:
        assert access.table is not None
        stride, count = (d.value(self.sizes) for d in access.table)
        exists = (row >= 0) & (row < count)
        at = self.place(access, rows, cols, program) + torch.where(exists, row.long(), 0) * stride
        found = self.buffers[access.buffer].view(-1)[at].to(torch_dtype(access.dtype.compute))
        return torch.where(exists, found, torch.tensor(math.nan, dtype=found.dtype))

    def place(self, access: Access, rows: Tensor, cols: Tensor, program: int) -> Tensor:
        if access.partial and isinstance(self.plan.tile, RowTile):
            copies = sum(a.partial and a.buffer == access.buffer for a in self.plan.accesses)
            return program * self.cols * copies + access.offset.value(self.sizes) + cols
        at = torch.tensor(access.offset.value(self.sizes))
        for axis, position in self.positions(rows, cols).items():
            stride, window = access.strides[axis].value(self.sizes), access.window(axis)
            if window is not None:
                position = (position * window.mul + window.add).div(window.div, rounding_mode="floor")
            at = at + position * stride if axis in access.axes and not self.apart(access, axis) else at
        rest = cols
        for size, stride in reversed(access.parts):
            count, step = size.value(self.sizes), stride.value(self.sizes)
            at, rest = at + rest % count * step, rest // count
        return at

    def apart(self, access: Access, axis: int) -> bool:
        return bool(access.parts) and axis == len(self.space) - 1

    def positions(self, rows: Tensor, cols: Tensor) -> dict[int, Tensor]:
        """Along every axis of the space, outermost last."""
        last, rest = len(self.space) - 1, rows
        out = {last: cols}
        for axis in reversed(range(last)):
            out[axis], rest = rest % self.space[axis], rest // self.space[axis]
        return out

    def inside(self, access: Access, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Where the windows of an access have an element; None without windows."""
        out: Tensor | None = None
        for axis, position in self.positions(rows, cols).items():
            window = access.window(axis)
            if window is not None:
                place = (position * window.mul + window.add).div(window.div, rounding_mode="floor")
                found = (place >= 0) & (place < window.size.value(self.sizes))
                out = found if out is None else out & found
        return out

    def reduce(self, stmt: Reduce, arg: Tensor, rows: int, cols: int, values: Mapping[str, Tensor]) -> Tensor:
        full = arg.expand(rows, cols)
        if stmt.combine in ("squares", "rest"):
            return moments(stmt, full, values)
        dim = 1 if stmt.axis == "row" else 0
        if full.shape[dim] == 0 and stmt.combine != "sum":
            limit = math.inf if stmt.combine == "min" else -math.inf
            return torch.full((1, cols) if dim == 0 else (rows, 1), limit).to(full.dtype)
        if stmt.combine in ("max", "min"):
            out = full.amax(dim) if stmt.combine == "max" else full.amin(dim)
        elif dim == 1:
            out = self.row_sum(full) if full.is_floating_point() else full.sum(1, dtype=full.dtype)
        else:
            out = torch.zeros(cols, dtype=full.dtype)
            for row in full:
                out = out + row
        return out.unsqueeze(dim)

    # Scalars

    def compute(self, stmt: Compute, args: Sequence[Tensor]) -> Tensor:
        dtypes = [self.dtypes[a] for a in stmt.args]
        out = self.body(stmt.expr, args, dtypes, stmt.dtype)
        return _round(out, stmt.dtype)

    def body(self, expr: Expr, args: Sequence[Tensor], dtypes: Sequence[DType], result: DType) -> Tensor:
        """An expression in the type of its result when that is floating, else in that of its operands."""
        if isinstance(expr, Arg):
            return args[expr.index]
        if isinstance(expr, Cast):
            return _round(self.body(expr.arg, args, dtypes, expr.dtype), expr.dtype)
        kind = result.compute if result.is_floating else None
        for leaf in _leaves(expr, dtypes):
            if leaf is not DType.bool and (leaf.is_floating or not result.is_floating):
                kind = leaf.compute if kind is None else promote(kind, leaf.compute)
        kind = kind or DType.int32
        if not kind.is_floating and any(
            isinstance(e, Const) and isinstance(e.value, float) for e in walk(expr)
        ):
            kind = DType.float32
        return self.value(expr, args, dtypes, torch_dtype(kind))

    def value(self, expr: Expr, args: Sequence[Tensor], dtypes: Sequence[DType], kind: torch.dtype) -> Tensor:
        if isinstance(expr, Const):
            return torch.tensor(expr.value, dtype=kind)
        if isinstance(expr, Arg):
            return args[expr.index]
        if isinstance(expr, Cast):
            return self.body(expr, args, dtypes, expr.dtype)
        operands = [self.value(a, args, dtypes, kind) for a in expr.args]
        return self.prim(expr, operands, kind)

    def prim(self, expr: Prim, operands: list[Tensor], kind: torch.dtype) -> Tensor:
        name = expr.name
        if name in LOGIC:
            return LOGIC[name](*operands)
        if name == "where":
            a, b = (o if o.dtype is kind or o.dtype is torch.bool else o.to(kind) for o in operands[1:])
            same = a.dtype is b.dtype
            return torch.where(operands[0] != 0, a if same else a.to(kind), b if same else b.to(kind))
        numbers = [o.to(kind) for o in operands]
        if name in ROUNDINGS:
            return ROUNDINGS[name](numbers[0]) if kind.is_floating_point else numbers[0]
        if name == "div":
            whole = None if kind.is_floating_point else "trunc"
            return torch.div(numbers[0], numbers[1], rounding_mode=whole)
        function = UNARY.get(name) or BINARY[name]
        if kind is torch.float32 and not self.libraries and name not in ("rsqrt", "sqrt"):
            out = function(*(n.double() for n in numbers))
            return out.to(kind) if out.is_floating_point() else out
        return function(*numbers)


def moments(stmt: Reduce, full: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Squares about the mean down the columns, or what the rounded mean leaves, in double: two passes."""
    wide, kind = full.double(), full.dtype
    if len(stmt.about) > 1:
        count, *parts = (values[name].double().expand_as(wide) for name in stmt.about)
        mean = parts[0] + parts[1]
        whole = (mean * count).sum(0) / count.sum(0)
        return (wide + torch.where(count > 0, count * (mean - whole).square(), 0.0)).sum(0)[None].to(kind)
    mean = wide.mean(0)
    if stmt.combine == "rest":
        total = next(iter(stmt.about))
        rounded = values[total][0] / max(len(full), 1)
        return (mean - rounded.double() if len(full) else torch.zeros_like(mean))[None].to(kind)
    return (wide - mean).square().sum(0)[None].to(kind)


def running(stmt: Scan, args: Sequence[Tensor]) -> Tensor:
    """Values [outer, time, columns] of a running value; sums and products in double."""
    kind = args[-1].dtype
    wide = [a.double() for a in args] if stmt.combine in ("sum", "prod") else list(args)
    if stmt.reverse:
        wide = [a.flip(1) for a in wide]
    simple = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}
    if stmt.combine in simple:
        made = simple[stmt.combine](wide[0], 1)
    else:
        state, steps = torch.zeros_like(wide[0][:, 0]), []
        for a, b in zip(wide[0].unbind(1), wide[1].unbind(1), strict=True):
            state = a * state + b
            steps.append(state)
        made = torch.stack(steps, 1)
    return (made.flip(1) if stmt.reverse else made).to(kind)


def _leaves(expr: Expr, dtypes: Sequence[DType]) -> list[DType]:
    if isinstance(expr, Arg):
        return [dtypes[expr.index]]
    if isinstance(expr, Cast):
        return [expr.dtype]
    return [leaf for a in expr.args for leaf in _leaves(a, dtypes)] if isinstance(expr, Prim) else []


def _round(value: Tensor, dtype: DType) -> Tensor:
    """Rounded to a stored type, held in its compute type."""
    kind = torch_dtype(dtype)
    return value.to(kind).to(torch_dtype(dtype.compute))
